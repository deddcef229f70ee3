"""Why a tensor is not its source: known transformations tried one after another, the best that fits named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from teacher.audit.mapping import NEGATIVE_EXP, PLAIN, PLUS_ONE, SourceTensor, TensorMap, expected_rows, map_tensors
from teacher.snapshot.folder import Snapshot

F32 = npt.NDArray[np.float32]
# A transformation explains a tensor when it takes away nine tenths of the error's energy and leaves a tenth of the
# tensor's at most: a chance likeness does neither.
_FITS_DB, _BETTER_DB = 10.0, 10.0
_ROWS_TRIED = 4


def explain(snapshot: Snapshot, mapping: TensorMap, rows: npt.NDArray[np.int64], found: F32, wanted: F32) -> str | None:
    """Return the sentence of the known transformation that explains a tensor, None when none does.

    Args:
        snapshot: the source.
        mapping: of the tensor.
        rows: which of its rows are given.
        found: these rows as the GGUF holds them, dequantized.
        wanted: as they should be.
    """
    if found.size > 1 and float(found.min()) == float(found.max()):
        return f"every value is {float(found.flat[0]):.6g}"
    best, sentence = max(_distance_db(found, wanted) + _BETTER_DB, _FITS_DB), None
    for text, make in _alternatives(snapshot, mapping, rows):
        try:
            other = make()
        except (IndexError, KeyError):
            continue
        if other.shape == found.shape and (fit := _distance_db(found, other)) > best:
            best, sentence = fit, text
    return sentence or _moved_rows(snapshot, mapping, rows, found)


def _distance_db(found: F32, other: F32) -> float:
    wide = other.astype(np.float64)
    error, energy = float(np.square(found - wide).sum()), float(np.square(wide).sum())
    return 10.0 * float(np.log10(max(energy, 1e-300) / max(error, 1e-300)))


def _alternatives(
    snapshot: Snapshot, mapping: TensorMap, rows: npt.NDArray[np.int64]
) -> Iterator[tuple[str, Callable[[], F32]]]:
    """Yield (sentence, what the rows would be)."""

    def taken(changed: TensorMap) -> F32:
        return expected_rows(SourceTensor(snapshot, changed.source), changed, rows)

    yield "its sign is reversed", lambda: -taken(mapping)
    if mapping.function == NEGATIVE_EXP:
        raw = replace(mapping, function=PLAIN)
        yield "looks like A_log itself, expected -exp(A_log)", lambda: taken(raw)
        yield "looks like exp(A_log), expected -exp(A_log)", lambda: -taken(mapping)
        yield "looks like -exp(-exp(A_log)), expected -exp(A_log)", lambda: -np.exp(taken(mapping))
        yield "looks like A_log itself, value heads not reordered", lambda: taken(replace(raw, columns=None))
    if mapping.function == PLUS_ONE:
        yield "norm weight lacks +1", lambda: taken(replace(mapping, function=PLAIN))
        yield "norm weight has +1 twice", lambda: taken(mapping) + np.float32(1)
    if mapping.kind == "ssm_norm":
        yield "the gated norm has +1, which it must not", lambda: taken(replace(mapping, function=PLUS_ONE))
    if mapping.rows is not None or mapping.columns is not None:
        what = "rows" if mapping.rows is not None else "columns"
        yield f"{what} permuted: value heads not reordered", lambda: taken(replace(mapping, rows=None, columns=None))
    if mapping.kind == "ssm_conv1d":
        yield "convolution taps reversed", lambda: taken(mapping)[:, ::-1]
    if mapping.kind == "attn_q":
        yield (
            "queries and gates of all heads stand in two halves, expected them in turn, head by head",
            (lambda: _halves(snapshot, mapping, rows)),
        )
        yield "gates and queries of each head have changed places", lambda: _halves(snapshot, mapping, rows, swap=True)
    for other in map_tensors(snapshot.config):
        same = other.kind == mapping.kind
        relatives = {other.kind, mapping.kind} in ({"attn_q_norm", "attn_k_norm"}, {"output", "token_embd"})
        if other.name != mapping.name and same and other.layer is not None:
            yield f"matches layer {other.layer}, expected layer {mapping.layer}", partial(taken, other)
        elif relatives and other.layer == mapping.layer:
            yield f"matches {other.kind}, expected {mapping.kind}", partial(taken, other)
        elif other.layer == mapping.layer and other.name != mapping.name:
            yield f"matches {other.name}, another tensor", partial(taken, other)


def _halves(snapshot: Snapshot, mapping: TensorMap, rows: Any, *, swap: bool = False) -> F32:
    """Return q_proj's rows with all queries before all gates, or with each head's gate before its query."""
    heads, width = snapshot.config.num_attention_heads, snapshot.config.head_dim
    order = np.arange(2 * heads * width).reshape(heads, 2, width)
    order = order[:, ::-1] if swap else order.transpose(1, 0, 2)
    return expected_rows(SourceTensor(snapshot, mapping.source), replace(mapping, rows=order.ravel()), rows)


def _moved_rows(snapshot: Snapshot, mapping: TensorMap, rows: npt.NDArray[np.int64], found: F32) -> str | None:
    """Look for some of the rows elsewhere in the same source tensor, as when a vocabulary was put in another order."""
    source = SourceTensor(snapshot, mapping.source)
    if source.shape[0] < 2 or len(rows) < _ROWS_TRIED:
        return None
    target = expected_rows(source, mapping, rows)
    error = np.square(target - found).sum(axis=1) / np.maximum(np.square(target).sum(axis=1), 1e-30)
    tried = np.argsort(-error)[:_ROWS_TRIED]
    probes = found[tried] / np.maximum(np.linalg.norm(found[tried], axis=1, keepdims=True), 1e-30)
    best, where = np.full(len(tried), -1.0), np.zeros(len(tried), dtype=np.int64)
    step = max(1, (1 << 20) // source.shape[1])
    for first in range(0, source.shape[0], step):
        part = expected_rows(source, mapping, slice(first, min(first + step, source.shape[0])))
        likeness = probes @ part.T / np.maximum(np.linalg.norm(part, axis=1), 1e-30)
        top = likeness.argmax(axis=1)
        value = likeness[np.arange(len(tried)), top]
        better = value > best
        best[better], where[better] = value[better], first + top[better]
    moved = (best > 0.95) & (where != rows[tried])
    if not moved.all():
        return None
    return f"rows permuted: row {rows[tried[0]]} holds what row {where[0]} should"
