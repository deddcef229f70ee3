"""Errors layer by layer, in the teacher's process: every side's layer against teacher math on the same input.

One layer's weights are in memory at a time: the source's, then the GGUF's, then the source quantized honestly by the
GGUF's types. A side's own layer is judged from the stream that it had before it, so that an error shows where it is
made and not where it ends up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from receipts.cache_plan import CachePlan, plan_cache
from receipts.diagnosis import EndError, LayerError, OperationError
from teacher.audit.mapping import Order, map_tensors
from teacher.backend.device import mx
from teacher.gguf.weights import GgufWeights, RequantizedWeights
from teacher.model.blocks import LayerWeights, Tap, apply_layer, no_tap, prepare_layer, rms_norm, widen
from teacher.model.cache import allocate_slot
from teacher.process.sources import plain_plan
from teacher.process.traces import Trace, TraceWriter
from teacher.run.replay import call_spans
from teacher.snapshot.config import ModelConfig
from teacher.snapshot.folder import read_snapshot
from teacher.snapshot.weights import Weights, WeightSource

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
Taps = dict[str, F32]

ENGINE_ORDER = {
    "query, key and value projection": "attn_qkv",
    "convolution": "attn_qkv",
    "decay": "ssm_alpha",
    "beta": "ssm_beta",
    "delta rule": "attn_gate",
    "gate projection": "attn_gate",
    "gated norm": "attn_gate",
}
"""An operation -> the GGUF tensor whose order of value heads its result has in an engine's trace."""


