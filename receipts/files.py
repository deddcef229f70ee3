"""Writing a file so that it is there whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from receipts.errors import OutputError


def write_atomic(path: Path, data: bytes) -> None:
    """Write beside the target and rename over it.

    Raises:
        OutputError: the folder cannot be written to.
    """
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial")
    except OSError as error:
        raise OutputError(f"{path}: expected a place that can be written, got '{error.strerror}'") from error
    partial = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.chmod(0o644)
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OutputError(f"{path}: expected to write {len(data)} bytes, got '{error.strerror}'") from error
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
