"""Token embedding at the entrance, final norm and output head at the exit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from teacher.backend.device import mx
from teacher.model.blocks import rms_norm, widen
from teacher.snapshot.config import ModelConfig
from teacher.snapshot.weights import Weights

HEAD_ROWS = 128  # rows of one head product; part of the graph policy
HEAD_VOCABULARY = 16384  # vocabulary entries of one head product; part of the graph policy
_F32_RESIDENT_BYTES = 512 << 20  # a head up to this size is kept widened, a larger one as BF16


def embed(source: Weights, token_ids: Sequence[int]) -> mx.array:
    """Gather the rows of the embedding table, [T, D] float32; the table itself is never widened."""
    return widen(source.embedding_rows(token_ids))


class OutputHead:
    """Final norm and output head.

    Logits are a function of the normalised hidden state alone, and always computed in the same blocks: rows of one
    call in groups of 128, vocabulary in groups of 16,384. That makes them reproducible from stored hidden states.
    """

    def __init__(self, source: Weights, config: ModelConfig) -> None:
        norm = widen(source.final_norm())
        self._scale = norm if source.folded else 1.0 + norm
        self._epsilon = config.rms_norm_eps
        small = config.vocab_size * config.hidden_size * 4 <= _F32_RESIDENT_BYTES
        # Dequantized values are no BF16 values: they stay as wide as they are.
        keep = mx.float32 if small or source.head_rows(0, 1).dtype != "BF16" else mx.bfloat16
        starts = range(0, config.vocab_size, HEAD_VOCABULARY)
        stops = (min(start + HEAD_VOCABULARY, config.vocab_size) for start in starts)
        self._blocks = [
            widen(source.head_rows(start, stop)).astype(keep) for start, stop in zip(starts, stops, strict=True)
        ]
        mx.eval(self._scale, *self._blocks)

    def normalise(self, x: mx.array) -> mx.array:
        """Return the final norm of the residual stream, [T, D] float32."""
        return rms_norm(x, self._scale, self._epsilon)

    def logits(self, normalised: mx.array) -> Iterator[npt.NDArray[np.float32]]:
        """Yield the logits of one call's rows in blocks of at most 128 rows, [n, V] float32."""
        for start in range(0, normalised.shape[0], HEAD_ROWS):
            rows = normalised[start : start + HEAD_ROWS]
            parts = []
            for block in self._blocks:
                part = rows @ block.astype(mx.float32).T
                mx.eval(part)  # one widened vocabulary block at a time
                parts.append(part)
            yield np.array(parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1))