class Locator:
    """Compares traces with teacher math.

    Args:
        question: "plan", "gguf", "max_sequence_tokens", "folder" of the teacher's own
            trace, and "candidate" and "reference", each the folder and facts of a trace, or None.
        spec: the teacher's settings; its "snapshot" is used.
    """

    def __init__(self, question: Mapping[str, Any], spec: Mapping[str, Any]) -> None:
        self._snapshot = read_snapshot(spec["snapshot"])
        self._config: ModelConfig = self._snapshot.config
        self._plan = plain_plan(question["plan"])
        self._ids = [token for example in self._plan.examples for token in example.token_ids]
        self._cache: CachePlan = plan_cache(self._config.cache_sizes(), question["max_sequence_tokens"])
        self._source = WeightSource(self._snapshot)
        self._gguf = GgufWeights(Path(question["gguf"]), self._config)
        self._honest = RequantizedWeights(self._snapshot, self._gguf)
        self._folder = Path(question["folder"])
        self._candidate = _trace(question["candidate"])
        self._reference = _trace(question["reference"])
        first_calls = [np.arange(len(example.token_ids)) < example.calls[0] for example in self._plan.examples]
        self._first_calls = np.concatenate(first_calls)

    def locate(self, on_layer: Callable[[int, int, str], Any]) -> dict[str, Any]:
        """Return {"ends": [EndError], "layers": [LayerError], "operations": [], "teacher": facts of its trace}."""
        layers = self._config.num_hidden_layers
        writer = TraceWriter(self._folder, layers=layers, width=self._config.hidden_size, plan=self._plan)
        x = _embed(self._source, self._ids)
        free = _embed(self._gguf, self._ids)
        embedding = EndError(
            place="embedding",
            weights=rms(relative(free, x)),
            reachable=rms(relative(_embed(self._honest, self._ids), x)),
            engine=None if self._candidate is None else rms(relative(self._candidate.residual(-1), free)),
            reference=None if self._reference is None else rms(relative(self._reference.residual(-1), x)),
        )
        found = []
        writer.residual(-1, 0, x)
        for layer in range(layers):
            error, x, free = self._layer(layer, x, free)
            writer.residual(layer, 0, x)
            found.append(asdict(error))
            on_layer(layer + 1, layers, "layers")
        normed = self._normed(self._source, x)
        writer.final_norm(0, normed)
        ends = [asdict(embedding), asdict(self._final(x, normed))]
        return {"ends": ends, "layers": found, "operations": [], "teacher": writer.finish()}

    def locate_alone(self, layer: int) -> dict[str, Any]:
        """Return the same of one layer and its operations, on a stream that another side has before it."""
        shown = self._reference or self._candidate
        assert shown is not None
        x = shown.residual(layer - 1)
        error, _, _ = self._layer(layer, x, x)
        alone = replace(error, reference=None, weights=None, candidate=None)  # errors of a stream need all layers
        return {"ends": [], "layers": [asdict(alone)], "operations": self._operations(layer, x), "teacher": None}

    def operations(self, layer: int, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the OperationErrors of one layer, plain; its streams come from the traces.

        Args:
            layer: index.
            facts: of the teacher's trace.
        """
        return self._operations(layer, Trace(self._folder, facts).residual(layer - 1))

    def _operations(self, layer: int, x: F32) -> list[dict[str, Any]]:
        before = layer - 1
        exact, weights, reachable = (
            self._taps(weights, layer, x) for weights in (self._source, self._gguf, self._honest)
        )
        engine: Taps = {}
        if self._candidate is not None:
            engine = self._taps(self._gguf, layer, self._candidate.residual(before))
        reference: Taps = {}
        if self._reference is not None:
            reference = self._taps(self._source, layer, self._reference.residual(before))
        orders = {one.kind: one.rows for one in map_tensors(self._config) if one.layer == layer}
        return [
            asdict(
                OperationError(
                    layer=layer,
                    operation=name,
                    weights=rms(relative(weights[name], exact[name])),
                    reachable=rms(relative(reachable[name], exact[name])),
                    engine=_shown(self._candidate, name, engine, orders.get(ENGINE_ORDER.get(name, ""))),
                    reference=_shown(self._reference, name, reference, None),
                )
            )
            for name in exact
        ]

    def _layer(self, layer: int, x: F32, free: F32) -> tuple[LayerError, F32, F32]:
        """Return the errors of a layer, and the streams after it on the source's and on the GGUF's weights."""
        reference = _around(self._reference, layer)
        candidate = _around(self._candidate, layer)
        prepared = self._prepare(self._source, layer)
        after = self._run(prepared, layer, x)
        alone_reference = None
        if reference is not None:
            alone_reference = rms(relative(reference[1], self._run(prepared, layer, reference[0]), reference[0]))
        del prepared  # one layer's weights at a time
        prepared = self._prepare(self._gguf, layer)
        on_gguf = self._run(prepared, layer, x)
        free = self._run(prepared, layer, free)
        engine = None
        if candidate is not None:
            engine = relative(candidate[1], self._run(prepared, layer, candidate[0]), candidate[0])
        del prepared
        honest = self._run(self._prepare(self._honest, layer), layer, x)
        first = self._first_calls
        error = LayerError(
            layer=layer,
            kind=self._config.layer_types[layer],
            reference=None if reference is None else rms(relative(reference[1], after)),
            weights=rms(relative(free, after)),
            candidate=None if candidate is None else rms(relative(candidate[1], after)),
            alone_reference=alone_reference,
            alone_weights=rms(relative(on_gguf, after, x)),
            alone_reachable=rms(relative(honest, after, x)),
            alone_engine=None if engine is None else rms(engine),
            alone_engine_first_calls=None if engine is None else rms(engine[first]),
            alone_engine_later_calls=None if engine is None else rms(engine[~first]),
        )
        return error, after, free

    def _final(self, x: F32, normed: F32) -> EndError:
        last = self._config.num_hidden_layers - 1
        engine = reference = None
        if self._candidate is not None:
            expected = self._normed(self._gguf, self._candidate.residual(last))
            engine = rms(relative(self._candidate.final_norm(), expected))
        if self._reference is not None:
            expected = self._normed(self._source, self._reference.residual(last))
            reference = rms(relative(self._reference.final_norm(), expected))
        return EndError(
            place="final norm",
            weights=rms(relative(self._normed(self._gguf, x), normed)),
            reachable=0.0,  # converters keep norms in F32
            engine=engine,
            reference=reference,
        )

    def _normed(self, weights: Weights, x: F32) -> F32:
        scale = widen(weights.final_norm())
        scale = scale if weights.folded else 1.0 + scale
        return np.array(rms_norm(mx.array(x), scale, self._config.rms_norm_eps))

    def _prepare(self, weights: WeightSource | GgufWeights | RequantizedWeights, layer: int) -> LayerWeights:
        return prepare_layer(weights.layer(layer), folded=weights.folded)

    def _taps(self, weights: WeightSource | GgufWeights | RequantizedWeights, layer: int, x: F32) -> Taps:
        """Return the result of each operation of a layer, [tokens, width]."""
        parts: dict[str, list[F32]] = {}

        def tap(name: str, result: mx.array) -> None:
            parts.setdefault(name, []).append(np.array(result).reshape(result.shape[0], -1))

        self._run(self._prepare(weights, layer), layer, x, tap)
        return {name: np.concatenate(arrays) for name, arrays in parts.items()}

    def _run(self, prepared: LayerWeights, layer: int, x: F32, tap: Tap = no_tap) -> F32:
        """Run one layer over every call of every example, from a fresh slot for each; [tokens, D] to [tokens, D]."""
        slot = allocate_slot(self._cache, layer)
        after = np.empty_like(x)
        at = 0
        for example in self._plan.examples:
            for start, stop in call_spans(example.calls):
                rows = mx.array(x[at + start : at + stop])
                after[at + start : at + stop] = np.array(apply_layer(rows, prepared, self._config, slot, start, tap))
            slot.reset()
            at += len(example.token_ids)
        return after


def answer(question: Mapping[str, Any], spec: Mapping[str, Any], on_progress: Callable[[int, int, str], Any]) -> Any:
    """Answer {"locate": ..., "layer": one layer alone, or None}, or {"operations": ...} of a "layer" and "facts"."""
    if "locate" in question:
        locator = Locator(question["locate"], spec)
        only = question["layer"]
        return locator.locate(on_progress) if only is None else locator.locate_alone(only)
    inner = question["operations"]
    return Locator(inner, spec).operations(inner["layer"], inner["facts"])


def relative(actual: F32, expected: F32, base: F32 | None = None) -> F64:
    """Return the norm of each row's error over that of the expected row, less `base`; [tokens].

    Rows count alike: a few of a real model's have a hundred times the norm of the others, and would hide them.
    """
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        error = np.linalg.norm(actual.astype(np.float64) - expected, axis=1)
        size = np.linalg.norm(expected if base is None else expected.astype(np.float64) - base, axis=1)
        return np.where(error == 0, 0.0, error / size)


def rms(errors: F64) -> float | None:
    """Return the root of the mean square; None where there is none, or one is not finite."""
    if errors.size == 0 or not np.isfinite(errors).all():
        return None
    return float(np.sqrt(np.mean(np.square(errors))))


def _shown(trace: Trace | None, name: str, expected: Taps, order: Order | None) -> float | None:
    """Return the error of an operation that a side shows, its value heads put back into the source's order."""
    actual = None if trace is None else trace.operation(name)
    if actual is None:
        return None
    if order is not None:
        back = np.empty_like(actual)
        back[:, order] = actual
        actual = back
    return rms(relative(actual, expected[name]))


def _embed(weights: WeightSource | GgufWeights | RequantizedWeights, ids: list[int]) -> F32:
    return weights.embedding_rows(ids).float32()


def _around(trace: Trace | None, layer: int) -> tuple[F32, F32] | None:
    """Return a side's stream before and after a layer."""
    return None if trace is None else (trace.residual(layer - 1), trace.residual(layer))


def _trace(form: Mapping[str, Any] | None) -> Trace | None:
    return None if form is None else Trace(Path(form["folder"]), form["facts"])
