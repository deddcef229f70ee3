"""Two streams of logits into one comparison, in one pass: a block and a few scalars a position are all that is held."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from receipts.comparison import Bucket, Comparison, PaddedRows, Where
from receipts.errors import EngineFailedError
from teacher.compare.metrics import SCORE_DTYPE, compare_rows
from teacher.compare.statistics import mean_of, summarise_values
from teacher.compare.worst import WorstRows
from teacher.process.sources import Example, Plan

_LEAST_NATS = 1e-14  # F64 sums over a vocabulary resolve no less
Rows = npt.NDArray[np.float32]
Pair = tuple[int, int, int, Rows, Rows]


def compare_streams(
    pairs: Iterable[Pair],
    plan: Plan,
    *,
    real_vocabulary: int,
    expected_name: str,
    actual_name: str,
    worst: WorstRows | None = None,
) -> Comparison:
    """Compare two sides over a plan.

    Args:
        pairs: (example, call, position, expected rows [n, V] float32, actual rows [n, V] float32) in plan order,
            read once; a block may cover part of a call.
        plan: examples and calls of the expected side.
        real_vocabulary: first entries of a row that the tokenizer can produce.
        expected_name, actual_name: names of the sides, for the report.
        worst: shown every block; keeps the worst positions.

    Raises:
        EngineFailedError: a side did not deliver every position of the plan once and in order.
        ShapeError, DtypeError: a block cannot be compared.
    """
    scores, widths = collect_scores(pairs, plan, real_vocabulary, worst)
    return summarise(
        scores,
        plan,
        padded_rows=min(widths) - real_vocabulary if widths else 0,
        expected_name=expected_name,
        actual_name=actual_name,
    )


def collect_scores(
    pairs: Iterable[Pair], plan: Plan, real_vocabulary: int, worst: WorstRows | None = None
) -> tuple[npt.NDArray[Any], tuple[int, int] | None]:
    """Score every position of a plan.

    Returns:
        ([positions] records of SCORE_DTYPE in plan order, vocabulary rows of the two sides or None for no block).

    Raises:
        EngineFailedError, ShapeError, DtypeError: as `compare_streams`.
    """
    parts: list[npt.NDArray[Any]] = []
    widths: tuple[int, int] | None = None
    due = _Due(plan)
    for index, call, position, expected, actual in pairs:
        due.advance(index, position, expected.shape[0])
        example: Example = plan.examples[index]
        stop = position + expected.shape[0]
        observed = np.full(expected.shape[0], -1, dtype=np.int64)
        following = example.token_ids[position + 1 : stop + 1]
        observed[: len(following)] = following
        part = compare_rows(expected, actual, observed, real_vocabulary)
        part["example"] = index
        part["position"] = np.arange(position, stop)
        part["call_length"] = example.calls[call]
        parts.append(part)
        if worst is not None:
            worst.offer(part, expected, actual)
        widths = (expected.shape[1], actual.shape[1])
    due.verify_done()
    return (np.concatenate(parts) if parts else np.zeros(0, dtype=SCORE_DTYPE)), widths


class _Due:
    """The next position that a stream owes."""

    def __init__(self, plan: Plan) -> None:
        self._lengths = [len(example.token_ids) for example in plan.examples]
        self._example, self._position = 0, 0

    def advance(self, example: int, position: int, rows: int) -> None:
        """Take a block, or say that another was due."""
        if self._example == len(self._lengths):
            raise EngineFailedError(
                f"logits: expected no block after the last example, got example {example} position {position}"
            )
        left = self._lengths[self._example] - self._position
        if (example, position) != (self._example, self._position) or not 0 < rows <= left:
            raise EngineFailedError(
                f"logits: expected 1 to {left} rows from example {self._example} position {self._position}, got {rows}"
                f" from example {example} position {position}"
            )
        self._position += rows
        if self._position == self._lengths[self._example]:
            self._example, self._position = self._example + 1, 0

    def verify_done(self) -> None:
        """Refuse an end before the plan's."""
        if self._example < len(self._lengths):
            raise EngineFailedError(
                f"logits: expected {len(self._lengths)} examples, got an end at example {self._example} position"
                f" {self._position}"
            )


