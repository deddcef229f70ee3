"""SHA-256 of bytes and of files."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from receipts.errors import ReceiptFormatError

_READ_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Digest:
    """A digest and the algorithm it was made with.

    Attributes:
        algorithm: "sha256".
        hex: 64 lower-case hex digits.
    """

    algorithm: str
    hex: str

    def __post_init__(self) -> None:
        if self.algorithm != "sha256" or not re.fullmatch(r"[0-9a-f]{64}", self.hex):
            raise ReceiptFormatError(
                f"digest: expected sha256 and 64 lower-case hex digits, got {self.algorithm} {self.hex!r}"
            )

    @property
    def raw(self) -> bytes:
        """The 32 bytes themselves."""
        return bytes.fromhex(self.hex)


def sha256_bytes(data: bytes) -> Digest:
    """Return the SHA-256 of some bytes."""
    return Digest(algorithm="sha256", hex=hashlib.sha256(data).hexdigest())


def sha256_file(path: Path, on_bytes: Callable[[int], None] | None = None) -> tuple[Digest, int]:
    """Return the SHA-256 and the size in bytes of a file, read once.

    Args:
        path: the file.
        on_bytes: told the size of each piece as it is read.
    """
    digest, size = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_READ_BYTES):
            digest.update(piece)
            size += len(piece)
            if on_bytes is not None:
                on_bytes(len(piece))
    return Digest(algorithm="sha256", hex=digest.hexdigest()), size
