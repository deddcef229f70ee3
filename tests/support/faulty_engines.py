"""Engines and teachers with one fault each, for the fault matrix.

The engines are teacher math on a GGUF's weights, one example after another, so that nothing but the planted fault is
wrong with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import teacher.diagnose.locator as locator
import teacher.run.replay as replay
import teacher.sides.teacher_source as teacher_source
from receipts.cache_plan import plan_cache
from teacher.audit.mapping import map_tensors
from teacher.backend.device import mx
from teacher.backend.precision import measure
from teacher.gguf.weights import GgufWeights
from teacher.model.blocks import apply_layer, no_tap, prepare_layer
from teacher.model.cache import FullSlot, LinearSlot, allocate_slot
from teacher.model.head import OutputHead, embed
from teacher.process.sources import LogitBlock
from teacher.run.replay import call_spans
from teacher.sides.teacher_source import TeacherSource
from teacher.snapshot.folder import read_snapshot

SNAPSHOT = Path(__file__).parents[2] / "golden" / "qwen35-tiny"


class SoundEngine:
    """No fault: what the others are compared with."""

    def __init__(self, *, threads: int, gguf: str, max_sequence_tokens: int, max_call_tokens: int) -> None:
        self.config = read_snapshot(str(SNAPSHOT)).config
        self._weights = GgufWeights(Path(gguf), self.config)
        self._layers = [
            prepare_layer(self._weights.layer(i), folded=True) for i in range(self.config.num_hidden_layers)
        ]
        self._head = OutputHead(self._weights, self.config)
        plan = plan_cache(self.config.cache_sizes(), max_sequence_tokens)
        self.slots = [allocate_slot(plan, layer) for layer in range(len(self._layers))]
        self.trace_to: Any = None

    def describe(self) -> dict[str, Any]:
        return {"engine": type(self).__name__}

    def blocks(self, plan: Any) -> Iterator[LogitBlock]:
        first = 0
        for index, example in enumerate(plan.examples):
            self.begin(example.token_ids)
            for call, (start, stop) in enumerate(call_spans(example.calls)):
                normed = self.step(example.token_ids, start, stop, first)
                rows = np.concatenate(list(self._head.logits(normed)))
                yield LogitBlock(example=index, call=call, position=start, logits=rows)
                self.between()
            self.end(example.token_ids)
            first += len(example.token_ids)

    def trace(self, plan: Any, writer: Any, layer: int | None, kind: str | None) -> None:
        self.trace_to = (writer, layer)
        for _ in self.blocks(plan):
            pass

    def step(self, ids: tuple[int, ...], start: int, stop: int, first: int) -> mx.array:
        """Run one call; return the final norm's rows."""
        x = embed(self._weights, ids[start:stop])
        writer, traced = self.trace_to or (None, None)
        if writer:
            writer.residual(-1, first + start, np.array(x))
        for layer, weights in enumerate(self._layers):
            tap = no_tap if layer != traced else self._tap(writer, layer, first + start)
            x = apply_layer(x, weights, self.config, self.slots[layer], start, tap)
            if writer:
                writer.residual(layer, first + start, np.array(x))
        normed = self._head.normalise(x)
        if writer:
            writer.final_norm(first + start, np.array(normed))
        return normed

    def _tap(self, writer: Any, layer: int, first: int) -> Any:
        orders = {one.kind: one.rows for one in map_tensors(self.config) if one.layer == layer}

        def tap(name: str, result: mx.array) -> None:
            rows = np.array(result).reshape(result.shape[0], -1)
            order = orders.get(locator.ENGINE_ORDER.get(name, ""))
            writer.operation(name, first, rows if order is None else rows[:, order])

        return tap

    def begin(self, ids: tuple[int, ...]) -> None:
        for slot in self.slots:
            slot.reset()

    def between(self) -> None:
        """After each call."""

    def end(self, ids: tuple[int, ...]) -> None:
        """After each example."""


class CacheNotReset(SoundEngine):
    """Recurrent state and convolution history of the last example stay; keys and values are written over."""

    def begin(self, ids: tuple[int, ...]) -> None:
        for slot in self.slots:
            if isinstance(slot, FullSlot):
                slot.reset()


class ConvolutionOffByOne(SoundEngine):
    """After each call the convolution's history is one token too old."""

    def between(self) -> None:
        for slot in self.slots:
            if isinstance(slot, LinearSlot):
                history, state = slot.read()
                slot.write(mx.concatenate([mx.zeros_like(history[:, :1]), history[:, :-1]], axis=1), state)


class WrongPromptCache(SoundEngine):
    """An example that begins like an earlier one takes the recurrent state from where that one ended."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._kept: list[tuple[tuple[int, ...], list[Any]]] = []

    def begin(self, ids: tuple[int, ...]) -> None:
        super().begin(ids)
        for before, states in self._kept:
            if before[:16] == ids[:16]:
                for slot, state in zip(self.slots, states, strict=True):
                    if isinstance(slot, LinearSlot):
                        slot.write(*state)

    def end(self, ids: tuple[int, ...]) -> None:
        self._kept.append((ids, [slot.read() if isinstance(slot, LinearSlot) else None for slot in self.slots]))


class WrongScaleEngine(SoundEngine):
    """The attention of layer 3 scales its scores by half of what it should."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        mixer = self._layers[3].mixer
        object.__setattr__(mixer, "q_norm", mixer.q_norm * 0.5)


class RoundedStreamTeacher(TeacherSource):
    """A teacher whose residual stream is rounded to BF16 after each layer, as a BF16 framework has it."""

    def __init__(self, **settings: Any) -> None:
        _round_streams()
        super().__init__(**settings)

    @staticmethod
    def answer(question: Any, spec: Any, on_progress: Any) -> Any:
        _round_streams()
        return TeacherSource.answer(question, spec, on_progress)


def _round_streams() -> None:
    def rounded(*arguments: Any) -> mx.array:
        return apply_layer(*arguments).astype(mx.bfloat16).astype(mx.float32)

    replay.apply_layer = locator.apply_layer = rounded


class Tf32Teacher(TeacherSource):
    """A teacher on a device that rounds the inputs of its products to TF32."""

    def __init__(self, **settings: Any) -> None:
        def tf32(values: np.ndarray) -> np.ndarray:
            return ((values.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)

        teacher_source.measure = lambda: measure(lambda a, w: tf32(a) @ tf32(w).T)
        super().__init__(**settings)
