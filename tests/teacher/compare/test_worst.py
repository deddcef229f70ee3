"""The worst positions: the largest are kept in order, with the probabilities either side gave."""

import numpy as np

from teacher.compare.metrics import SCORE_DTYPE
from teacher.compare.worst import WorstRows


def scores(*kls, first=0):
    found = np.zeros(len(kls), dtype=SCORE_DTYPE)
    found["kl_nats"], found["finite"] = kls, np.isfinite(kls)
    found["position"] = np.arange(first, first + len(kls))
    return found


def rows(count):
    return np.tile(np.log(np.array([1, 2, 5, 2.5, 4, 3, 90], dtype=np.float32)), (count, 1))


def test_the_largest_are_kept_over_blocks_the_worst_first():
    worst = WorstRows(3, 6)
    worst.offer(scores(0.1, 0.5, np.inf, 0.2), rows(4), rows(4))
    worst.offer(scores(0.3, 0.5, first=4), rows(2), rows(2))
    assert [(row.position, row.kl_nats) for row in worst.sorted()] == [(1, 0.5), (5, 0.5), (4, 0.3)]


def test_probabilities_are_over_real_tokens_the_likeliest_first():
    worst = WorstRows(1, 6)
    worst.offer(scores(0.1), rows(1), -rows(1))
    (row,) = worst.sorted()
    assert [token for token, _ in row.expected_top] == [2, 4, 5, 3, 1]
    assert [token for token, _ in row.actual_top][:2] == [0, 1]
    total = 1 + 2 + 5 + 2.5 + 4 + 3
    assert abs(row.expected_top[0][1] - 5 / total) < 1e-7
