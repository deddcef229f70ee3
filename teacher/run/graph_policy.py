"""How the teacher computes, as a value with its own digest.

It is read afresh before each call, from what is in force and not from what was asked for, and recorded with the call.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any

from receipts.canonical import canonical_bytes
from receipts.digest import sha256_bytes
from teacher.backend import functions, precision
from teacher.backend.device import Device, mx
from teacher.model import attention, blocks, gated_delta, head


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphPolicy:
    """The teacher's numerics.

    Attributes:
        weights, activations, state: element types of what the snapshot holds, of the stream, and of the cache.
        matmul: how products are formed: "f32" is a float32 product of widened weights, summed in float32.
        tf32: value of MLX_ENABLE_TF32 in force.
        precision_limit: relative error that the known product was held to.
        precision_passed: whether the self-check passed on this device, in this process.
        delta_chunk_tokens, delta_recurrent_max_tokens: chunk length, and calls up to this length take the recurrence.
        attention_query_block: rows of scores formed at once.
        head_rows, head_vocabulary: block of one head product.
        exponential: library behind exp, with the processor features it may use.
        backend, default_device, mlx_version, blas, blas_kernel, blas_threads: what computes.
    """

    schema: str
    weights: str
    activations: str
    state: str
    matmul: str
    tf32: str
    precision_limit: float
    precision_passed: bool
    delta_chunk_tokens: int
    delta_recurrent_max_tokens: int
    attention_query_block: int
    head_rows: int
    head_vocabulary: int
    exponential: str
    backend: str
    default_device: str
    mlx_version: str
    blas: str
    blas_kernel: str
    blas_threads: int

    def to_dict(self) -> dict[str, Any]:
        """Return the policy as plain values."""
        return asdict(self)

    def sha256(self) -> str:
        """Return the SHA-256 of the policy's canonical bytes, in hex."""
        return sha256_bytes(canonical_bytes(self.to_dict())).hex


def current_policy(device: Device, *, precision_passed: bool) -> GraphPolicy:
    """Read the policy in force now."""
    return GraphPolicy(
        schema="source-teacher/graph-policy/v1",
        weights="bf16",
        activations="f32",
        state="f32",
        matmul="f32",
        tf32=os.environ.get("MLX_ENABLE_TF32", ""),
        precision_limit=precision.PRODUCT_LIMIT,
        precision_passed=precision_passed,
        delta_chunk_tokens=gated_delta.CHUNK_TOKENS,
        delta_recurrent_max_tokens=blocks.RECURRENT_MAX_TOKENS,
        attention_query_block=attention.QUERY_BLOCK,
        head_rows=head.HEAD_ROWS,
        head_vocabulary=head.HEAD_VOCABULARY,
        exponential=functions.provider(),
        backend=device.backend,
        default_device=str(mx.default_device()),
        mlx_version=device.mlx_version,
        blas=device.blas.config or device.blas.name,
        blas_kernel=device.blas.kernel,
        blas_threads=device.blas.threads,
    )
