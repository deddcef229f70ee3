"""One scalar a position, summarised over positions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from receipts.comparison import Stats, Where


def clustered_stderr(values: npt.NDArray[np.float64], groups: npt.NDArray[np.int64]) -> float | None:
    """Return the standard error of the mean when values of one group move together.

    stderr**2 = G / (G - 1) * sum over groups of (sum of (value - mean))**2 / n**2

    Positions of one example share their text, so counting them as independent would claim too much.

    Shapes:
        values, groups: [n].

    Returns:
        None with fewer than two groups.
    Source:
        The cluster-robust (CR1) variance of a mean (Liang and Zeger 1986).
    """
    names = np.unique(groups)
    if names.size < 2:
        return None
    deviations = values - math.fsum(values) / values.size
    sums = [math.fsum(deviations[groups == name]) for name in names]
    variance = names.size / (names.size - 1) * math.fsum(s * s for s in sums) / values.size**2
    return math.sqrt(variance)


def nearest_rank(ordered: npt.NDArray[np.float64], per_mille: int) -> float:
    """Return the smallest value that at least per_mille / 1000 of the values do not exceed; one really measured."""
    rank = -(-per_mille * ordered.size // 1000)
    return float(ordered[max(rank, 1) - 1])


def summarise_values(scores: npt.NDArray[Any], field: str) -> Stats | None:
    """Summarise one field of score records.

    Sums are exact before their one rounding (fsum), so neither order nor blocks matter. Quantiles are nearest-rank:
    each is a value that some position has, and with fewer than 1,000 positions p99.9 is the largest.

    Args:
        scores: [n] records of SCORE_DTYPE; those whose field is NaN are left out.
        field: name of the field.

    Returns:
        None when no record has the field.
    """
    kept = scores[~np.isnan(scores[field].astype(np.float64))]
    if kept.size == 0:
        return None
    values = kept[field].astype(np.float64)
    ordered = np.sort(values)
    largest = kept[int(values.argmax())]
    return Stats(
        count=int(values.size),
        mean=mean_of(values),
        stderr=clustered_stderr(values, kept["example"]),
        median=nearest_rank(ordered, 500),
        p90=nearest_rank(ordered, 900),
        p95=nearest_rank(ordered, 950),
        p99=nearest_rank(ordered, 990),
        p999=nearest_rank(ordered, 999),
        max=float(ordered[-1]),
        max_at=Where(example=int(largest["example"]), position=int(largest["position"])),
    )


def mean_of(values: npt.NDArray[Any]) -> float:
    """Return the mean by an exact sum; 0 of nothing."""
    return math.fsum(values) / len(values) if len(values) else 0.0
