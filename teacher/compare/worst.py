"""The positions at which two sides differ most, with what either would have said."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from teacher.compare.metrics import top_ids

TOP: Final = 5
Rows = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorstRow:
    """One position.

    Attributes:
        example, position: its place in the plan.
        kl_nats: KL(expected || actual).
        expected_top, actual_top: pairs (token id, probability over the real vocabulary), the likeliest first.
    """

    example: int
    position: int
    kl_nats: float
    expected_top: tuple[tuple[int, float], ...]
    actual_top: tuple[tuple[int, float], ...]


class WorstRows:
    """Keeps the worst positions of a comparison while it goes by; of equal ones the first.

    Args:
        count: how many are kept.
        real_vocabulary: first entries of a row that the tokenizer can produce.
    """

    def __init__(self, count: int, real_vocabulary: int) -> None:
        self._count, self._real_vocabulary = count, real_vocabulary
        self._heap: list[tuple[float, int, int, WorstRow]] = []

    def offer(self, scores: npt.NDArray[Any], expected: Rows, actual: Rows) -> None:
        """Look at a block: [n] records of SCORE_DTYPE and the rows they were made of, both [n, V]."""
        for row in np.flatnonzero(scores["finite"]):
            score = scores[row]
            key = (float(score["kl_nats"]), -int(score["example"]), -int(score["position"]))
            if len(self._heap) == self._count and key <= self._heap[0][:3]:
                continue
            kept = WorstRow(
                example=int(score["example"]),
                position=int(score["position"]),
                kl_nats=key[0],
                expected_top=self._top(expected[row]),
                actual_top=self._top(actual[row]),
            )
            put = heapq.heappush if len(self._heap) < self._count else heapq.heapreplace
            put(self._heap, (*key, kept))

    def sorted(self) -> tuple[WorstRow, ...]:
        """Return what was kept, the worst first."""
        return tuple(entry[3] for entry in sorted(self._heap, key=lambda entry: entry[:3], reverse=True))

    def _top(self, row: Rows) -> tuple[tuple[int, float], ...]:
        real = row[: self._real_vocabulary]
        shares = np.exp(real.astype(np.float64) - float(real.max()))
        ids = top_ids(real, TOP)
        return tuple((int(token), float(shares[token] / shares.sum())) for token in ids)
