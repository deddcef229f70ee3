"""Messages between a worker process and its parent: a JSON header, then raw bytes.

One frame is `<header bytes: uint32><payload bytes: uint64>`, little-endian, then the header as compact JSON with
sorted keys, then the payload. The header's `type` says what it is:

    describe   payload: JSON of the source's description
    block      header: example, call, position, rows, width, more (the block goes on in the next frame); payload:
               float32 rows, little-endian, C order
    progress   header: done, total, unit
    answer     payload: JSON of the answer to a question
    error      header: name of the class; payload: JSON of sentence and facts
    done       payload: JSON of closing facts; nothing follows

Both lengths are checked against a bound before anything is allocated, and each header against the fields its type has.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

import receipts.errors
from receipts.errors import EngineFailedError, HarnessError

_PREFIX = struct.Struct("<IQ")
_HEADER_BOUND = 1 << 20
_FIELDS: Mapping[str, Mapping[str, type]] = {
    "describe": {},
    "block": {"example": int, "call": int, "position": int, "rows": int, "width": int, "more": bool},
    "progress": {"done": int, "total": int, "unit": str},
    "answer": {},
    "error": {"name": str},
    "done": {},
}
_FORMS: Mapping[type, str] = {int: "a count", bool: "true or false", str: "a text"}
PAYLOAD_BOUND = 64 << 20
"""Most bytes of payload in one frame; also what a worker may hold of logits beside its engine."""


def rows_per_frame(width: int) -> int:
    """Return how many float32 rows of `width` values one frame holds, at least one."""
    return max(1, PAYLOAD_BOUND // (4 * width))


def encode_json(value: object) -> bytes:
    """Return compact JSON with sorted keys; a value JSON has no form for is a TypeError, NaN a ValueError."""
    # ASCII: the name of a file may hold bytes that are no UTF-8, which only an escape can carry.
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def decode_json(payload: bytes | bytearray, what: str) -> Any:
    """Return the JSON value of a payload.

    Raises:
        EngineFailedError: it is none; `what` says what it was to be.
    """
    try:
        return json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise EngineFailedError(
            f"worker message: expected JSON of {what}, got {bytes(payload[:40])!r}", what=what
        ) from error


def write_frame(pipe: BinaryIO, header: Mapping[str, Any], payload: bytes | npt.NDArray[np.float32] = b"") -> None:
    """Write one frame whole and flush it."""
    head = encode_json(dict(header))
    body = memoryview(payload) if isinstance(payload, bytes) else np.ascontiguousarray(payload).data.cast("B")
    pipe.write(_PREFIX.pack(len(head), len(body)))
    pipe.write(head)
    pipe.write(body)
    pipe.flush()


def read_frame(pipe: BinaryIO) -> tuple[dict[str, Any], bytearray] | None:
    """Return the next frame's header and payload, or None where the stream ends between or inside frames.

    Raises:
        EngineFailedError: a length is above its bound, or the header is not one of those above, as when something
            other than the worker wrote to the pipe.
    """
    prefix = _read_exactly(pipe, _PREFIX.size)
    if prefix is None:
        return None
    head_bytes, body_bytes = _PREFIX.unpack(prefix)
    if head_bytes > _HEADER_BOUND or body_bytes > PAYLOAD_BOUND:
        raise EngineFailedError(
            f"worker message: expected at most {_HEADER_BOUND} and {PAYLOAD_BOUND} bytes,"
            f" got {head_bytes} and {body_bytes}",
            header_bytes=head_bytes,
            payload_bytes=body_bytes,
        )
    head = _read_exactly(pipe, head_bytes)
    body = _read_exactly(pipe, body_bytes)
    if head is None or body is None:
        return None
    header = decode_json(head, "a header")
    kind = header.get("type") if isinstance(header, dict) else None
    fields = _FIELDS.get(kind) if isinstance(kind, str) else None
    if fields is None:
        raise EngineFailedError(f"worker message: expected one of {', '.join(_FIELDS)}, got {str(header)[:80]}")
    for name, form in fields.items():
        value = header.get(name)
        if type(value) is not form or (isinstance(value, int) and value < 0):
            raise EngineFailedError(
                f"worker message {kind!r}: expected {name} to be {_FORMS[form]}, got {str(value)[:40]!r}", field=name
            )
    return header, body


def _read_exactly(pipe: BinaryIO, size: int) -> bytearray | None:
    buffer = bytearray(size)
    view, filled = memoryview(buffer), 0
    while filled < size:
        count = pipe.readinto(view[filled:])  # type: ignore[attr-defined]
        if not count:
            return None
        filled += count
    return buffer


def encode_error(error: BaseException) -> tuple[dict[str, Any], bytes]:
    """Return the frame of an error: a HarnessError keeps its class and facts, any other becomes EngineFailedError."""
    if isinstance(error, HarnessError):
        name, sentence, facts = type(error).__name__, str(error), dict(error.facts)
    else:
        name, sentence, facts = "EngineFailedError", f"{type(error).__name__}: {error}", {"type": type(error).__name__}
    plain = {key: _plain(value) for key, value in facts.items()}
    return {"type": "error", "name": name}, encode_json({"sentence": sentence, "facts": plain})


def decode_error(header: Mapping[str, Any], payload: bytes | bytearray) -> HarnessError:
    """Return the error a frame carries, as its own class where `receipts.errors` has it."""
    body = decode_json(payload, "an error")
    if not isinstance(body, dict) or not isinstance(body.get("sentence"), str):
        return EngineFailedError(f"worker message: expected an error's sentence, got {str(body)[:80]}")
    found = getattr(receipts.errors, header["name"], None)
    kind = found if isinstance(found, type) and issubclass(found, HarnessError) else EngineFailedError
    error = kind(body["sentence"])
    facts = body.get("facts")
    error.facts = {str(key): value for key, value in facts.items()} if isinstance(facts, dict) else {}
    return error


def _plain(value: object) -> object:
    """Return a fact in a form JSON has; facts are for people's eyes, so what has none is shown as Python shows it."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if np.isfinite(value) else repr(value)
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return repr(value)
