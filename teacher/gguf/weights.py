"""A GGUF's weights in the snapshot's layout: what teacher math needs to run them in place of the source's.

Blocks are dequantized by ggml, exactly as the engine reads them, to float32; value heads are put back into the
source's order. Nothing else is undone: norms keep their +1 and `A_log` is the file's `ssm_a`, so that a wrong value
stays as wrong as it is in the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from receipts.errors import GgufError
from teacher.audit.mapping import TensorMap, map_tensors
from teacher.audit.quants import dequantize, quantize, row_bytes
from teacher.gguf.file import GgufTensor, read_gguf
from teacher.gguf.match import verify_matches
from teacher.snapshot.config import ModelConfig
from teacher.snapshot.folder import Snapshot
from teacher.snapshot.weights import StoredTensor, WeightSource

F32 = npt.NDArray[np.float32]


class GgufWeights:
    """The text model's tensors of a GGUF; `teacher.snapshot.weights.Weights`.

    Attributes:
        folded: true, as the file holds 1 + w of norms and -exp(A_log).

    Args:
        path: the GGUF.
        config: of the snapshot it belongs to.

    Raises:
        GgufError: the file is broken, or not of this model.
        EngineMissingError: no llama.cpp package is installed, whose dequantizers are used.
    """

    folded = True

    def __init__(self, path: Path, config: ModelConfig) -> None:
        gguf = read_gguf(path)
        verify_matches(gguf, config)
        self._maps = {one.source: one for one in map_tensors(config)}
        self._tensors = {tensor.name: tensor for tensor in gguf.tensors}
        self._data = np.memmap(path, dtype=np.uint8, mode="r")
        if self._data.size != gguf.size_bytes:
            raise GgufError(f"{gguf.name}: expected {gguf.size_bytes} bytes as at the start, got {self._data.size}")
        # llama.cpp takes the embedding where there is no head of its own, and the head where there is one.
        self._head = "output.weight" if "output.weight" in self._tensors else "token_embd.weight"

    def layer(self, index: int) -> dict[str, StoredTensor]:
        """Return one layer's tensors, float32, by their checkpoint names within the layer."""
        prefix = f"layers.{index}."
        return {name.removeprefix(prefix): self._whole(one) for name, one in self._maps.items() if one.layer == index}

    def embedding_rows(self, token_ids: Sequence[int]) -> StoredTensor:
        """Return rows of the embedding table, [T, D]."""
        return _stored("embed_tokens.weight", self._rows("token_embd.weight", np.asarray(token_ids, dtype=np.int64)))

    def head_rows(self, start: int, stop: int) -> StoredTensor:
        """Return rows of the output head, [stop - start, D]."""
        return _stored("lm_head.weight", self._rows(self._head, slice(start, stop)))

    def final_norm(self) -> StoredTensor:
        """Return the final norm's scale, [D]."""
        return self._whole(self._maps["norm.weight"])

    def type_of(self, name: str) -> str:
        """Return the element type of a GGUF tensor."""
        return self._tensors[name].type

    def _whole(self, mapping: TensorMap) -> StoredTensor:
        tensor = self._tensors[mapping.name]
        values = self._rows(mapping.name, slice(None)).reshape(tensor.shape)
        return _stored(mapping.source, _in_source_order(values, mapping))

    def _rows(self, name: str, which: slice | npt.NDArray[np.int64]) -> F32:
        tensor = self._tensors[name]
        held = self._data[tensor.start : tensor.start + tensor.size_bytes]
        rows, columns = _as_rows(tensor)
        return dequantize(tensor.type, held.reshape(rows, row_bytes(tensor.type, columns))[which], columns)


class RequantizedWeights:
    """The source's layers as a GGUF's types hold them when quantized honestly: what the file could be at best."""

    folded = True

    def __init__(self, snapshot: Snapshot, gguf: GgufWeights) -> None:
        self._source = WeightSource(snapshot)
        self._gguf = gguf
        self._maps = {one.source: one for one in map_tensors(snapshot.config)}

    def layer(self, index: int) -> dict[str, StoredTensor]:
        """Return one layer's tensors, float32, by their checkpoint names within the layer."""
        return {
            name: self._requantized(f"layers.{index}.{name}", tensor)
            for name, tensor in self._source.layer(index).items()
        }

    def embedding_rows(self, token_ids: Sequence[int]) -> StoredTensor:
        """Return rows of the embedding table, [T, D]."""
        return self._requantized("embed_tokens.weight", self._source.embedding_rows(token_ids))

    def _requantized(self, name: str, tensor: StoredTensor) -> StoredTensor:
        mapping = self._maps[name]
        values = mapping.apply(tensor.float32())
        rows = values.reshape(1, -1) if values.ndim == 1 else values.reshape(values.shape[0], -1)
        # Blocks lie along rows, so a type sees the same blocks whatever the order of whole rows; where columns are
        # reordered, they are cut as the file has them.
        order = mapping.columns
        placed = rows if order is None else rows[:, order]
        made = quantize(self._gguf.type_of(mapping.name), np.ascontiguousarray(placed))
        if order is not None:
            back = np.empty_like(made)
            back[:, order] = made
            made = back
        return _stored(name, made.reshape(values.shape))


def _as_rows(tensor: GgufTensor) -> tuple[int, int]:
    return (1, tensor.shape[0]) if len(tensor.shape) == 1 else (tensor.shape[0], tensor.shape[-1])


def _in_source_order(values: F32, mapping: TensorMap) -> F32:
    """Undo the order in which a converter takes rows or columns (a vector's entries count as columns)."""
    for order, axis in ((mapping.rows, 0), (mapping.columns, values.ndim - 1)):
        if order is not None:
            back = np.empty_like(values)
            place: list[slice | npt.NDArray[np.int64]] = [slice(None)] * values.ndim
            place[axis] = order
            back[tuple(place)] = values
            values = back
    return values


def _stored(name: str, values: F32) -> StoredTensor:
    return StoredTensor(name=name, dtype="F32", shape=values.shape, bits=values)
