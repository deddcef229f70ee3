"""The header of one safetensors file, read as hostile: nothing is allocated before its numbers have been checked."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from receipts.errors import SnapshotError
from teacher.json_file import parse_object

_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_MAX_RANK = 8
LFS_MARK = b"version https://git-lfs"
ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """Where one tensor lies.

    Attributes:
        name: as in the file.
        file: name of the file.
        dtype: element type as safetensors spells it.
        shape: axes.
        start, stop: first byte and the one past the last, within the file.
    """

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_entries(path: Path) -> tuple[TensorEntry, ...]:
    """Return the tensors of a file in the order of their bytes.

    Raises:
        SnapshotError: names the file, and the tensor where it is one.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(256)
            _verify_prefix(path.name, head, size)
            length = int.from_bytes(head[:8], "little")
            file.seek(8)
            header = parse_object(file.read(length), f"{path.name} header")
    except OSError as error:
        raise SnapshotError(f"{path.name}: expected a readable file, got '{error.strerror}'") from error
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise SnapshotError(f"{path.name} header: expected __metadata__ to map texts to texts, got {metadata!r:.80}")
    data = 8 + length
    entries = sorted(
        (_entry(path.name, name, form, data) for name, form in header.items()), key=lambda e: (e.start, e.stop)
    )
    end = data
    for entry in entries:
        if entry.start != end:
            what = "overlaps the tensor before it" if entry.start < end else "leaves a hole before it"
            raise SnapshotError(
                f"{path.name}: expected {entry.name} to begin at byte {end}, got {entry.start}, which {what}"
            )
        end = entry.stop
    if end != size:
        what = "truncated" if size < end else "bytes left after the last tensor"
        raise SnapshotError(f"{path.name}: expected {end} bytes by its header, got {size} ({what})")
    return tuple(entries)


def _verify_prefix(name: str, head: bytes, size: int) -> None:
    if head.startswith(LFS_MARK):
        found = re.search(rb"oid sha256:([0-9a-f]{64})", head)
        oid = f" for sha256 {found.group(1).decode()}" if found else ""
        raise SnapshotError(f"{name}: expected a safetensors file, got a Git LFS pointer{oid}; fetch the file itself")
    if size < 8:
        raise SnapshotError(f"{name}: expected a safetensors header, got a file of {size} bytes")
    length = int.from_bytes(head[:8], "little")
    if length > min(size - 8, _MAX_HEADER_BYTES):
        raise SnapshotError(
            f"{name}: expected a header of at most {min(size - 8, _MAX_HEADER_BYTES)} bytes, got a length of {length}"
        )


def _entry(file: str, name: str, form: Any, data: int) -> TensorEntry:
    place = f"{file}: {name}"
    if not isinstance(form, dict) or set(form) != {"dtype", "shape", "data_offsets"}:
        raise SnapshotError(f"{place}: expected dtype, shape and data_offsets, got {form!r:.80}")
    dtype, shape, offsets = form["dtype"], form["shape"], form["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise SnapshotError(f"{place}: expected a known dtype, got {dtype!r:.40}")
    if not _is_counts(shape) or len(shape) > _MAX_RANK:
        raise SnapshotError(f"{place}: expected a shape of at most {_MAX_RANK} axes, got {shape!r:.80}")
    if not _is_counts(offsets) or len(offsets) != 2:
        raise SnapshotError(f"{place}: expected two data_offsets, got {offsets!r:.80}")
    size = ITEM_BYTES[dtype]
    for axis in shape:
        size *= axis
    begin, end = offsets
    if end - begin != size:
        raise SnapshotError(f"{place}: expected {size} bytes for {dtype} {shape}, got data_offsets {begin} to {end}")
    return TensorEntry(name=name, file=file, dtype=dtype, shape=tuple(shape), start=data + begin, stop=data + end)


def _is_counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)
