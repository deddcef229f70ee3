"""The F64 definition as a logit source, for a few dozen tokens when teacher and PyTorch disagree."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from teacher.model.arbiter import forward
from teacher.process.sources import LogitBlock, Plan
from teacher.run.replay import call_spans
from teacher.snapshot.folder import read_snapshot
from teacher.snapshot.weights import WeightSource


class ArbiterSource:
    """`teacher.model.arbiter` behind `teacher.process.sources.LogitSource`.

    Its logits are rounded to float32 at the very end: 2^-24 of a value, which is 1e-14 nats.

    Args:
        threads: of the BLAS, which took its number from the environment.
        snapshot: folder of the snapshot.
    """

    def __init__(self, *, threads: int, snapshot: str) -> None:
        self._snapshot = read_snapshot(snapshot)

    def describe(self) -> dict[str, Any]:
        """Return what it is."""
        return {"engine": "numpy", "dtype": "float64", "numpy_version": np.__version__}

    def blocks(self, plan: Plan) -> Iterator[LogitBlock]:
        """Yield the logits of each call; calls do not enter the definition."""
        for index, example in enumerate(plan.examples):
            logits = forward(WeightSource(self._snapshot), self._snapshot.config, example.token_ids)
            for call, (start, stop) in enumerate(call_spans(example.calls)):
                rows = logits[start:stop].astype(np.float32)
                yield LogitBlock(example=index, call=call, position=start, logits=rows)
