"""A GGUF's header, read as hostile: no number in it is believed before it was held against the file's size.

The gguf package's reader trusts its input; here counts, lengths and offsets have bounds, so a header costs some
hundred megabytes at the very worst, and a list no more than a few times its bytes.
"""

from __future__ import annotations

import re
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from receipts.errors import GgufError
from teacher.snapshot.safetensors_file import LFS_MARK

_VERSIONS = (2, 3)
_MAX_HEADER_BYTES = 64 << 20  # a vocabulary of a million tokens with its merges stays below
_MAX_ENTRIES = 1 << 22  # of all lists together: a million tokens, their kinds, scores and merges
_MAX_COUNT = 1 << 16  # of tensors, and of keys
_MAX_KEY_BYTES = 256
_MAX_NAME_BYTES = 63  # ggml keeps a tensor's name in 64 bytes, with a zero at its end
_MAX_DEPTH = 4
_MAX_RANK = 4
_MAX_ALIGNMENT = 1 << 16
_SCALARS: Mapping[int, str] = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_BOOL, _STRING, _ARRAY, _U32 = 7, 8, 9, 4
_SPLIT_NAME = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.ASCII)
_UNFINISHED = (".incomplete", ".part", ".aria2")  # what downloaders append while they write


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """Where one tensor lies.

    Attributes:
        name: as in the file.
        type: element type as ggml names it, such as "Q8_0".
        shape: axes, slowest first, as NumPy has them.
        start: first byte within the file.
        size_bytes: bytes of it.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    start: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFile:
    """A checked header.

    Attributes:
        name: name of the file.
        size_bytes: size of the file.
        version: of the format.
        alignment: of the tensors, in bytes.
        data_start: byte at which the tensors' part begins.
        metadata: key -> value; lists are tuples; in a text, what is not UTF-8 became U+FFFD.
        tensors: in the order of the file.
    """

    name: str
    size_bytes: int
    version: int
    alignment: int
    data_start: int
    metadata: Mapping[str, Any]
    tensors: tuple[GgufTensor, ...]


def read_gguf(path: Path) -> GgufFile:
    """Read and check the header of a GGUF.

    Raises:
        GgufError: the file is missing, truncated, of another kind, or contradicts itself; one sentence says where.
    """
    try:
        found = path.stat()
        _verify_kind(path, found.st_mode)
        with path.open("rb") as file:
            return _Reader(file, path.name, found.st_size).read()
    except FileNotFoundError as error:
        beside = [path.name + end for end in _UNFINISHED if path.with_name(path.name + end).exists()]
        hint = f" (unfinished download: {beside[0]})" if beside else ""
        what = "a link to nothing" if path.is_symlink() else "no such file"
        raise GgufError(f"{path}: expected a GGUF file, got {what}{hint}") from error
    except OSError as error:
        raise GgufError(f"{path}: expected a readable file, got '{error.strerror}'") from error


def _verify_kind(path: Path, mode: int) -> None:
    """Refuse what is no regular file, and one that a downloader has not finished: it may have its full size already."""
    if not stat.S_ISREG(mode):
        raise GgufError(f"{path.name}: expected a GGUF file, got {'a folder' if stat.S_ISDIR(mode) else 'a device'}")
    for end in _UNFINISHED:
        if path.name.endswith(end):
            raise GgufError(f"{path.name}: expected a GGUF file, got an unfinished download by its name")
        if path.with_name(path.name + end).exists():
            raise GgufError(f"{path.name}: expected a finished download, got {path.name + end} beside it")


class _Reader:
    """Reads one header from front to back."""

    def __init__(self, file: BinaryIO, name: str, size: int) -> None:
        self._file, self._name, self._size = file, name, size
        self._at, self._entries = 0, 0

    def read(self) -> GgufFile:
        version = self._read_start()
        tensor_count, key_count = self._unpack("QQ", "its counts")
        # A tensor's entry takes at least 33 bytes and a key's at least 13.
        fitting = tensor_count * 33 + key_count * 13 <= self._size - self._at
        if not fitting or max(tensor_count, key_count) > _MAX_COUNT:
            limit = f"at most {_MAX_COUNT}" if fitting else f"no more than its {self._size} bytes hold"
            raise self._error(f"expected {limit}, got {tensor_count} tensors and {key_count} keys")
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self._identifier("a key", _MAX_KEY_BYTES)
            if key in metadata:
                raise self._error(f"expected each key once, got {key!r} twice")
            (kind,) = self._unpack("I", f"the type of {key!r}")
            if key == "general.alignment" and kind != _U32:
                raise self._error(f"expected general.alignment as an unsigned 32-bit number, got type {kind}")
            metadata[key] = self._value(kind, key, 0)
        self._verify_whole(metadata)
        alignment = self._alignment(metadata)
        raw = [self._tensor_entry() for _ in range(tensor_count)]
        data_start = -(-self._at // alignment) * alignment
        return GgufFile(
            name=self._name,
            size_bytes=self._size,
            version=version,
            alignment=alignment,
            data_start=data_start,
            metadata=metadata,
            tensors=self._place(raw, alignment, data_start),
        )

    def _read_start(self) -> int:
        start = self._file.read(256)
        if start.startswith(LFS_MARK):
            oid = re.search(rb"oid sha256:([0-9a-f]{64})", start)
            which = f" for sha256 {oid.group(1).decode()}" if oid else ""
            raise self._error(f"expected a GGUF file, got a Git LFS pointer{which}; fetch the file itself")
        if start[:4] != b"GGUF":
            kind = "an empty file" if not start else f"a file that begins with {start[:4]!r}"
            if start[8:9] == b"{":
                kind = "a safetensors file"
            raise self._error(f"expected a GGUF file, got {kind}")
        self._file.seek(4)
        self._at = 4
        (version,) = self._unpack("I", "its version")
        if version not in _VERSIONS and struct.unpack("<I", struct.pack(">I", version))[0] in _VERSIONS:
            raise self._error("expected a little-endian GGUF, got a big-endian one")
        if version not in _VERSIONS:
            raise self._error(f"expected GGUF version 2 or 3, got {version}")
        return int(version)

    def _verify_whole(self, metadata: Mapping[str, Any]) -> None:
        parts, part = metadata.get("split.count", 1), metadata.get("split.no", 0)
        named = _SPLIT_NAME.search(self._name)
        if named:
            which = f"part {int(named.group(1))} of {int(named.group(2))}, by its name"
        elif isinstance(parts, int) and parts > 1:
            which = f"part {part + 1 if isinstance(part, int) else '?'} of {parts}, by its split.count"
        else:
            return
        raise self._error(f"expected one whole GGUF, got {which}; merge the parts first")

    def _alignment(self, metadata: Mapping[str, Any]) -> int:
        value = int(metadata.get("general.alignment", 32))
        if not 8 <= value <= _MAX_ALIGNMENT or value & (value - 1):
            raise self._error(f"expected an alignment that is a power of two from 8 to {_MAX_ALIGNMENT}, got {value}")
        return value

    def _tensor_entry(self) -> tuple[str, str, tuple[int, ...], int, int]:
        """Return name, type, shape, offset and size of the next tensor."""
        name = self._identifier("a tensor's name", _MAX_NAME_BYTES)
        (rank,) = self._unpack("I", f"the rank of {name!r}")
        if not 1 <= rank <= _MAX_RANK:
            raise self._error(f"{name}: expected 1 to {_MAX_RANK} axes, got {rank}")
        axes = self._unpack(f"{rank}Q", f"the shape of {name!r}")
        kind, offset = self._unpack("IQ", f"the type of {name!r}")
        try:
            known = GGMLQuantizationType(kind)
            block, block_bytes = GGML_QUANT_SIZES[known]
        except (ValueError, KeyError) as error:
            raise self._error(f"{name}: expected a known element type, got number {kind}") from error
        count = 1
        for axis in axes:
            count *= axis
        if not 0 < count < 2**63:
            raise self._error(f"{name}: expected a shape of 1 to 2^63 elements, got {list(axes)}")
        if axes[0] % block:
            raise self._error(f"{name}: expected rows of whole {known.name} blocks of {block}, got {axes[0]} elements")
        return name, known.name, tuple(reversed(axes)), offset, count // block * block_bytes

    def _place(
        self, raw: list[tuple[str, str, tuple[int, ...], int, int]], alignment: int, data: int
    ) -> tuple[GgufTensor, ...]:
        """Hold offsets against alignment, each other and the file's size."""
        seen: set[str] = set()
        for name, _, _, offset, size in raw:
            if name in seen:
                raise self._error(f"expected each tensor once, got {name} twice")
            seen.add(name)
            if offset % alignment:
                raise self._error(f"{name}: expected an offset that is a multiple of {alignment}, got {offset}")
            if data + offset + size > self._size:
                raise self._error(
                    f"{name}: expected its bytes to end at {data + offset + size}, got a file of {self._size} bytes"
                    " (truncated)"
                )
        end = 0
        for name, _, _, offset, size in sorted(raw, key=lambda one: one[3]):
            if offset < end:
                raise self._error(f"{name}: expected an offset of at least {end}, got {offset}, inside another tensor")
            if offset - end >= alignment:
                raise self._error(f"{name}: expected an offset of {-(-end // alignment) * alignment}, got {offset}")
            end = offset + size
        # Bytes after the padding are refused: no header speaks for them, and a joined or resumed download has them.
        padded = data + -(-end // alignment) * alignment
        if self._size > padded:
            raise self._error(
                f"expected {padded} bytes by its header, got {self._size} ({self._size - padded} trailing bytes)"
            )
        return tuple(
            GgufTensor(name=name, type=kind, shape=shape, start=data + offset, size_bytes=size)
            for name, kind, shape, offset, size in raw
        )

    def _value(self, kind: int, key: str, depth: int) -> Any:
        if kind == _STRING:
            return self._string(f"the value of {key!r}")
        if kind == _ARRAY:
            return self._array(key, depth)
        if kind not in _SCALARS:
            raise self._error(f"{key}: expected a known value type, got number {kind}")
        (value,) = self._unpack(_SCALARS[kind], f"the value of {key!r}")
        return value

    def _array(self, key: str, depth: int) -> tuple[Any, ...]:
        if depth >= _MAX_DEPTH:
            raise self._error(f"{key}: expected arrays at most {_MAX_DEPTH} deep, got deeper ones")
        kind, count = self._unpack("IQ", f"the array {key!r}")
        code = _SCALARS.get(kind)
        least = struct.calcsize(f"<{code}") if code else 8
        if count * least > self._size - self._at:
            raise self._error(
                f"{key}: expected {count} entries of {least} bytes, got a file of {self._size} bytes (truncated)"
            )
        self._entries += count
        if self._entries > _MAX_ENTRIES:
            raise self._error(f"{key}: expected arrays of at most {_MAX_ENTRIES} entries in all, got {self._entries}")
        if code:
            return self._unpack(f"{count}{code}", f"the array {key!r}")
        if kind == _STRING:
            what = f"an entry of {key!r}"
            return tuple(self._string(what) for _ in range(count))
        return tuple(self._value(kind, key, depth + 1) for _ in range(count))

    def _string(self, what: str) -> str:
        length = int.from_bytes(self._bytes(8, what), "little")
        return self._bytes(length, what).decode("utf-8", errors="replace")

    def _identifier(self, what: str, limit: int) -> str:
        """Read a key or a name: it is shown to people and compared, so it must be a short printable text."""
        (length,) = self._unpack("Q", what)
        if not 1 <= length <= limit:
            raise self._error(f"expected {what} of 1 to {limit} bytes, got {length} at byte {self._at}")
        data = self._bytes(length, what)
        name = data.decode("utf-8", errors="replace")
        if "\ufffd" in name or not name.isprintable():
            raise self._error(f"expected {what} in printable UTF-8, got {data!r}")
        return name

    def _unpack(self, code: str, what: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{code}", self._bytes(struct.calcsize(f"<{code}"), what))

    def _bytes(self, count: int, what: str) -> bytes:
        if count > self._size - self._at:
            raise self._error(
                f"expected {what} of {count} bytes at byte {self._at}, got a file of {self._size} bytes (truncated)"
            )
        if self._at + count > _MAX_HEADER_BYTES:
            raise self._error(f"expected a header of at most {_MAX_HEADER_BYTES} bytes, got more")
        data = self._file.read(count)
        if len(data) != count:
            raise self._error(f"expected {what} of {count} bytes at byte {self._at}, got {len(data)}")
        self._at += count
        return data

    def _error(self, sentence: str) -> GgufError:
        return GgufError(f"{self._name}: {sentence}")
