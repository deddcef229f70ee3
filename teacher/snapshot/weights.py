"""Named arrays of one layer at a time, and rows of the large tables, mapped from the snapshot's shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from teacher.snapshot.folder import Snapshot, read_bits, widen_bits


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor as the snapshot holds it.

    Attributes:
        name: checkpoint name without prefix.
        dtype: "BF16" or "F32".
        shape: axes.
        bits: the elements in that shape; BF16 as uint16.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    bits: npt.NDArray[np.generic]

    def float32(self) -> npt.NDArray[np.float32]:
        """Return the values in float32, exactly."""
        return widen_bits(self.bits)


class Weights(Protocol):
    """Where a replay takes its weights from."""

    @property
    def folded(self) -> bool: ...  # noqa: D102 - an interface; the classes say it
    def layer(self, index: int) -> Mapping[str, StoredTensor]: ...  # noqa: D102
    def embedding_rows(self, token_ids: Sequence[int]) -> StoredTensor: ...  # noqa: D102
    def head_rows(self, start: int, stop: int) -> StoredTensor: ...  # noqa: D102
    def final_norm(self) -> StoredTensor: ...  # noqa: D102


class WeightSource:
    """The text model's tensors, read when asked for and kept by nobody.

    Attributes:
        folded: whether norm weights already hold their +1, and `A_log` stands for -exp(A_log); a snapshot's do not.

    Args:
        snapshot: a checked snapshot; only the parts that are asked for are read.
    """

    folded = False

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def layer(self, index: int) -> dict[str, StoredTensor]:
        """Return one layer's tensors, by name within the layer ("mlp.up_proj.weight")."""
        prefix = f"layers.{index}."
        return {
            name.removeprefix(prefix): self._tensor(name) for name in self._snapshot.tensors if name.startswith(prefix)
        }

    def embedding_rows(self, token_ids: Sequence[int]) -> StoredTensor:
        """Return rows of the embedding table, [T, D]."""
        table = self._tensor("embed_tokens.weight")
        return _part(table, table.bits[np.asarray(token_ids, dtype=np.int64)])

    def head_rows(self, start: int, stop: int) -> StoredTensor:
        """Return rows of the output head, [stop - start, D]; the embedding's where they are tied."""
        tied = self._snapshot.config.tie_word_embeddings
        table = self._tensor("embed_tokens.weight" if tied else "lm_head.weight")
        return _part(table, table.bits[start:stop])

    def final_norm(self) -> StoredTensor:
        """Return the final norm's weight w of 1 + w, [D]."""
        return self._tensor("norm.weight")

    def _tensor(self, name: str) -> StoredTensor:
        entry = self._snapshot.tensors[name]
        bits = read_bits(self._snapshot.folder, entry).reshape(entry.shape)
        return StoredTensor(name=name, dtype=entry.dtype, shape=entry.shape, bits=bits)


def _part(table: StoredTensor, bits: npt.NDArray[np.generic]) -> StoredTensor:
    return StoredTensor(name=table.name, dtype=table.dtype, shape=bits.shape, bits=bits)
