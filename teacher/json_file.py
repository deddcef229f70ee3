"""JSON objects from files that somebody else wrote: bounded, UTF-8, no key twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from receipts.errors import SnapshotError

_MAX_BYTES = 128 << 20


def read_bounded(path: Path, max_bytes: int = _MAX_BYTES) -> bytes:
    """Return the bytes of a file that must be there and of a sane size.

    Raises:
        SnapshotError: it is missing, unreadable or larger.
    """
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except FileNotFoundError as error:
        raise SnapshotError(f"{path.name}: expected the file in {path.parent}, got none") from error
    except OSError as error:
        raise SnapshotError(f"{path.name}: expected a readable file, got '{error.strerror}'") from error
    if len(data) > max_bytes:
        raise SnapshotError(f"{path.name}: expected at most {max_bytes} bytes, got more")
    return data


def parse_object(data: bytes, name: str) -> dict[str, Any]:
    """Return the JSON object in some bytes.

    Raises:
        SnapshotError: they are no UTF-8 JSON object, or a key stands twice; names the key.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise SnapshotError(f"{name}: expected each key once, got {key!r} twice")
            found[key] = value
        return found

    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise SnapshotError(f"{name}: expected JSON, got '{error}'") from error
    if not isinstance(value, dict):
        raise SnapshotError(f"{name}: expected a JSON object, got {type(value).__name__}")
    return value


def read_object(path: Path, max_bytes: int = _MAX_BYTES) -> dict[str, Any]:
    """Return the JSON object in a file."""
    return parse_object(read_bounded(path, max_bytes), path.name)