def summarise(
    scores: npt.NDArray[Any], plan: Plan, *, padded_rows: int, expected_name: str, actual_name: str
) -> Comparison:
    """Summarise score records.

    Rows that are not finite on either side are counted, located, and left out of every other figure. NMSE divides
    by the expected side's squared centred logits; where these are all 0 it divides by the number of rows, so that it
    stays a number.

    Args:
        scores: [positions] records of SCORE_DTYPE.
        padded_rows: vocabulary rows beyond the real vocabulary that both sides have.
    """
    finite = scores[scores["finite"]]
    broken = scores[~scores["finite"]]
    energy = math.fsum(finite["squared_expected"]) or float(max(finite.size, 1))
    worst = finite[int(finite["max_abs_centred"].argmax())] if finite.size else None
    return Comparison(
        expected=expected_name,
        actual=actual_name,
        positions=int(scores.size),
        examples=int(np.unique(scores["example"]).size),
        nonfinite_rows=int(broken.size),
        first_nonfinite=_where(broken[0]) if broken.size else None,
        constant_rows=int(np.count_nonzero(finite["constant"])),
        kl_nats=summarise_values(finite, "kl_nats"),
        reverse_kl_nats=summarise_values(finite, "reverse_kl_nats"),
        top1_agreement=_top1(finite),
        topk_agreement=tuple((k, mean_of(finite[f"top{k}_overlap"])) for k in (5, 10)),
        expected_top_rank=summarise_values(finite, "expected_top_rank"),
        observed_probability_change=summarise_values(finite, "observed_probability_change"),
        observed_nll_expected=_mean_or_none(finite["observed_nll_expected"]),
        observed_nll_actual=_mean_or_none(finite["observed_nll_actual"]),
        nmse_centred=math.fsum(finite["squared_difference"]) / energy,
        max_abs_centred=float(worst["max_abs_centred"]) if worst is not None else 0.0,
        max_abs_centred_at=_where(worst) if worst is not None else Where(example=0, position=0),
        kl_histogram=tuple(_histogram(finite["kl_nats"])),
        padded=_padded(finite, padded_rows),
        by_position=tuple(_buckets(finite, power_of_two_start, _position_label)),
        by_example=tuple(_buckets(finite, lambda s: s["example"], lambda i: plan.examples[i].name)),
        by_call_shape=tuple(_buckets(finite, lambda s: s["call_length"] == 1, lambda d: "decode" if d else "prefill")),
    )


def power_of_two_start(scores: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return the first position of each record's bucket: 0, 1, 2, 4, 8, ..."""
    exponents = np.frexp(scores["position"].astype(np.float64))[1] - 1  # exact floor of log2
    return np.where(scores["position"] == 0, 0, 2 ** np.maximum(exponents, 0)).astype(np.int64)


def _position_label(start: int) -> str:
    """Name a power-of-two bucket of positions."""
    return str(start) if start < 2 else f"{start}-{2 * start - 1}"


def _buckets(
    finite: npt.NDArray[Any],
    key_of: Callable[[npt.NDArray[Any]], npt.NDArray[Any]],
    label_of: Callable[[Any], str],
) -> Iterator[Bucket]:
    """Cut records by a key, in its order; a bucket without a finite row is left out."""
    keys = key_of(finite)
    for key in np.unique(keys):
        part = finite[keys == key]
        yield Bucket(
            label=label_of(key.item()),
            positions=int(part.size),
            kl_nats_mean=mean_of(part["kl_nats"]),
            kl_nats_max=float(part["kl_nats"].max()),
            top1_agreement=_top1(part),
        )


def _histogram(values: npt.NDArray[np.float64]) -> Iterator[tuple[float, int]]:
    """Yield (lower edge, count) of half-decades from 1e-14 nats; what is smaller stands at edge 0."""
    tiny = values < _LEAST_NATS
    if tiny.any():
        yield 0.0, int(np.count_nonzero(tiny))
    halves = np.floor(2 * np.log10(values[~tiny])).astype(np.int64)
    for half, count in zip(*np.unique(halves, return_counts=True), strict=True):
        yield float(f"{10 ** (half / 2):.6g}"), int(count)


def _padded(finite: npt.NDArray[Any], count: int) -> PaddedRows | None:
    """Report padded vocabulary rows, when there are any."""
    if count == 0:
        return None
    return PaddedRows(
        count=count,
        max_abs_difference=float(finite["padded_max_abs"].max(initial=0.0)),
        expected_argmax_in_padding=int(np.count_nonzero(finite["expected_argmax_padded"])),
        actual_argmax_in_padding=int(np.count_nonzero(finite["actual_argmax_padded"])),
    )


def _top1(scores: npt.NDArray[Any]) -> float:
    """Return the share of rows in which both sides have the same top token."""
    return float(np.count_nonzero(scores["expected_top_rank"] == 0)) / scores.size if scores.size else 0.0


def _mean_or_none(values: npt.NDArray[np.float64]) -> float | None:
    """Return the mean of what is not NaN, or None when there is nothing."""
    kept = values[~np.isnan(values)]
    return mean_of(kept) if kept.size else None


def _where(score: Any) -> Where:
    """Return the place of a record."""
    return Where(example=int(score["example"]), position=int(score["position"]))
