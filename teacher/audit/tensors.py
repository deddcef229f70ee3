"""The audit of a file: dequantize every tensor of a GGUF, and say what stands between it and its source.

Streams a few hundred kilobytes at a time, so that memory does not depend on a tensor's size. What a type can reach is
measured on evenly spread rows, by the type's own quantizer; the file's tensor is held against it on the same rows, so
that the two numbers differ by the file alone.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from receipts.errors import GgufError
from receipts.findings import Audit, TensorFinding
from teacher.audit.explain import explain
from teacher.audit.mapping import NEGATIVE_EXP, SourceTensor, TensorMap, expected_rows, map_tensors
from teacher.audit.metadata import audit_metadata
from teacher.audit.quants import EXACT_FLOATS, Bytes, block_length, dequantize, quantize, row_bytes
from teacher.audit.types import audit_types
from teacher.gguf.file import GgufTensor, read_gguf
from teacher.gguf.match import verify_matches
from teacher.snapshot.folder import Snapshot

_CHUNK = 1 << 16  # values at a time: their temporaries stay in a core's cache
_SAMPLE = 1 << 15  # values on which the reachable SQNR is measured: its own error is then below 0.1 dB
# An importance matrix gives up some plain error for error that matters less: files made with one lie up to 2 dB below
# the plain quantizer, so 3 dB, twice the error's energy, is the first that it does not explain.
_WORSE_DB = 3.0
# Rows differ, and the sample is not the whole tensor: 6 dB, twice the error, is allowed between them.
_WORSE_OVER_ALL_DB = 6.0
# A hundred times the error's energy is no choice of a quantizer.
_WRONG_DB = 20.0
# exp differs by an ulp or two between libraries: 2^-22 of a value, 132 dB; ten less leaves room for their sum.
_EXP_DB = 122.0


@dataclass(slots=True)
class _Sums:
    """What one pass over a tensor adds up, in float64."""

    error: float = 0.0
    source: float = 0.0
    actual: float = 0.0
    dot: float = 0.0
    max_abs: float = 0.0
    zeroed: int = 0
    nonfinite: int = 0

    def add(self, other: _Sums) -> None:
        for name in ("error", "source", "actual", "dot", "zeroed", "nonfinite"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.max_abs = max(self.max_abs, other.max_abs)


def sqnr_db(source: float, error: float) -> float | None:
    """Return 10 log10(source / error) of two energies; None where there is no error, -inf never: 0 source is -300."""
    if error == 0.0:
        return None
    return 10.0 * math.log10(source / error) if source > 0 else -300.0


def audit_file(
    snapshot: Snapshot,
    path: Path,
    *,
    threads: int = os.cpu_count() or 1,
    on_bytes: Callable[[int], Any] = lambda done: None,
) -> Audit:
    """Audit every tensor of a GGUF of the snapshot's model.

    Args:
        snapshot: a checked snapshot; only its text tensors are read.
        path: the GGUF.
        threads: tensors are cut into pieces that these share.
        on_bytes: told the bytes of source weights of each tensor when it is done.

    Raises:
        GgufError: the file is not of this model; names what differs.
        EngineMissingError: no llama.cpp package is installed, whose quantizers are used.
    """
    gguf = read_gguf(path)
    notes = verify_matches(gguf, snapshot.config)
    maps = {mapping.name: mapping for mapping in map_tensors(snapshot.config)}
    data = np.memmap(path, dtype=np.uint8, mode="r")
    if data.size != gguf.size_bytes:
        raise GgufError(f"{gguf.name}: expected {gguf.size_bytes} bytes as at the start, got {data.size}")
    findings, total = [], 0
    with ThreadPoolExecutor(threads) as pool:
        for tensor in gguf.tensors:
            mapping = maps.get(tensor.name)
            if mapping is None:
                continue  # vision, MTP and unknown tensors stand in the notes
            source = SourceTensor(snapshot, mapping.source)
            held = data[tensor.start : tensor.start + tensor.size_bytes]
            findings.append(_audit_tensor(snapshot, tensor, mapping, source, held, pool))
            total += source.size_bytes
            on_bytes(source.size_bytes)
    return Audit(
        file=gguf.name,
        source_bytes=total,
        tensors=tuple(findings),
        metadata=tuple(audit_metadata(gguf, snapshot.folder, snapshot.config)),
        types=tuple(audit_types(gguf, snapshot.config)),
        notes=notes,
    )


def _audit_tensor(
    snapshot: Snapshot,
    tensor: GgufTensor,
    mapping: TensorMap,
    source: SourceTensor,
    held: Bytes,
    pool: ThreadPoolExecutor,
) -> TensorFinding:
    rows, columns = (1, tensor.shape[0]) if len(tensor.shape) == 1 else (tensor.shape[0], tensor.shape[-1])
    width = row_bytes(tensor.type, columns)

    def actual(which: slice | npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        return dequantize(tensor.type, held.reshape(rows, width)[which], columns)

    def measure(which: slice) -> _Sums:
        return _sums(expected_rows(source, mapping, which), actual(which), block_length(tensor.type))

    sums = _Sums()
    for part in pool.map(measure, _pieces(rows, columns)):
        sums.add(part)
    sample = np.unique(np.linspace(0, rows - 1, max(1, min(rows, _SAMPLE // columns))).astype(np.int64))
    wanted, found = expected_rows(source, mapping, sample), actual(sample)
    reachable = _reachable(tensor.type, mapping, wanted)
    here = _energy_db(wanted, found)
    over_all = None if sums.nonfinite else sqnr_db(sums.source, sums.error)
    verdict = _verdict(sums, over_all, here, reachable)
    cause = None
    if verdict in ("worse", "wrong"):
        cause = _broken_blocks(sums, tensor.type) or explain(snapshot, mapping, sample, found, wanted)
    norms = sums.source * sums.actual
    return TensorFinding(
        name=tensor.name,
        source=mapping.source,
        layer=mapping.layer,
        kind=mapping.kind,
        type=tensor.type,
        shape=tensor.shape,
        sqnr_db=over_all,
        reachable_sqnr_db=reachable,
        cosine=None if sums.nonfinite or norms == 0 else sums.dot / math.sqrt(norms),
        max_abs_error=None if sums.nonfinite else sums.max_abs,
        zeroed_blocks=sums.zeroed,
        nonfinite_blocks=sums.nonfinite,
        verdict=verdict,
        cause=cause,
    )


def _pieces(rows: int, columns: int) -> Iterator[slice]:
    step = max(1, _CHUNK // columns)
    return (slice(first, min(first + step, rows)) for first in range(0, rows, step))


def _sums(expected: npt.NDArray[np.float32], actual: npt.NDArray[np.float32], block: int) -> _Sums:
    e, a = expected.reshape(-1), actual.reshape(-1)
    sums = _Sums()
    energy = np.einsum("ij,ij->i", *[a.reshape(-1, block)] * 2) if block > 1 else a * a
    finite = np.isfinite(energy)  # of a finite block it may overflow, which no weight does
    if not finite.all():
        sums.nonfinite = int(np.count_nonzero(~finite))
        return sums
    if block > 1 and not energy.all():
        silent = np.flatnonzero(energy == 0)
        sums.zeroed = int(np.count_nonzero(np.any(e.reshape(-1, block)[silent], axis=1)))
    difference = a - e
    sums.error = float(np.dot(difference, difference))
    sums.source, sums.actual, sums.dot = float(np.dot(e, e)), float(np.dot(a, a)), float(np.dot(e, a))
    sums.max_abs = float(max(difference.max(), -difference.min()))
    return sums


def _energy_db(expected: npt.NDArray[np.float32], actual: npt.NDArray[np.float32]) -> float | None:
    wide = expected.astype(np.float64)
    with np.errstate(invalid="ignore"):
        error = float(np.square(actual - wide).sum())
    return sqnr_db(float(np.square(wide).sum()), error if math.isfinite(error) else float(np.square(wide).sum()))


def _reachable(kind: str, mapping: TensorMap, wanted: npt.NDArray[np.float32]) -> float | None:
    if mapping.function == NEGATIVE_EXP and kind == "F32":
        return _EXP_DB
    if kind in EXACT_FLOATS and mapping.function != NEGATIVE_EXP:
        return None if kind == "F32" else _energy_db(wanted, quantize(kind, wanted))
    return _energy_db(wanted, quantize(kind, wanted))


def _verdict(sums: _Sums, over_all: float | None, here: float | None, reachable: float | None) -> str:
    if sums.nonfinite:
        return "wrong"
    if over_all is None:
        return "exact"
    if reachable is None:  # the type holds every value of the source, so any difference is a fault
        return "wrong" if over_all < _WRONG_DB else "worse"
    lost = reachable - over_all - (_WORSE_OVER_ALL_DB - _WORSE_DB)
    if here is not None:
        lost = max(lost, reachable - here)
    if lost > _WRONG_DB or over_all < _WORSE_DB <= reachable:
        return "wrong"
    return "worse" if sums.zeroed or lost > _WORSE_DB else "as_good"


def _broken_blocks(sums: _Sums, kind: str) -> str | None:
    if sums.nonfinite:
        what = "blocks hold" if sums.nonfinite > 1 else "block holds"
        return f"{sums.nonfinite} {kind} {what} NaN or infinity"
    if sums.actual == 0.0:
        return "every value is 0"
    if sums.zeroed:
        what = "blocks are" if sums.zeroed > 1 else "block is"
        return f"{sums.zeroed} {kind} {what} all zero where the source is not"
    return None
