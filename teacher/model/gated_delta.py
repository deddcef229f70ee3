"""The gated delta rule: one token at a time (the definition), and in chunks (the same sums, reassociated).

State is kept as [Hv, Dk, Dv], F32. Everything here is F32 in, F32 out.
"""

from __future__ import annotations

import functools
import math

from teacher.backend import functions
from teacher.backend.device import mx

CHUNK_TOKENS = 64
_BLOCK = 16  # narrower blocks are multiplied by broadcast sums
L2_EPSILON = 1e-6  # added to the sum of squares, not to their mean


def normalise(x: mx.array) -> mx.array:
    """Scale the last axis to length 1: x / sqrt(sum(x^2) + 1e-6); any shape, F32."""
    return x * mx.rsqrt(mx.sum(x * x, axis=-1, keepdims=True) + L2_EPSILON)


def recurrent(
    q: mx.array, k: mx.array, v: mx.array, log_decay: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """Advance the delta-rule memory token by token; the definition that `chunked` must agree with.

    state <- exp(log_decay) * state
    state <- state + outer(k, beta * (v - k @ state))
    y = q @ state

    Shapes:
        q, k: [Hk, T, Dk]; v, y: [Hv, T, Dv]; log_decay, beta: [Hv, T]; state: [Hv, Dk, Dv].
        Hv is a multiple of Hk; key head h serves value heads h * Hv/Hk up to the next key head's.
    Dtypes:
        All float32; sums in float32.
    Units:
        log_decay is a natural logarithm, at most 0; beta lies in [0, 1].
        k arrives with length 1 along Dk, q with length Dk ** -0.5.

    Returns:
        (y, new_state); the argument state is not changed.
    Source:
        arXiv:2412.06464 (Gated DeltaNet); transformers 5.24 qwen3_5 `torch_recurrent_gated_delta_rule`.
    Differs from source:
        The state read is a vector-matrix product and not an elementwise product with a sum.
    """
    group = v.shape[0] // k.shape[0]
    q, k = mx.repeat(q, group, axis=0), mx.repeat(k, group, axis=0)
    decay = functions.exp(log_decay)
    rows = []
    for t in range(q.shape[1]):
        key = k[:, t : t + 1]  # [Hv, 1, Dk]
        state = state * decay[:, t, None, None]
        delta = (v[:, t : t + 1] - key @ state) * beta[:, t, None, None]  # [Hv, 1, Dv]
        state = state + key.swapaxes(1, 2) * delta
        rows.append(q[:, t : t + 1] @ state)
    return mx.concatenate(rows, axis=1), state


def invert_unit_lower(lower: mx.array) -> mx.array:
    """Return the inverse of I + L for strictly lower triangular L.

    Inverses of diagonal blocks are joined pairwise, from single entries up to the whole:
    [[A, 0], [C, B]]^-1 = [[A^-1, 0], [-B^-1 C A^-1, B^-1]]. A product of powers of L would need fewer steps, but
    when keys repeat its terms grow like binomials and cancel; here no entry exceeds those of the inverse.

    Shapes:
        lower: [..., C, C], C a power of two; entries on and above the diagonal are ignored.

    Returns:
        [..., C, C], unit lower triangular.
    """
    size = lower.shape[-1]
    batch = lower.shape[:-2]
    flat = lower.reshape(*batch, size * size)
    inverse = mx.ones((*batch, size, 1, 1))  # [..., blocks, width, width]
    width = 1
    while width < size:
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        below = mx.take(flat, _below_diagonal(size, width), axis=-1)  # [..., pairs, width, width]
        corner = -_product(second, _product(below, first))
        top = mx.concatenate([first, mx.zeros_like(first)], axis=-1)
        inverse = mx.concatenate([top, mx.concatenate([corner, second], axis=-1)], axis=-2)
        width *= 2
    return inverse.reshape(*batch, size, size)


@functools.cache
def _below_diagonal(size: int, width: int) -> mx.array:
    """Return where, in a flat [size * size], the block below each even diagonal block of some width lies."""
    first = mx.arange(0, size, 2 * width)[:, None, None]
    rows = first + width + mx.arange(width)[:, None]
    return rows * size + first + mx.arange(width)


def _product(a: mx.array, b: mx.array) -> mx.array:
    """Return a @ b; small blocks by a broadcast sum, since a call of the BLAS for each costs more than its product."""
    if a.shape[-1] >= _BLOCK:
        return a @ b
    return mx.sum(a[..., :, :, None] * b[..., None, :, :], axis=-2)


def chunked(
    q: mx.array, k: mx.array, v: mx.array, log_decay: mx.array, beta: mx.array, state: mx.array
) -> tuple[mx.array, mx.array]:
    """Advance the delta-rule memory 64 tokens at a time.

    Within a chunk the updates form a unit lower triangular system whose inverse turns them into matrix products
    (the UT transform); chunks follow one another through the state.

    Shapes:
        As `recurrent`. A last chunk that is not full is filled with tokens of zero key, zero beta and zero log_decay,
        which change neither state nor earlier rows.
    Dtypes:
        As `recurrent`.
    Units:
        As `recurrent`.

    Returns:
        (y, new_state), equal to `recurrent` up to F32 rounding.
    Source:
        arXiv:2412.06464, section 3.2.
    Differs from source:
        Products of keys are formed once per key head and shared by its value heads.
    """
    Hk, T, Dk = k.shape
    Hv, _, Dv = v.shape
    C = CHUNK_TOKENS
    group, N = Hv // Hk, math.ceil(T / C)
    if N * C > T:
        fill = N * C - T
        q, k, v = (mx.pad(x, [(0, 0), (0, fill), (0, 0)]) for x in (q, k, v))
        log_decay, beta = (mx.pad(x, [(0, 0), (0, fill)]) for x in (log_decay, beta))
    q, k = q.reshape(Hk, N, C, Dk), k.reshape(Hk, N, C, Dk)
    v = v.reshape(Hv, N, C, Dv)
    beta = beta.reshape(Hv, N, C, 1)
    log_decay = log_decay.reshape(Hv, N, C)

    # Entry (i, j) is the decay from j to i. Its logarithm is summed over just those steps: as a difference of sums
    # since the chunk began it would carry their rounding, 1e-4 after 64 strongly forgetting tokens.
    causal = mx.tril(mx.ones((C, C), dtype=mx.bool_))
    steps = mx.where(mx.tril(causal, -1), log_decay[..., None], 0.0)  # [Hv, N, C, C]
    pair_decay = mx.where(causal, functions.exp(mx.cumsum(steps, axis=-2)), 0.0)
    keys = k.swapaxes(-1, -2)
    key_products = mx.repeat(k @ keys, group, axis=0)
    query_products = mx.repeat(q @ keys, group, axis=0)
    q, k = mx.repeat(q, group, axis=0), mx.repeat(k, group, axis=0)
    inverse = invert_unit_lower(key_products * pair_decay * beta)
    since_start = functions.exp(mx.cumsum(log_decay, axis=-1))[..., None]  # [Hv, N, C, 1]
    values = inverse @ (v * beta)  # [Hv, N, C, Dv]
    read_keys = inverse @ (k * (beta * since_start))  # [Hv, N, C, Dk]
    weights = query_products * pair_decay  # already lower triangular
    read_queries = q * since_start
    write_keys = (k * pair_decay[..., -1, :, None]).swapaxes(-1, -2)  # [Hv, N, Dk, C]
    chunk_decay = since_start[:, :, -1:, :]  # [Hv, N, 1, 1]

    rows = []
    for n in range(N):
        written = values[:, n] - read_keys[:, n] @ state  # [Hv, C, Dv]
        rows.append(read_queries[:, n] @ state + weights[:, n] @ written)
        state = state * chunk_decay[:, n] + write_keys[:, n] @ written
    return mx.concatenate(rows, axis=1)[:, :T], state
