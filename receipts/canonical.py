"""Values to RFC 8785 bytes and back: the only JSON we hash, the cache's v1 views aside.

Strict on both sides. A value of another type than JSON's own is an error and never `str(value)`, a NumPy scalar that
happens to be a float included; and bytes that are not the canonical form of what they say are refused.
"""

from __future__ import annotations

import json
import math
from typing import Any

import rfc8785

from receipts.errors import CanonicalError

MAX_INTEGER = 2**53  # from it on a reader that holds numbers as doubles sees another value


def canonical_bytes(value: Any) -> bytes:
    """Return the RFC 8785 bytes of a value.

    Raises:
        CanonicalError: names the place of a value of another type, a NaN or infinity, a key that is no string, or an
            integer from 2**53 on, which is to be written as a string.
    """
    return rfc8785.dumps(_checked(value, "$"))


def parse_canonical(data: bytes, subject: str = "value") -> Any:
    """Read canonical bytes back.

    Raises:
        CanonicalError: the bytes are no JSON, hold a key twice, NaN or a large integer, or are not canonical.
    """
    try:
        value = json.loads(
            data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_int=_whole
        )
        again = canonical_bytes(value)
    except CanonicalError as error:
        raise CanonicalError(f"{subject}: {error}") from error
    except (ValueError, RecursionError) as error:  # a number may be too long, and a nesting too deep
        raise CanonicalError(f"{subject}: expected JSON, got {error}") from error
    if again != data:
        raise CanonicalError(f"{subject}: expected RFC 8785 bytes, got the same JSON in another form")
    return value


def _checked(value: Any, place: str) -> Any:
    kind = type(value)  # exact types: numpy.float64 is a float by inheritance
    if value is None or kind is bool:
        return value
    if kind is str:
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise CanonicalError(f"{place}: expected Unicode text, got a lone surrogate") from error
        return value
    if kind is int:
        if abs(value) >= MAX_INTEGER:
            raise CanonicalError(f"{place}: expected an integer below 2**53, got {value}; write it as a string")
        return value
    if kind is float:
        if not math.isfinite(value):
            raise CanonicalError(f"{place}: expected a finite number, got {value}")
        return value
    if kind is list or kind is tuple:
        return [_checked(item, f"{place}[{i}]") for i, item in enumerate(value)]
    if kind is dict:
        for key in value:
            if type(key) is not str:
                raise CanonicalError(f"{place}: expected keys that are strings, got {key!r}")
        return {key: _checked(item, f"{place}.{key}") for key, item in value.items()}
    raise CanonicalError(f"{place}: expected a JSON value, got {kind.__module__}.{kind.__qualname__}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise CanonicalError(f"expected each key once, got {twice!r} twice")
    return value


def _whole(digits: str) -> int | float:
    """Read digits; RFC 8785 writes a float of 2**53 or more like an integer, which no integer of ours can be."""
    value = int(digits)
    return value if abs(value) < MAX_INTEGER else float(digits)


def _refuse_constant(name: str) -> Any:
    raise CanonicalError(f"expected finite numbers, got {name}")
