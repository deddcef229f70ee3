"""One decoder layer: prepared weights, and the function that applies them to a call.

Session and replay both call `apply_layer`, so that the order of their loops cannot change a bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from teacher.backend import functions
from teacher.backend.device import mx
from teacher.model import attention, gated_delta
from teacher.model.cache import FullSlot, Slot
from teacher.snapshot.config import ModelConfig

Tap = Callable[[str, mx.array], None]
"""Told the name and the result of each operation of a layer; it changes nothing."""

RECURRENT_MAX_TOKENS = 1  # calls up to this length use the plain recurrence; part of the graph policy


class Stored(Protocol):
    """A tensor as the snapshot holds it."""

    @property
    def dtype(self) -> str: ...  # noqa: D102 - an interface; the class says it
    @property
    def shape(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def bits(self) -> npt.NDArray[np.generic]: ...  # noqa: D102


def widen(tensor: Stored) -> mx.array:
    """Return the tensor's values in float32, exactly; `bits` holds BF16 as uint16."""
    values = mx.array(tensor.bits)
    if tensor.dtype == "BF16":
        values = values.view(mx.bfloat16).astype(mx.float32)
    return values.reshape(tensor.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class FullAttentionWeights:
    """Float32 weights of one gated full-attention mixer; norms already hold 1 + w."""

    q_proj: mx.array
    k_proj: mx.array
    v_proj: mx.array
    o_proj: mx.array
    q_norm: mx.array
    k_norm: mx.array


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttentionWeights:
    """Float32 weights of one gated delta-rule mixer; `rate` is -exp(A_log), `conv1d` is [channels, taps]."""

    in_proj_qkv: mx.array
    in_proj_z: mx.array
    in_proj_a: mx.array
    in_proj_b: mx.array
    conv1d: mx.array
    rate: mx.array
    dt_bias: mx.array
    norm: mx.array
    out_proj: mx.array


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """Float32 weights of one decoder layer.

    Attributes:
        input_layernorm, post_attention_layernorm: [D], holding 1 + w.
        gate_proj, up_proj: [I, D]; down_proj: [D, I].
        mixer: full or linear attention.
    """

    input_layernorm: mx.array
    post_attention_layernorm: mx.array
    gate_proj: mx.array
    up_proj: mx.array
    down_proj: mx.array
    mixer: FullAttentionWeights | LinearAttentionWeights


def prepare_layer(stored: Mapping[str, Stored], *, folded: bool = False) -> LayerWeights:
    """Widen one layer's tensors to float32 and fold what the definition computes from weights alone.

    Norm weights get their +1 in F32: rounded to BF16 first, it costs 2e-4 nats.

    Args:
        stored: the layer's tensors under their checkpoint names, without the layer's prefix.
        folded: whether norm weights already hold their +1, and A_log stands for -exp(A_log), as in a GGUF.
    """
    w = {name: widen(tensor) for name, tensor in stored.items()}

    def scale(name: str) -> mx.array:
        return w[name] if folded else 1.0 + w[name]

    mixer: FullAttentionWeights | LinearAttentionWeights
    if "self_attn.q_proj.weight" in w:
        mixer = FullAttentionWeights(
            q_proj=w["self_attn.q_proj.weight"],
            k_proj=w["self_attn.k_proj.weight"],
            v_proj=w["self_attn.v_proj.weight"],
            o_proj=w["self_attn.o_proj.weight"],
            q_norm=scale("self_attn.q_norm.weight"),
            k_norm=scale("self_attn.k_norm.weight"),
        )
    else:
        conv = w["linear_attn.conv1d.weight"]
        mixer = LinearAttentionWeights(
            in_proj_qkv=w["linear_attn.in_proj_qkv.weight"],
            in_proj_z=w["linear_attn.in_proj_z.weight"],
            in_proj_a=w["linear_attn.in_proj_a.weight"],
            in_proj_b=w["linear_attn.in_proj_b.weight"],
            conv1d=conv.reshape(conv.shape[0], conv.shape[-1]),
            rate=w["linear_attn.A_log"] if folded else -functions.exp(w["linear_attn.A_log"]),
            dt_bias=w["linear_attn.dt_bias"],
            norm=w["linear_attn.norm.weight"],
            out_proj=w["linear_attn.out_proj.weight"],
        )
    layer = LayerWeights(
        input_layernorm=scale("input_layernorm.weight"),
        post_attention_layernorm=scale("post_attention_layernorm.weight"),
        gate_proj=w["mlp.gate_proj.weight"],
        up_proj=w["mlp.up_proj.weight"],
        down_proj=w["mlp.down_proj.weight"],
        mixer=mixer,
    )
    mx.eval([getattr(layer, n) for n in LayerWeights.__slots__ if n != "mixer"])
    mx.eval([getattr(mixer, n) for n in type(mixer).__slots__])
    return layer


def no_tap(operation: str, result: mx.array) -> None:
    """Look at nothing."""


def rms_norm(x: mx.array, scale: mx.array, epsilon: float) -> mx.array:
    """Return x / sqrt(mean(x^2) + epsilon) * scale over the last axis; `scale` holds the +1 where there is one."""
    return x * mx.rsqrt(mx.mean(x * x, axis=-1, keepdims=True) + epsilon) * scale


def apply_full_attention(
    x: mx.array,
    w: FullAttentionWeights,
    config: ModelConfig,
    keys: mx.array,
    values: mx.array,
    position: int,
    tap: Tap = no_tap,
) -> tuple[mx.array, mx.array, mx.array]:
    """Run one gated full-attention mixer over a call.

    Shapes:
        x: [T, D]; keys, values: [1, Hkv, max_tokens, head_dim], valid up to `position`.
    Dtypes:
        All float32.

    Returns:
        (output [T, D], keys, values) with rows position .. position + T written.
    Source:
        transformers 5.24 `Qwen3_5Attention`.
    """
    T = x.shape[0]
    width, Hq, Hkv = config.head_dim, config.num_attention_heads, config.num_key_value_heads
    both = (x @ w.q_proj.T).reshape(T, Hq, 2 * width)  # each head: its query, then its gate
    q, gate = both[..., :width], both[..., width:].reshape(T, Hq * width)
    k = (x @ w.k_proj.T).reshape(T, Hkv, width)
    v = (x @ w.v_proj.T).reshape(T, Hkv, width)
    for name, made in (("query and gate projection", both), ("key projection", k), ("value projection", v)):
        tap(name, made.reshape(T, -1))
    cos, sin = attention.rotary_tables(position, T, config.rotary_dim, config.rope_theta)
    q, k = rms_norm(q, w.q_norm, config.rms_norm_eps), rms_norm(k, w.k_norm, config.rms_norm_eps)
    tap("query norm", q.reshape(T, -1))
    tap("key norm", k.reshape(T, -1))
    q = attention.rotate(q.swapaxes(0, 1), cos, sin)  # [Hq, T, width]
    k = attention.rotate(k.swapaxes(0, 1), cos, sin)
    tap("rotated keys", k.swapaxes(0, 1).reshape(T, -1))
    keys[0, :, position : position + T] = k
    values[0, :, position : position + T] = v.swapaxes(0, 1)
    seen = position + T
    y = attention.causal_attention(q, keys[0, :, :seen], values[0, :, :seen], position)
    y = y.swapaxes(0, 1).reshape(T, Hq * width)
    tap("attention", y)
    y = y * functions.sigmoid(gate)
    tap("gate", y)
    y = y @ w.o_proj.T
    tap("output projection", y)
    return y, keys, values


def causal_convolution(x: mx.array, history: mx.array, taps: mx.array) -> tuple[mx.array, mx.array]:
    """Convolve each channel with its own taps over the call and what came before it.

    Shapes:
        x: [T, channels]; history: [channels, max(K - 1, 1)], oldest first; taps: [channels, K], oldest first.

    Returns:
        (output [T, channels], new history); for K = 1 the history is carried but never read.
    """
    T, K = x.shape[0], taps.shape[1]
    joined = mx.concatenate([history.T, x], axis=0)
    start = history.shape[1] - (K - 1)
    total = joined[start : start + T] * taps[:, 0]
    for j in range(1, K):
        total = total + joined[start + j : start + j + T] * taps[:, j]
    return total, joined[-history.shape[1] :].T


def apply_linear_attention(
    x: mx.array,
    w: LinearAttentionWeights,
    config: ModelConfig,
    history: mx.array,
    state: mx.array,
    tap: Tap = no_tap,
) -> tuple[mx.array, mx.array, mx.array]:
    """Run one gated delta-rule mixer over a call.

    Shapes:
        x: [T, D]; history: [channels, max(K - 1, 1)]; state: [Hv, Dk, Dv].
    Dtypes:
        All float32.

    Returns:
        (output [T, D], new history, new state).
    Source:
        transformers 5.24 `Qwen3_5GatedDeltaNet`.
    """
    T = x.shape[0]
    Hk, Hv = config.linear_num_key_heads, config.linear_num_value_heads
    Dk, Dv = config.linear_key_head_dim, config.linear_value_head_dim
    mixed = x @ w.in_proj_qkv.T
    tap("query, key and value projection", mixed)
    mixed, history = causal_convolution(mixed, history, w.conv1d)
    mixed = functions.silu(mixed)
    tap("convolution", mixed)
    q = gated_delta.normalise(mixed[:, : Hk * Dk].reshape(T, Hk, Dk)) * (Dk**-0.5)
    k = gated_delta.normalise(mixed[:, Hk * Dk : 2 * Hk * Dk].reshape(T, Hk, Dk))
    v = mixed[:, 2 * Hk * Dk :].reshape(T, Hv, Dv)
    log_decay = w.rate * functions.softplus(x @ w.in_proj_a.T + w.dt_bias)  # [T, Hv]
    beta = functions.sigmoid(x @ w.in_proj_b.T)
    tap("decay", log_decay)
    tap("beta", beta)
    rule = gated_delta.recurrent if T <= RECURRENT_MAX_TOKENS else gated_delta.chunked
    y, state = rule(q.swapaxes(0, 1), k.swapaxes(0, 1), v.swapaxes(0, 1), log_decay.T, beta.T, state)
    tap("delta rule", y.swapaxes(0, 1).reshape(T, -1))
    z = (x @ w.in_proj_z.T).reshape(T, Hv, Dv)
    tap("gate projection", z.reshape(T, -1))
    y = rms_norm(y.swapaxes(0, 1), w.norm, config.rms_norm_eps) * functions.silu(z)  # the gated norm has no +1
    tap("gated norm", y.reshape(T, -1))
    y = y.reshape(T, Hv * Dv) @ w.out_proj.T
    tap("output projection", y)
    return y, history, state


def feed_forward(x: mx.array, w: LayerWeights, tap: Tap = no_tap) -> mx.array:
    """Return the SwiGLU feed-forward of x, [T, D] to [T, D]."""
    gated = functions.gated_silu(x @ w.gate_proj.T, x @ w.up_proj.T)
    tap("feed-forward gate and up", gated)
    y = gated @ w.down_proj.T
    tap("feed-forward down", y)
    return y


def apply_layer(
    x: mx.array, w: LayerWeights, config: ModelConfig, slot: Slot, position: int, tap: Tap = no_tap
) -> mx.array:
    """Run one decoder layer over one call, advance its cache slot, and wait for both.

    Shapes:
        x: [T, D]; position is that of its first row.
    Dtypes:
        Float32, the residual stream included.

    `tap` is told each operation's result, [T, ...]; heads lie one after another as in the checkpoint.

    Returns:
        The residual stream after the layer, [T, D].
    Source:
        transformers 5.24 `Qwen3_5DecoderLayer`.
    """
    h = rms_norm(x, w.input_layernorm, config.rms_norm_eps)
    tap("input norm", h)
    if isinstance(slot, FullSlot):
        assert isinstance(w.mixer, FullAttentionWeights)
        y, slot.k, slot.v = apply_full_attention(h, w.mixer, config, slot.k, slot.v, position, tap)
        slot.length += x.shape[0]
    else:
        assert isinstance(w.mixer, LinearAttentionWeights)
        y, history, state = apply_linear_attention(h, w.mixer, config, *slot.read(), tap)
        slot.write(history, state)
    x = x + y
    h = rms_norm(x, w.post_attention_layernorm, config.rms_norm_eps)
    tap("post-attention norm", h)
    x = x + feed_forward(h, w, tap)
    mx.eval(x, *slot.arrays())
    return x
