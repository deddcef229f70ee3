"""How far two rows of logits are apart, in float64 from float32 logits.

Every row is computed by itself, so no result depends on how rows were cut into blocks, to the last bit, and the
float64 temporaries are a few rows: about 90 bytes a vocabulary entry, 22 MB for 248,320 of them.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from receipts.errors import DtypeError, ShapeError

F64 = npt.NDArray[np.float64]

TOP_K: Final = (5, 10)

# One record a position. Without a finite row the measured fields are NaN (rank -1) and `finite` is False.
SCORE_DTYPE: Final = np.dtype(
    [
        ("example", np.int64),
        ("position", np.int64),
        ("call_length", np.int64),
        ("finite", np.bool_),
        ("constant", np.bool_),
        ("kl_nats", np.float64),
        ("reverse_kl_nats", np.float64),
        ("expected_top_rank", np.int64),
        ("top5_overlap", np.float64),
        ("top10_overlap", np.float64),
        ("observed_probability_change", np.float64),
        ("observed_nll_expected", np.float64),
        ("observed_nll_actual", np.float64),
        ("squared_difference", np.float64),
        ("squared_expected", np.float64),
        ("max_abs_centred", np.float64),
        ("padded_max_abs", np.float64),
        ("expected_argmax_padded", np.bool_),
        ("actual_argmax_padded", np.bool_),
    ]
)
_MEASURED: Final = [name for name in SCORE_DTYPE.names or () if SCORE_DTYPE[name] == np.float64]

_SERIES_BELOW: Final = 2.0**-6  # |d| under which exp(d) - 1 - d cancels; six terms reach 7e-16 relative there
_EXPONENT_CAP: Final = 600.0  # exp stays finite; p alone may underflow beyond it


def divergence_terms(p: F64, log_p: F64, log_ratio: F64) -> F64:
    """Return p * (exp(d) - 1 - d) entry by entry, d = log_ratio = log q - log p.

    The terms sum to KL(p || q), because sum(p * (exp(d) - 1)) = sum(q) - sum(p) = 0. Unlike those of -p * d they
    are never negative, and an error e common to all d moves their sum by e**2 / 2 and not by e: two rows 1e-9 apart
    still give their divergence of 1e-18 or so to many digits.

    Shapes:
        p, log_p, log_ratio: [V] or any shape common to the three.
    Units:
        Natural logarithms; the result is in nats.
    Source:
        The Bregman form of the divergence of normalised p and q.
    """
    d = log_ratio
    series = d * d * (1 / 2 + d * (1 / 6 + d * (1 / 24 + d * (1 / 120 + d * (1 / 720 + d / 5040)))))
    terms = p * np.where(np.abs(d) < _SERIES_BELOW, series, np.expm1(np.minimum(d, _EXPONENT_CAP)) - d)
    far = d > _EXPONENT_CAP
    if far.any():  # here p * exp(d) has to be formed as exp(log p + d)
        terms[far] = np.exp(log_p[far] + d[far]) - p[far] * (1.0 + d[far])
    return np.maximum(terms, 0.0)


def top_ids(row: npt.NDArray[Any], k: int) -> npt.NDArray[np.int64]:
    """Return the ids of the k largest entries, largest first; of equal entries the lowest id comes first."""
    k = min(k, row.shape[0])
    threshold = np.partition(row, -k)[-k]
    above = np.flatnonzero(row > threshold)
    ids = np.concatenate([above, np.flatnonzero(row == threshold)[: k - above.size]])
    return ids[np.lexsort((ids, -row[ids]))].astype(np.int64)


def rank_of(row: npt.NDArray[Any], token: int) -> int:
    """Return the 0-based place of a token in a row, in the order of `top_ids`."""
    value = row[token]
    return int(np.count_nonzero(row > value) + np.count_nonzero(row[:token] == value))


def is_usable(row: npt.NDArray[np.float32], real_vocabulary: int) -> bool:
    """Whether a row is finite; -inf is allowed among padded entries alone, where engines mask with it."""
    padding = row[real_vocabulary:]
    return bool(np.isfinite(row[:real_vocabulary]).all()) and not bool(np.any(np.isnan(padding) | (padding == np.inf)))


def compare_rows(
    expected: npt.NDArray[np.float32],
    actual: npt.NDArray[np.float32],
    observed: npt.NDArray[np.int64],
    real_vocabulary: int,
) -> npt.NDArray[Any]:
    """Score every row of a block.

    KL(p || q) with p = softmax(expected) and q = softmax(actual), over the real vocabulary only. Entries past it
    are padding: they enter the three padded fields and nothing else. A row in which either side holds NaN, +inf, or
    -inf within the real vocabulary is marked `finite = False` and not measured: -inf would be a probability of zero,
    which no softmax of a model's logits has.

    Shapes:
        expected: [n, V]; actual: [n, V2], V2 may differ from V in padding alone; observed: [n].
    Dtypes:
        Logits float32; every sum in float64.
    Units:
        KL and negative log likelihood in nats; probabilities as fractions; centred logits are logits less their mean
        over the real vocabulary.

    Args:
        observed: token that really follows each row, or -1; a token outside the real vocabulary counts as none.
        real_vocabulary: first entries of a row that the tokenizer can produce.

    Returns:
        [n] records of SCORE_DTYPE; `example`, `position` and `call_length` are left 0 for the caller.

    Raises:
        ShapeError: the sides have other row counts, or fewer entries than the real vocabulary.
        DtypeError: a side is not float32.
    """
    for side, rows in (("expected", expected), ("actual", actual)):
        if rows.dtype != np.float32:
            raise DtypeError(f"{side} logits: expected float32, got {rows.dtype}")
        if rows.ndim != 2 or rows.shape[1] < real_vocabulary:
            raise ShapeError(
                f"{side} logits: expected rows of at least {real_vocabulary} entries, got shape {rows.shape}"
            )
    if not expected.shape[0] == actual.shape[0] == observed.shape[0]:
        raise ShapeError(
            f"logits: expected {expected.shape[0]} rows, got {actual.shape[0]} and {observed.shape[0]} following tokens"
        )
    scores = np.zeros(expected.shape[0], dtype=SCORE_DTYPE)
    for score, e, a, token in zip(scores, expected, actual, observed):
        if is_usable(e, real_vocabulary) and is_usable(a, real_vocabulary):
            _score_row(score, e, a, int(token), real_vocabulary)
        else:
            score["expected_top_rank"] = -1
            for name in _MEASURED:
                score[name] = np.nan
    return scores


def _score_row(
    score: Any, expected: npt.NDArray[np.float32], actual: npt.NDArray[np.float32], token: int, real: int
) -> None:
    """Fill one record of SCORE_DTYPE from two usable rows."""
    score["finite"] = True
    e = expected[:real].astype(np.float64)
    difference = actual[:real].astype(np.float64)
    _score_order(score, expected[:real], actual[:real])

    e_max, a_max = float(e.max()), float(difference.max())
    q = np.exp(difference - a_max)
    difference -= e  # exact, or nearly: both are float32
    log_p = e - e_max
    p = np.exp(log_p)
    log_p_sum, log_q_sum = float(np.log(p.sum())), float(np.log(q.sum()))
    log_p -= log_p_sum
    p /= p.sum()
    q /= q.sum()
    log_ratio = difference - ((a_max - e_max) + (log_q_sum - log_p_sum))
    score["kl_nats"] = divergence_terms(p, log_p, log_ratio).sum()
    score["reverse_kl_nats"] = divergence_terms(q, log_p + log_ratio, -log_ratio).sum()

    if 0 <= token < real:
        ratio = float(log_ratio[token])
        near = ratio < 1.0
        score["observed_probability_change"] = p[token] * np.expm1(ratio) if near else q[token] - p[token]
        score["observed_nll_expected"] = -log_p[token]
        score["observed_nll_actual"] = -(log_p[token] + ratio)
    else:
        for name in ("observed_probability_change", "observed_nll_expected", "observed_nll_actual"):
            score[name] = np.nan

    shift = difference.mean()
    difference -= shift
    score["max_abs_centred"] = np.abs(difference).max()
    score["squared_difference"] = np.square(difference).sum()
    score["squared_expected"] = np.square(e - e.mean()).sum()

    common = min(expected.shape[0], actual.shape[0])
    padded = actual[real:common].astype(np.float64) - expected[real:common].astype(np.float64) - shift
    score["padded_max_abs"] = np.abs(padded[np.isfinite(padded)]).max(initial=0.0)
    score["expected_argmax_padded"] = expected.argmax() >= real
    score["actual_argmax_padded"] = actual.argmax() >= real


def _score_order(score: Any, e: npt.NDArray[np.float32], a: npt.NDArray[np.float32]) -> None:
    """Fill the fields that depend on the order of entries alone."""
    top_e, top_a = top_ids(e, max(TOP_K)), top_ids(a, max(TOP_K))
    score["expected_top_rank"] = rank_of(a, int(top_e[0]))
    for k in TOP_K:
        first = top_e[:k]
        score[f"top{k}_overlap"] = np.count_nonzero(np.isin(first, top_a[:k])) / first.size
    score["constant"] = a.min() == a.max()
