"""A JSONL file of texts, chats or token ids, read as hostile, one checked value a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from receipts.errors import PlanError

_CONTENT_KEYS = ("text", "chat", "token_ids")
_KEYS = {*_CONTENT_KEYS, "name", "kind", "calls"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLine:
    """One line: exactly one of text, chat and token_ids is set.

    Attributes:
        place: file and line number, for errors.
        name: the example's name.
        kind: what it is made of, such as "prose" or "code".
        text: plain text.
        chat: (role, content) of each message.
        token_ids: ids of one's own.
        calls: call lengths of one's own; None leaves it to the plan's call shape.
    """

    place: str
    name: str
    kind: str
    text: str | None
    chat: tuple[tuple[str, str], ...] | None
    token_ids: tuple[int, ...] | None
    calls: tuple[int, ...] | None


def parse_plan_lines(data: bytes, file_name: str) -> Iterator[PlanLine]:
    """Yield the lines of a plan file; blank lines are passed over.

    Raises:
        PlanError: one line breaks the form; names the file and the line.
    """
    names: dict[str, str] = {}
    for number, raw in enumerate(data.split(b"\n"), start=1):
        if not raw.strip():
            continue
        line = _parse(raw, f"{file_name}:{number}", f"line-{number}")
        if line.name in names:
            raise PlanError(f"{line.place}: expected a name of its own, got {line.name!r} of {names[line.name]} again")
        names[line.name] = line.place
        yield line


def _parse(raw: bytes, place: str, default_name: str) -> PlanLine:
    """Check one line."""
    value = _read_object(raw, place)
    unknown = sorted(set(value) - _KEYS)
    if unknown:
        raise PlanError(f"{place}: expected keys among {sorted(_KEYS)}, got {unknown}")
    content = [key for key in _CONTENT_KEYS if key in value]
    if len(content) != 1:
        raise PlanError(f"{place}: expected exactly one of text, chat and token_ids, got {content or 'none'}")
    kind = {"text": "text", "chat": "chat", "token_ids": "tokens"}[content[0]]
    return PlanLine(
        place=place,
        name=_string(value.get("name", default_name), "name", place),
        kind=_string(value.get("kind", kind), "kind", place),
        text=_string(value["text"], "text", place) if "text" in value else None,
        chat=_chat(value["chat"], place) if "chat" in value else None,
        token_ids=_integers(value["token_ids"], "token_ids", 0, place) if "token_ids" in value else None,
        calls=_integers(value["calls"], "calls", 1, place) if "calls" in value else None,
    )


def _read_object(raw: bytes, place: str) -> dict[str, Any]:
    """Parse one JSON object; a key given twice or a constant that JSON lacks is refused."""

    def refuse_constant(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    def pairs_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value: dict[str, Any] = {}
        for key, item in pairs:
            if key in value:
                raise ValueError(f"key {key!r} is given twice")
            value[key] = item
        return value

    try:
        value = json.loads(raw.decode("utf-8"), parse_constant=refuse_constant, object_pairs_hook=pairs_once)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{place}: expected a JSON object, got bad JSON: {error}") from error
    if not isinstance(value, dict):
        raise PlanError(f"{place}: expected a JSON object, got {type(value).__name__}")
    return value


def _string(value: Any, key: str, place: str) -> str:
    """Check text that is not empty and can be written as UTF-8."""
    if not isinstance(value, str) or not value:
        raise PlanError(f"{place}: {key}: expected text, got {'nothing' if value == '' else type(value).__name__}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PlanError(f"{place}: {key}: expected Unicode text, got half a surrogate pair at {error.start}") from error
    return value


def _integers(value: Any, key: str, least: int, place: str) -> tuple[int, ...]:
    """Check a list of whole numbers of at least `least`."""
    if not isinstance(value, list) or not value:
        raise PlanError(f"{place}: {key}: expected a list of whole numbers, got {'[]' if value == [] else value!r:.40}")
    for index, item in enumerate(value):
        if type(item) is not int or item < least:
            raise PlanError(f"{place}: {key}[{index}]: expected a whole number of at least {least}, got {item!r:.40}")
    return tuple(value)


def _chat(value: Any, place: str) -> tuple[tuple[str, str], ...]:
    """Check a list of messages."""
    if not isinstance(value, list) or not value:
        raise PlanError(f"{place}: chat: expected a list of messages, got {'[]' if value == [] else value!r:.40}")
    messages = []
    for index, message in enumerate(value):
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            found = sorted(message) if isinstance(message, dict) else type(message).__name__
            raise PlanError(f"{place}: chat[{index}]: expected the keys role and content, got {found}")
        role, content = message["role"], message["content"]
        messages.append(
            (_string(role, f"chat[{index}].role", place), _string(content, f"chat[{index}].content", place))
        )
    return tuple(messages)
