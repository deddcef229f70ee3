"""What a source computed on the way to its logits: its residual stream after every layer, in files that stay on disk.

A trace is a folder: `residual.f32` [layers + 1, tokens, D], the first entry being the embedding; `final_norm.f32`
[tokens, D]; and `operation-N.f32` [tokens, width] for each operation of one layer. Tokens of a plan's examples lie one
after another, and everything is float32, little-endian. Files are mapped, so memory does not grow with a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from receipts.errors import EngineFailedError
from teacher.process.sources import Plan

F32 = npt.NDArray[np.float32]
_DTYPE = np.dtype("<f4")
_RESIDUAL, _FINAL_NORM = "residual.f32", "final_norm.f32"


def plan_tokens(plan: Plan) -> int:
    """Return how many tokens the examples of a plan hold together."""
    return sum(len(example.token_ids) for example in plan.examples)


class TraceWriter:
    """Fills a trace as its source runs.

    Args:
        folder: an empty folder.
        layers, width: decoder layers, and D.
        plan: what is traced.
    """

    def __init__(self, folder: Path, *, layers: int, width: int, plan: Plan) -> None:
        self.layers, self.width = layers, width
        self._folder, self._tokens = folder, plan_tokens(plan)
        shape = (layers + 1, self._tokens, width)
        self._residual = np.memmap(folder / _RESIDUAL, dtype=_DTYPE, mode="w+", shape=shape)
        self._final = np.memmap(folder / _FINAL_NORM, dtype=_DTYPE, mode="w+", shape=shape[1:])
        self._operations: dict[str, np.memmap[Any, Any]] = {}
        self._rows: dict[str, int] = {}

    def residual(self, layer: int, first: int, rows: F32) -> None:
        """Keep the stream after a layer, -1 being the embedding; `first` is the first token's place in the plan."""
        self._put(f"residual {layer}", self._residual[layer + 1], first, rows)

    def final_norm(self, first: int, rows: F32) -> None:
        """Keep the final norm's result."""
        self._put("final norm", self._final, first, rows)

    def operation(self, name: str, first: int, rows: F32) -> None:
        """Keep an operation's result."""
        if name not in self._operations:
            path = self._folder / f"operation-{len(self._operations)}.f32"
            shape = (self._tokens, rows.shape[1])
            self._operations[name] = np.memmap(path, dtype=_DTYPE, mode="w+", shape=shape)
        self._put(f"operation {name}", self._operations[name], first, rows)

    def finish(self) -> dict[str, Any]:
        """Write everything out; return what a reader needs.

        Raises:
            EngineFailedError: a layer or the final norm was not told for every token.
        """
        wanted = ["final norm", *(f"residual {layer}" for layer in range(-1, self.layers))]
        wanted += [f"operation {name}" for name in self._operations]
        for name in wanted:
            if self._rows.get(name) != self._tokens:
                raise EngineFailedError(
                    f"trace: expected {name} of {self._tokens} tokens, got {self._rows.get(name, 0)}"
                )
        for array in (self._residual, self._final, *self._operations.values()):
            array.flush()
        widths = {name: array.shape[1] for name, array in self._operations.items()}
        return {"shape": list(self._residual.shape), "operations": list(widths.items())}

    def _put(self, name: str, target: F32, first: int, rows: F32) -> None:
        target[first : first + rows.shape[0]] = rows
        self._rows[name] = self._rows.get(name, 0) + rows.shape[0]


class Trace:
    """A finished trace.

    Args:
        folder: of its files.
        facts: what `TraceWriter.finish` returned; kept under this name.
    """

    def __init__(self, folder: Path, facts: Mapping[str, Any]) -> None:
        self.facts = dict(facts)
        shape: Sequence[int] = facts["shape"]
        self._residual = np.memmap(folder / _RESIDUAL, dtype=_DTYPE, mode="r", shape=tuple(shape))
        self._final = np.memmap(folder / _FINAL_NORM, dtype=_DTYPE, mode="r", shape=tuple(shape[1:]))
        self._operations = {
            name: np.memmap(folder / f"operation-{i}.f32", dtype=_DTYPE, mode="r", shape=(shape[1], width))
            for i, (name, width) in enumerate(facts["operations"])
        }

    def residual(self, layer: int) -> F32:
        """Return the stream after a layer, [tokens, D]; -1 is the embedding."""
        return np.array(self._residual[layer + 1])

    def narrowest(self) -> str | None:
        """Return the type narrower than float32 that holds every value of the stream behind the first layer's input.

        A value is 24 bits wide; that all of them end in 13 or 16 zeros is no accident.
        """
        layers = [array.view(np.uint32) for array in self._residual[1:]]
        for name, low in (("bfloat16", 0xFFFF), ("float16 or TF32", 0x1FFF)):
            if layers and not any(np.any(bits & np.uint32(low)) for bits in layers):
                return name
        return None

    def final_norm(self) -> F32:
        """Return the final norm's result, [tokens, D]."""
        return np.array(self._final)

    def operation(self, name: str) -> F32 | None:
        """Return an operation's result, [tokens, width], or None where the source does not show it."""
        found = self._operations.get(name)
        return None if found is None else np.array(found)
