"""The model, written plainly in NumPy F64: the arbiter when teacher and reference disagree.

One token at a time through the delta rule, one matrix for attention, no blocks and no cache. It is slow, and meant
to be read: this is what a dense Qwen3.5 text model computes. Cast to F64, transformers is no arbiter, because its
delta rule and norms go back to F32 inside.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from teacher.snapshot.config import ModelConfig
from teacher.snapshot.weights import WeightSource

F64 = npt.NDArray[np.float64]


def forward(source: WeightSource, config: ModelConfig, token_ids: Sequence[int], *, exact_angles: bool = False) -> F64:
    """Run one sequence from an empty cache.

    Args:
        source: weights, widened to F64 (exactly).
        config: sizes.
        token_ids: T ids.
        exact_angles: compute rotary angles in F64 too; otherwise they are rounded to F32 as the released definition
            rounds them, which is part of the model.

    Returns:
        Logits [T, V] float64.

    Source:
        transformers 5.24 `modeling_qwen3_5`.
    """
    x = source.embedding_rows(token_ids).float32().astype(np.float64)
    for layer in range(config.num_hidden_layers):
        w = {name: tensor.float32().astype(np.float64) for name, tensor in source.layer(layer).items()}
        h = rms_norm(x, 1.0 + w["input_layernorm.weight"], config.rms_norm_eps)
        if config.layer_types[layer] == "full_attention":
            x = x + full_attention(h, w, config, exact_angles)
        else:
            x = x + linear_attention(h, w, config)
        h = rms_norm(x, 1.0 + w["post_attention_layernorm.weight"], config.rms_norm_eps)
        gated = silu(h @ w["mlp.gate_proj.weight"].T) * (h @ w["mlp.up_proj.weight"].T)
        x = x + gated @ w["mlp.down_proj.weight"].T
    h = rms_norm(x, 1.0 + source.final_norm().float32().astype(np.float64), config.rms_norm_eps)
    return h @ source.head_rows(0, config.vocab_size).float32().astype(np.float64).T


def full_attention(h: F64, w: dict[str, F64], config: ModelConfig, exact_angles: bool) -> F64:
    """Return gated causal attention of h, [T, D] to [T, D]."""
    T, width = h.shape[0], config.head_dim
    both = (h @ w["self_attn.q_proj.weight"].T).reshape(T, config.num_attention_heads, 2 * width)
    q, gate = both[..., :width], both[..., width:]
    k = (h @ w["self_attn.k_proj.weight"].T).reshape(T, config.num_key_value_heads, width)
    v = (h @ w["self_attn.v_proj.weight"].T).reshape(T, config.num_key_value_heads, width)
    angles = rotary_angles(T, config, exact_angles)
    q = rotate(rms_norm(q, 1.0 + w["self_attn.q_norm.weight"], config.rms_norm_eps), angles)
    k = rotate(rms_norm(k, 1.0 + w["self_attn.k_norm.weight"], config.rms_norm_eps), angles)
    group = config.num_attention_heads // config.num_key_value_heads
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(width)
    scores = np.where(np.tril(np.ones((T, T), dtype=bool)), scores, -np.inf)
    share = np.exp(scores - scores.max(axis=-1, keepdims=True))
    share /= share.sum(axis=-1, keepdims=True)
    y = np.einsum("hqk,khd->qhd", share, v) * sigmoid(gate)
    return y.reshape(T, -1) @ w["self_attn.o_proj.weight"].T


def linear_attention(h: F64, w: dict[str, F64], config: ModelConfig) -> F64:
    """Return the gated delta rule of h, [T, D] to [T, D]."""
    T = h.shape[0]
    Hk, Dk = config.linear_num_key_heads, config.linear_key_head_dim
    Hv, Dv = config.linear_num_value_heads, config.linear_value_head_dim
    mixed = h @ w["linear_attn.in_proj_qkv.weight"].T
    taps = w["linear_attn.conv1d.weight"].reshape(mixed.shape[1], -1)
    padded = np.concatenate([np.zeros((taps.shape[1] - 1, mixed.shape[1])), mixed])
    mixed = silu(np.stack([padded[j : j + T] * taps[:, j] for j in range(taps.shape[1])]).sum(0))
    q = mixed[:, : Hk * Dk].reshape(T, Hk, Dk)
    k = mixed[:, Hk * Dk : 2 * Hk * Dk].reshape(T, Hk, Dk)
    v = mixed[:, 2 * Hk * Dk :].reshape(T, Hv, Dv)
    q = q / np.sqrt((q * q).sum(-1, keepdims=True) + 1e-6) / np.sqrt(Dk)
    k = k / np.sqrt((k * k).sum(-1, keepdims=True) + 1e-6)
    q, k = np.repeat(q, Hv // Hk, axis=1), np.repeat(k, Hv // Hk, axis=1)
    log_decay = -np.exp(w["linear_attn.A_log"]) * np.logaddexp(
        h @ w["linear_attn.in_proj_a.weight"].T + w["linear_attn.dt_bias"], 0.0
    )
    beta = sigmoid(h @ w["linear_attn.in_proj_b.weight"].T)
    state, y = np.zeros((Hv, Dk, Dv)), np.empty((T, Hv, Dv))
    for t in range(T):
        state = state * np.exp(log_decay[t])[:, None, None]
        delta = beta[t][:, None] * (v[t] - np.einsum("hk,hkv->hv", k[t], state))
        state = state + k[t][:, :, None] * delta[:, None, :]
        y[t] = np.einsum("hk,hkv->hv", q[t], state)
    z = (h @ w["linear_attn.in_proj_z.weight"].T).reshape(T, Hv, Dv)
    y = rms_norm(y, w["linear_attn.norm.weight"], config.rms_norm_eps) * silu(z)
    return y.reshape(T, -1) @ w["linear_attn.out_proj.weight"].T


def rotary_angles(T: int, config: ModelConfig, exact: bool) -> F64:
    """Return rotary angles [T, rotary_dim / 2]; F32 arithmetic unless exact."""
    kind = np.dtype(np.float64 if exact else np.float32)
    exponent = (np.arange(0, config.rotary_dim, 2) / config.rotary_dim).astype(kind).astype(np.float64)
    frequency = (1 / np.power(config.rope_theta, exponent).astype(kind)).astype(kind)
    angles: F64 = (np.arange(T).astype(kind)[:, None] * frequency).astype(np.float64)
    return angles


def rotate(x: F64, angles: F64) -> F64:
    """Rotate the first entries of each head of x [T, H, width], pairing entry i with i + half."""
    half = angles.shape[1]
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def rms_norm(x: F64, scale: F64, epsilon: float) -> F64:
    """Return x / sqrt(mean(x^2) + epsilon) * scale over the last axis."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * scale


def sigmoid(x: F64) -> F64:
    """Return 1 / (1 + exp(-x)), without overflow."""
    return np.exp(-np.logaddexp(0.0, -x))


def silu(x: F64) -> F64:
    """Return x * sigmoid(x)."""
    return x * sigmoid(x)
