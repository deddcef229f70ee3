"""Exponentials and what is made of them, in float32.

MLX's CPU backend on x86 computes exp one value at a time, 12 ns each, which was 40 % of a prefill; NumPy's vectorised
F32 exp takes 0.5 ns and is as accurate (`precision` measures whichever is in use). So on the CPU the values visit
NumPy, whose arrays share memory with MLX's there; on a GPU they stay where they are.
"""

from __future__ import annotations

import functools

import numpy as np

from teacher.device import current_device, mx


@functools.cache
def provider() -> str:
    """Say which library computes exp here, and for which processor features; part of the graph policy."""
    if current_device().backend != "cpu":
        return "mlx"
    runtime = np._core._multiarray_umath  # type: ignore[attr-defined]
    found = [name for name in runtime.__cpu_dispatch__ if runtime.__cpu_features__[name]]
    return " ".join(["numpy", np.__version__, *found])


def exp(x: mx.array) -> mx.array:
    """Return e**x; any shape, float32."""
    if current_device().backend != "cpu":
        return mx.exp(x)
    x = mx.contiguous(x)
    mx.eval(x)
    with np.errstate(over="ignore", under="ignore"):  # infinity and zero are the right answers there
        return mx.array(np.exp(np.asarray(memoryview(x))))  # type: ignore[arg-type]


def sigmoid(x: mx.array) -> mx.array:
    """Return 1 / (1 + exp(-x)); exp overflows to infinity and the quotient is 0, as it should be."""
    return 1.0 / (1.0 + exp(-x))


def silu(x: mx.array) -> mx.array:
    """Return x * sigmoid(x)."""
    return x / (1.0 + exp(-x))


def softplus(x: mx.array) -> mx.array:
    """Return log(1 + exp(x)) without overflow; for the few values of a decay, so MLX's own serves."""
    return mx.logaddexp(x, mx.array(0.0))


def softmax(x: mx.array) -> mx.array:
    """Return the softmax over the last axis; entries of -inf get 0, and no row may hold only those."""
    e = exp(x - mx.max(x, axis=-1, keepdims=True))
    return e / mx.sum(e, axis=-1, keepdims=True)
