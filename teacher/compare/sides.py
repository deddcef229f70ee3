"""Two running sources into one comparison, with the digest of every call taken on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from receipts.comparison import Comparison
from teacher.compare.accumulate import Pair, compare_streams
from teacher.compare.worst import WorstRows
from teacher.process.alignment import CallDigest, align, digest_blocks
from teacher.process.sources import LogitBlock, Plan


def compare_sides(
    expected: Iterable[LogitBlock],
    actual: Iterable[LogitBlock],
    plan: Plan,
    *,
    real_vocabulary: int,
    names: tuple[str, str] = ("expected", "actual"),
    on_positions: Callable[[int], Any] = lambda done: None,
    worst: WorstRows | None = None,
) -> tuple[Comparison, tuple[tuple[CallDigest, ...], tuple[CallDigest, ...]]]:
    """Compare two sides over a plan; the actual side may cut the same examples into other calls.

    Args:
        expected, actual: blocks in plan order, read once.
        plan: examples, and the calls of the expected side.
        real_vocabulary: first entries of a row that a token stands for.
        names: of the sides, for the report.
        on_positions: told how many positions have been compared.
        worst: shown every pair of rows; keeps the worst positions.

    Returns:
        (comparison, (digests of the expected side's calls, digests of the actual side's calls)).

    Raises:
        EngineFailedError: a side did not deliver every position of the plan once and in order.
        ShapeError, DtypeError: a block cannot be compared.
    """
    left, right = digest_blocks(expected), digest_blocks(actual)

    def pairs() -> Iterator[Pair]:
        done = 0
        for rows in align(left, right, names=names):
            yield rows.example, rows.expected_call, rows.position, rows.expected, rows.actual
            done += rows.expected.shape[0]
            on_positions(done)

    comparison = compare_streams(
        pairs(), plan, real_vocabulary=real_vocabulary, expected_name=names[0], actual_name=names[1], worst=worst
    )
    return comparison, (left.digests, right.digests)
