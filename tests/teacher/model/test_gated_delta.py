import numpy as np
import pytest

from teacher.backend.device import mx
from teacher.model import gated_delta

HK, HV, DK, DV = 2, 6, 8, 12  # every axis has its own size


def definition(q, k, v, log_decay, beta, state):
    """The rule in F64, written from its three lines."""
    q, k, v, log_decay, beta, state = (np.asarray(x, np.float64) for x in (q, k, v, log_decay, beta, state))
    q, k = np.repeat(q, HV // HK, axis=0), np.repeat(k, HV // HK, axis=0)
    y = np.empty(v.shape)
    for h in range(HV):
        memory = state[h].copy()
        for t in range(q.shape[1]):
            memory *= np.exp(log_decay[h, t])
            memory += np.outer(k[h, t], beta[h, t] * (v[h, t] - k[h, t] @ memory))
            y[h, t] = q[h, t] @ memory
        state[h] = memory
    return y, state


def inputs(T, seed, decay=1.0, same_keys=False, beta=None):
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((2, HK, T, DK)).astype(np.float32)
    if same_keys:
        k[:] = k[:, :1]
    q /= np.linalg.norm(q, axis=-1, keepdims=True) * np.sqrt(np.float32(DK))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v = rng.standard_normal((HV, T, DV)).astype(np.float32)
    log_decay = (-decay * rng.exponential(0.2, (HV, T))).astype(np.float32)
    gate = rng.uniform(0, 1, (HV, T)).astype(np.float32) if beta is None else np.full((HV, T), beta, np.float32)
    state = rng.standard_normal((HV, DK, DV)).astype(np.float32)
    return q, k, v, log_decay, gate, state


# Each output sums at most a chunk of tokens, a key's width and a value's width of F32 terms, and the log decays of
# a chunk are summed before exp: the worst case is one rounding of 2**-24 for each of them.
LIMIT = (gated_delta.CHUNK_TOKENS + DK + DV) * 2.0**-24


def relative(actual, expected):
    return np.linalg.norm(np.array(actual) - expected) / np.linalg.norm(expected)


def run(rule, arrays):
    y, state = rule(*(mx.array(x) for x in arrays))
    return np.array(y), np.array(state)


@pytest.mark.parametrize("rule", [gated_delta.recurrent, gated_delta.chunked])
@pytest.mark.parametrize("T", [1, 2, 63, 64, 65, 127, 128, 129, 200])
def test_rule_follows_the_definition(rule, T):
    arrays = inputs(T, seed=T)
    y, state = run(rule, arrays)
    want_y, want_state = definition(*arrays)
    assert y.shape == want_y.shape
    assert relative(y, want_y) < LIMIT
    assert relative(state, want_state) < LIMIT


@pytest.mark.parametrize(
    "case",
    [
        {"same_keys": True, "beta": 1.0, "decay": 0.0},  # powers of the chunk's matrix grow like binomials
        {"decay": 0.0},
        {"decay": 500.0},  # everything forgotten at once: exp underflows, nothing overflows
    ],
)
def test_chunks_stay_accurate_in_hard_cases(case):
    arrays = inputs(192, seed=5, **case)
    y, state = run(gated_delta.chunked, arrays)
    want_y, want_state = definition(*arrays)
    assert np.isfinite(y).all() and np.isfinite(state).all()
    assert relative(y, want_y) < LIMIT
    assert relative(state, want_state) < LIMIT


def test_a_hand_worked_case():
    # One head, widths 1: state 2 halves to 1; the error 5 - 1 is half learned, so state becomes 3 and is read by 0.5.
    y, state = gated_delta.recurrent(
        mx.array([[[0.5]]]),
        mx.array([[[1.0]]]),
        mx.array([[[5.0]]]),
        mx.log(mx.array([[0.5]])),
        mx.array([[0.5]]),
        mx.array([[[2.0]]]),
    )
    assert float(state.item()) == pytest.approx(3.0, abs=1e-6)
    assert float(y.item()) == pytest.approx(1.5, abs=1e-6)


def test_the_argument_state_is_not_changed():
    arrays = [mx.array(x) for x in inputs(70, seed=1)]
    before = np.array(arrays[-1])
    mx.eval(gated_delta.chunked(*arrays))
    assert (np.array(arrays[-1]) == before).all()


def test_cutting_a_sequence_at_a_chunk_edge_changes_little_and_anywhere_else_too():
    arrays = inputs(150, seed=9)
    whole, whole_state = run(gated_delta.chunked, arrays)
    for cut in (1, 63, 64, 65, 149):
        first = [x[:, :cut] if i < 5 else x for i, x in enumerate(arrays)]
        y1, state = run(gated_delta.chunked, first)
        second = [x[:, cut:] if i < 5 else state for i, x in enumerate(arrays)]
        y2, state = run(gated_delta.chunked, second)
        assert relative(np.concatenate([y1, y2], axis=1), whole) < 2 * LIMIT
        assert relative(state, whole_state) < 2 * LIMIT


@pytest.mark.parametrize("size", [16, 32, 64])
def test_the_inverse_is_the_inverse(size):
    rng = np.random.default_rng(size)
    lower = np.tril(rng.uniform(-1, 1, (3, 5, size, size)) * 0.3, -1).astype(np.float32)
    noise_above = np.triu(rng.standard_normal((size, size))).astype(np.float32)
    got = np.array(gated_delta.invert_unit_lower(mx.array(lower + noise_above * 0)))
    want = np.linalg.inv(lower.astype(np.float64) + np.eye(size))
    assert relative(got, want) < size * 2.0**-24
    assert (np.triu(got, 1) == 0).all()
