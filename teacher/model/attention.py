"""Gated full attention: query and gate from one projection, normalised heads, partial rotation, grouped keys."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from teacher.backend import functions
from teacher.backend.device import mx

QUERY_BLOCK = 256  # rows of the score matrix held at once; part of the graph policy


def rotary_angles(first_position: int, tokens: int, rotary_dim: int, theta: float) -> npt.NDArray[np.float32]:
    """Return rotary angles [T, rotary_dim / 2] in radians, rounded as the released definition rounds them.

    Inverse frequencies and their product with the position are F32 there, so they are here: at position 1e5 that is
    off by up to 1e-2, and a teacher that computed better angles would be another model.
    For text all three position axes agree and the interleaved sections select equal values.
    """
    exponent = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    power = np.power(np.float64(theta), exponent.astype(np.float64)).astype(np.float32)
    frequency = np.float32(1.0) / power
    position = np.arange(first_position, first_position + tokens, dtype=np.float32)
    return position[:, None] * frequency[None, :]


def rotary_tables(first_position: int, tokens: int, rotary_dim: int, theta: float) -> tuple[mx.array, mx.array]:
    """Return (cos, sin), each [T, rotary_dim / 2] float32.

    They are computed on the host in F64 and rounded once: GPU sine and cosine lose digits at large angles.
    """
    angles = rotary_angles(first_position, tokens, rotary_dim, theta).astype(np.float64)
    return mx.array(np.cos(angles).astype(np.float32)), mx.array(np.sin(angles).astype(np.float32))


def rotate(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    """Rotate the first 2 * cos.shape[-1] entries of each head, pairing entry i with i + half; the rest passes.

    Shapes:
        x: [H, T, head_dim]; cos, sin: [T, rotary_dim / 2].
    Source:
        transformers 5.24 qwen3_5 `apply_rotary_pos_emb`.
    """
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return mx.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def causal_attention(q: mx.array, k: mx.array, v: mx.array, first_position: int) -> mx.array:
    """Attend from T new positions to all positions up to their own.

    Shapes:
        q: [Hq, T, head_dim]; k, v: [Hkv, first_position + T, head_dim]; Hq is a multiple of Hkv.
    Dtypes:
        All float32; scores, softmax and sums in float32.
    Units:
        Scores are scaled by head_dim ** -0.5.

    Returns:
        [Hq, T, head_dim] float32.
    Source:
        transformers 5.24 qwen3_5 `eager_attention_forward`.
    Differs from source:
        Queries are taken in blocks of 256, each against the keys it can see, so that memory does not grow with T * T.
    """
    Hq, T, width = q.shape
    Hkv = k.shape[0]
    group = Hq // Hkv
    q = q * (width**-0.5)
    outputs = []
    for start in range(0, T, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, T)
        seen = first_position + stop
        block = q[:, start:stop].reshape(Hkv, group * (stop - start), width)
        scores = (block @ k[:, :seen].swapaxes(-1, -2)).reshape(Hkv, group, stop - start, seen)
        if stop - start > 1:
            rows = mx.arange(first_position + start, first_position + stop)[:, None]
            scores = mx.where(mx.arange(seen)[None, :] <= rows, scores, -mx.inf)
        share = functions.softmax(scores).reshape(Hkv, group * (stop - start), seen)
        outputs.append((share @ v[:, :seen]).reshape(Hq, stop - start, width))
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=1)
