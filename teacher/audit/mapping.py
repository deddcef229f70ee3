"""What llama.cpp's converter makes of each source tensor: its name, its order of value heads, and its arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from teacher.snapshot.config import FULL, ModelConfig
from teacher.snapshot.folder import Snapshot, read_bits, widen_bits

F32 = npt.NDArray[np.float32]
Order = npt.NDArray[np.int64]
PLUS_ONE, NEGATIVE_EXP, PLAIN = "plus_one", "negative_exp", "plain"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMap:
    """How one GGUF tensor is made of one source tensor.

    Attributes:
        name: in the GGUF; source: in the snapshot, without prefix.
        layer: index of the decoder layer, None outside of them.
        kind: the name within a layer.
        function: "plain", "plus_one" (norms of weight 1 + w) or "negative_exp" (A_log to -exp(A_log)).
        rows, columns: order in which the source's rows or columns are taken; None keeps it. The source has value heads
            grouped by key head, the GGUF takes one of each key head in turn.
    """

    name: str
    source: str
    layer: int | None
    kind: str
    function: str = PLAIN
    rows: Order | None = None
    columns: Order | None = None

    def apply(self, values: F32) -> F32:
        """Return the function of source values, in float32 as the converter computes it."""
        if self.function == PLUS_ONE:
            return values + np.float32(1)
        if self.function == NEGATIVE_EXP:
            return -np.exp(values)
        return values


class SourceTensor:
    """One tensor of the snapshot as rows of float32, read as they are asked for."""

    def __init__(self, snapshot: Snapshot, name: str) -> None:
        entry = snapshot.tensors[name]
        self._bits = read_bits(snapshot.folder, entry).reshape(_as_rows(entry.shape))
        self.size_bytes = entry.stop - entry.start

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns; a vector is one row, or one a row where it is one value for each head."""
        return self._bits.shape[0], self._bits.shape[1]

    def rows(self, which: slice | Order) -> F32:
        """Return some rows, exactly."""
        return widen_bits(np.asarray(self._bits[which]))


def _as_rows(shape: tuple[int, ...]) -> tuple[int, int]:
    return (1, shape[0]) if len(shape) == 1 else (shape[0], shape[-1])


def expected_rows(source: SourceTensor, mapping: TensorMap, which: slice | Order) -> F32:
    """Return the rows that the GGUF should hold at `which`."""
    chosen = which if mapping.rows is None else mapping.rows[which]
    values = source.rows(chosen)
    return mapping.apply(values if mapping.columns is None else values[:, mapping.columns])


def map_tensors(config: ModelConfig) -> Iterator[TensorMap]:
    """Yield the map of every tensor that a GGUF of this model has.

    Source:
        llama.cpp's converter of the qwen35 architecture.
    """
    yield TensorMap(name="token_embd.weight", source="embed_tokens.weight", layer=None, kind="token_embd")
    if not config.tie_word_embeddings:
        yield TensorMap(name="output.weight", source="lm_head.weight", layer=None, kind="output")
    yield TensorMap(name="output_norm.weight", source="norm.weight", layer=None, kind="output_norm", function=PLUS_ONE)
    Hk, Hv, Dv = config.linear_num_key_heads, config.linear_num_value_heads, config.linear_value_head_dim
    heads = np.arange(Hv).reshape(Hk, Hv // Hk).T.ravel()
    lanes = (heads[:, None] * Dv + np.arange(Dv)).ravel()
    keys = 2 * Hk * config.linear_key_head_dim
    tail = np.concatenate([np.arange(keys), keys + lanes])
    shared = {
        "attn_norm.weight": ("input_layernorm.weight", PLUS_ONE, None, None),
        "post_attention_norm.weight": ("post_attention_layernorm.weight", PLUS_ONE, None, None),
        "ffn_gate.weight": ("mlp.gate_proj.weight", PLAIN, None, None),
        "ffn_up.weight": ("mlp.up_proj.weight", PLAIN, None, None),
        "ffn_down.weight": ("mlp.down_proj.weight", PLAIN, None, None),
    }
    full = {
        "attn_q.weight": ("self_attn.q_proj.weight", PLAIN, None, None),
        "attn_k.weight": ("self_attn.k_proj.weight", PLAIN, None, None),
        "attn_v.weight": ("self_attn.v_proj.weight", PLAIN, None, None),
        "attn_output.weight": ("self_attn.o_proj.weight", PLAIN, None, None),
        "attn_q_norm.weight": ("self_attn.q_norm.weight", PLUS_ONE, None, None),
        "attn_k_norm.weight": ("self_attn.k_norm.weight", PLUS_ONE, None, None),
    }
    linear = {
        "attn_qkv.weight": ("linear_attn.in_proj_qkv.weight", PLAIN, tail, None),
        "attn_gate.weight": ("linear_attn.in_proj_z.weight", PLAIN, lanes, None),
        "ssm_alpha.weight": ("linear_attn.in_proj_a.weight", PLAIN, heads, None),
        "ssm_beta.weight": ("linear_attn.in_proj_b.weight", PLAIN, heads, None),
        "ssm_conv1d.weight": ("linear_attn.conv1d.weight", PLAIN, tail, None),
        "ssm_a": ("linear_attn.A_log", NEGATIVE_EXP, None, heads),
        "ssm_dt.bias": ("linear_attn.dt_bias", PLAIN, None, heads),
        "ssm_norm.weight": ("linear_attn.norm.weight", PLAIN, None, None),
        "ssm_out.weight": ("linear_attn.out_proj.weight", PLAIN, None, lanes),
    }
    for layer, kind in enumerate(config.layer_types):
        for name, (source, function, rows, columns) in {**shared, **(full if kind == FULL else linear)}.items():
            yield TensorMap(
                name=f"blk.{layer}.{name}",
                source=f"layers.{layer}.{source}",
                layer=layer,
                kind=name.removesuffix(".weight"),
                function=function,
                rows=rows,
                columns=columns,
            )
