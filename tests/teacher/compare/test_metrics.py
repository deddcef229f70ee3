"""Metrics against plain F64 formulas, and the rows that break comparisons."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from receipts.errors import EngineFailedError, ShapeError
from support.plans import plan_of
from teacher.compare.accumulate import compare_streams
from teacher.compare.metrics import compare_rows

REAL, WIDTH = 13, 16


def softmax(row):
    e = np.exp(row.astype(np.longdouble) - row.max())
    return e / e.sum()


def plain_kl(p_row, q_row):
    p, q = softmax(p_row), softmax(q_row)
    return float((p * (np.log(p) - np.log(q))).sum())


def rows(seed, count=6, scale=4.0):
    return (np.random.default_rng(seed).standard_normal((count, WIDTH)) * scale).astype(np.float32)


def score(expected, actual, observed=None):
    ids = np.zeros(len(expected), np.int64) if observed is None else np.asarray(observed)
    return compare_rows(expected, actual, ids, REAL)


def test_every_metric_is_its_formula_over_the_real_vocabulary():
    expected, actual = rows(1), rows(2)
    found = score(expected, actual, [3] * 6)
    for record, e_row, a_row in zip(found, expected[:, :REAL], actual[:, :REAL], strict=True):
        # Both sides are F64 from the same F32; the plain form cancels and keeps about 1e-14 here.
        assert record["kl_nats"] == pytest.approx(plain_kl(e_row, a_row), rel=1e-10)
        assert record["reverse_kl_nats"] == pytest.approx(plain_kl(a_row, e_row), rel=1e-10)
        order = np.argsort(-a_row, kind="stable")
        assert record["expected_top_rank"] == int(np.flatnonzero(order == e_row.argmax())[0])
        top = set(np.argsort(-e_row)[:5]) & set(order[:5])
        assert record["top5_overlap"] == pytest.approx(len(top) / 5)
        change = softmax(a_row)[3] - softmax(e_row)[3]
        assert record["observed_probability_change"] == pytest.approx(float(change), abs=1e-14)
        assert record["observed_nll_expected"] == pytest.approx(-float(np.log(softmax(e_row)[3])), rel=1e-12)
        e64, a64 = (r.astype(np.float64) - r.astype(np.float64).mean() for r in (e_row, a_row))
        assert record["max_abs_centred"] == pytest.approx(np.abs(e64 - a64).max(), rel=1e-12)
        assert record["squared_difference"] == pytest.approx(((e64 - a64) ** 2).sum(), rel=1e-12)


@given(scale=st.floats(1e-9, 1e-3))
@settings(max_examples=50, deadline=None)
def test_small_divergences_keep_their_digits(scale):
    # To second order KL is half the variance of the logit difference under p: exact to a share of about `scale`.
    expected = rows(3).astype(np.float32)
    actual = expected.copy()
    step = np.float32(np.abs(expected[0, 2]) * scale) or np.float32(scale)
    actual[:, 2] = actual[:, 2] + step
    delta = actual[:, 2].astype(np.float64) - expected[:, 2]
    p = np.array([softmax(row[:REAL])[2] for row in expected], np.float64)
    want = 0.5 * p * (1 - p) * delta**2
    assert np.allclose(score(expected, actual)["kl_nats"], want, rtol=1e-2, atol=1e-30)


def test_equal_rows_diverge_by_exactly_nothing():
    found = score(rows(1), rows(1))
    assert not found["kl_nats"].any()
    assert not found["max_abs_centred"].any()


def test_a_constant_shift_of_logits_is_no_difference():
    found = score(rows(1), rows(1) + np.float32(2.0))
    assert found["kl_nats"].max() < 1e-12
    assert found["max_abs_centred"].max() < 1e-5


def test_padded_entries_change_nothing_but_their_own_figures():
    expected, actual = rows(1), rows(1)
    actual[:, REAL:] += 100
    found = score(expected, actual)
    assert not found["kl_nats"].any()
    assert found["padded_max_abs"].min() > 50
    assert found["actual_argmax_padded"].all()
    assert not found["expected_argmax_padded"].all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_never_compares_as_close(value):
    actual = rows(1)
    actual[2, 4] = value
    found = score(rows(1), actual)
    assert found["finite"].tolist() == [True, True, False, True, True, True]
    assert np.isnan(found["kl_nats"][2])


def test_extreme_logits_stay_finite():
    expected, actual = rows(1), rows(1)
    expected[0, 0], actual[0, 0] = 3e38, -3e38
    found = score(expected, actual)
    assert np.isfinite(found["kl_nats"]).all()
    assert found["kl_nats"][0] > 1e38


def compared(expected, actual, calls=((4, 1, 1),)):
    plan = plan_of(*((tuple(range(sum(one))), one) for one in calls))
    pairs, at = [], 0
    for index, example in enumerate(plan.examples):
        position = 0
        for call, length in enumerate(example.calls):
            pairs.append((index, call, position, expected[at : at + length], actual[at : at + length]))
            position, at = position + length, at + length
    return compare_streams(iter(pairs), plan, real_vocabulary=REAL, expected_name="teacher", actual_name="candidate")


def test_nan_rows_are_counted_located_and_left_out():
    actual = rows(2)
    actual[3] = np.nan
    found = compared(rows(1), actual)
    assert (found.nonfinite_rows, found.first_nonfinite.position) == (1, 3)
    assert found.kl_nats.count == 5
    assert np.isfinite(found.kl_nats.mean)


def test_a_candidate_of_nans_gives_numbers_and_no_crash():
    found = compared(rows(1), np.full((6, WIDTH), np.nan, np.float32))
    assert found.kl_nats is None
    assert found.nonfinite_rows == 6


@pytest.mark.parametrize("level", [0.0, 7.5])
def test_constant_logits_are_counted_as_such(level):
    found = compared(rows(1), np.full((6, WIDTH), level, np.float32))
    assert found.constant_rows == 6
    assert np.isfinite(found.kl_nats.mean)
    assert np.isfinite(found.nmse_centred)


def test_a_fault_from_one_position_on_shows_in_the_buckets():
    expected = rows(1, count=64)
    actual = expected.copy()
    actual[32:] = rows(2, count=32)
    found = compared(expected, actual, calls=((64,),))
    buckets = {bucket.label: bucket.kl_nats_mean for bucket in found.by_position}
    assert [label for label, mean in buckets.items() if mean > 0] == [found.by_position[-1].label]
    assert found.by_position[-1].positions == 32


def test_prefill_and_decode_are_told_apart():
    expected = rows(1)
    actual = expected.copy()
    actual[4:] = rows(2)[4:]
    shapes = {bucket.label: bucket for bucket in compared(expected, actual).by_call_shape}
    assert shapes["prefill"].kl_nats_mean == 0
    assert shapes["decode"].kl_nats_mean > 0
    assert shapes["decode"].positions == 2


def test_results_do_not_depend_on_how_rows_are_cut(tmp_path):
    expected, actual = rows(1, 40), rows(2, 40)
    plan = plan_of((tuple(range(40)), (40,)))

    def cut(size):
        pairs = ((0, 0, i, expected[i : i + size], actual[i : i + size]) for i in range(0, 40, size))
        return compare_streams(pairs, plan, real_vocabulary=REAL, expected_name="e", actual_name="a")

    assert cut(1) == cut(7) == cut(40)


def test_a_missing_or_shifted_block_is_refused():
    plan = plan_of((tuple(range(6)), (6,)))
    pairs = [(0, 0, 1, rows(1), rows(2))]
    with pytest.raises(EngineFailedError, match="expected 1 to 6 rows from example 0 position 0"):
        compare_streams(iter(pairs), plan, real_vocabulary=REAL, expected_name="e", actual_name="a")
    with pytest.raises(EngineFailedError, match="got an end at example 0"):
        compare_streams(iter([]), plan, real_vocabulary=REAL, expected_name="e", actual_name="a")
    with pytest.raises(ShapeError):
        compare_streams(
            iter([(0, 0, 0, rows(1), rows(2)[:, :5])]), plan, real_vocabulary=REAL, expected_name="e", actual_name="a"
        )


def test_the_standard_error_takes_examples_as_clusters():
    expected, actual = rows(1, 12), rows(1, 12)
    actual[6:] = rows(2, 6)  # one example differs, the other does not: the positions are not independent
    found = compared(expected, actual, calls=((6,), (6,)))
    means = [bucket.kl_nats_mean for bucket in found.by_example]
    assert found.kl_nats.stderr == pytest.approx(abs(means[1] - means[0]) / 2, rel=0.5)
    single = compared(expected, actual, calls=((12,),))
    assert single.kl_nats.stderr is None
