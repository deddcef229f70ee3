import numpy as np
import pytest

from teacher.backend.device import mx
from teacher.model import attention

HQ, HKV, WIDTH = 6, 2, 10


# Scores sum WIDTH products, the output as many as there are positions; exp multiplies a score's rounding by at most
# its size, below 8 here.
def limit(positions):
    return (WIDTH * 8 + positions) * 2.0**-24


def definition(q, k, v, first):
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.empty(q.shape)
    for h in range(HQ):
        for t in range(q.shape[1]):
            seen = first + t + 1
            scores = k[h // (HQ // HKV), :seen] @ q[h, t] / np.sqrt(WIDTH)
            share = np.exp(scores - scores.max())
            out[h, t] = share / share.sum() @ v[h // (HQ // HKV), :seen]
    return out


def inputs(T, first, seed=0):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((HQ, T, WIDTH)).astype(np.float32)
    k, v = rng.standard_normal((2, HKV, first + T, WIDTH)).astype(np.float32)
    return q, k, v


@pytest.mark.parametrize(("T", "first"), [(1, 0), (1, 37), (5, 0), (300, 0), (257, 11), (512, 3)])
def test_attention_follows_the_definition(T, first):
    q, k, v = inputs(T, first)
    got = np.array(attention.causal_attention(mx.array(q), mx.array(k), mx.array(v), first))
    want = definition(q, k, v, first)
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < limit(first + T)


def test_a_position_does_not_see_its_future():
    q, k, v = (mx.array(x) for x in inputs(8, 0))
    before = np.array(attention.causal_attention(q, k, v, 0))
    k[:, 5:], v[:, 5:] = 1e3, -1e3
    after = np.array(attention.causal_attention(q, k, v, 0))
    assert (before[:, :5] == after[:, :5]).all()
    assert (before[:, 5:] != after[:, 5:]).any()


def test_rotation_turns_pairs_and_passes_the_rest():
    cos, sin = attention.rotary_tables(7, 3, 4, 10_000.0)
    x = mx.array(np.arange(3 * WIDTH, dtype=np.float32).reshape(1, 3, WIDTH))
    got = np.array(attention.rotate(x, cos, sin))[0]
    source = np.array(x)[0].astype(np.float64)
    for t, position in enumerate((7, 8, 9)):
        for pair, frequency in enumerate((1.0, 0.01)):
            z = (source[t, pair] + 1j * source[t, pair + 2]) * np.exp(1j * position * frequency)
            assert got[t, pair] == pytest.approx(z.real, abs=2e-5)
            assert got[t, pair + 2] == pytest.approx(z.imag, abs=2e-5)
    assert (got[:, 4:] == source[:, 4:]).all()


def test_angles_are_rounded_to_float32_as_released():
    angles = attention.rotary_angles(100_000, 1, 64, 1e7)
    exact = 100_000 * 1e7 ** -(np.arange(0, 64, 2) / 64)
    assert angles.dtype == np.float32
    assert 1e-4 < np.abs(angles[0] - exact).max() < 2e-2
