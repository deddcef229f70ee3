"""Plain values back into dataclasses, each field checked against its annotation."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from receipts.errors import ReceiptFormatError

T = TypeVar("T")


def from_plain(kind: type[T], form: Any, place: str) -> T:
    """Build a dataclass from plain values, each field checked against its annotation.

    Raises:
        ReceiptFormatError: names the field, what was expected and what was found.
    """
    if not isinstance(form, Mapping):
        raise ReceiptFormatError(f"{place}: expected an object, got {type(form).__name__}")
    hints = typing.get_type_hints(kind)
    names = {field.name for field in fields(typing.cast(Any, kind))}
    if set(form) != names:
        missing, unknown = sorted(names - set(form)), sorted(set(form) - names)
        raise ReceiptFormatError(f"{place}: expected its fields, got missing {missing} and unknown {unknown}")
    return kind(**{name: _value(hints[name], form[name], f"{place}.{name}") for name in names})


def _value(hint: Any, value: Any, place: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in arguments:
            return None
        (hint,) = (argument for argument in arguments if argument is not type(None))
        return _value(hint, value, place)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ReceiptFormatError(f"{place}: expected a list, got {type(value).__name__}")
        if arguments[-1] is Ellipsis:
            return tuple(_value(arguments[0], item, f"{place}[{i}]") for i, item in enumerate(value))
        if len(value) != len(arguments):
            raise ReceiptFormatError(f"{place}: expected {len(arguments)} entries, got {len(value)}")
        return tuple(
            _value(argument, item, f"{place}[{i}]")
            for i, (argument, item) in enumerate(zip(arguments, value, strict=True))
        )
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ReceiptFormatError(f"{place}: expected an object, got {type(value).__name__}")
        return {str(key): _value(arguments[1], item, f"{place}.{key}") for key, item in value.items()}
    if is_dataclass(hint):
        return from_plain(typing.cast(Any, hint), value, place)
    if hint is Any:
        return value
    if hint is float and type(value) is int:
        return float(value)  # RFC 8785 writes 1.0 as 1
    if type(value) is not hint:
        raise ReceiptFormatError(f"{place}: expected {hint.__name__}, got {type(value).__name__}")
    if hint is float and not math.isfinite(value):
        raise ReceiptFormatError(f"{place}: expected a finite number, got {value}")
    return value
