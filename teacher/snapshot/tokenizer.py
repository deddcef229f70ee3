"""Texts and chats to token ids, by the snapshot's own tokenizer and chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from receipts.errors import SnapshotError
from teacher.json_file import read_bounded, read_object

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class SnapshotTokenizer:
    """The tokenizer of a model folder; files are read when first needed.

    Special tokens in a text are parsed as such. None is added that tokenizer.json does not add by itself, and to a
    chat none at all: its template writes them.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tokenizer: Tokenizer | None = None
        self._template: Any = None
        self._special: dict[str, str] = {}

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a text.

        Raises:
            SnapshotError: the folder's tokenizer.json is missing or cannot be read.
        """
        return tuple(self._load().encode(text, add_special_tokens=True).ids)

    def vocabulary(self) -> dict[int, str]:
        """Return id -> token as the file spells it, added tokens included."""
        return {number: text for text, number in self._load().get_vocab(with_added_tokens=True).items()}

    def added_tokens(self) -> tuple[str, ...]:
        """Return the texts of the added tokens, by id."""
        return tuple(token.content for _, token in sorted(self._load().get_added_tokens_decoder().items()))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included; half a character becomes U+FFFD."""
        return str(self._load().decode(list(token_ids), skip_special_tokens=False))

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[str, tuple[int, ...]]:
        """Return the text the chat template makes of a chat, no answer begun, and its token ids.

        Raises:
            SnapshotError: the folder has no chat template, or its template refuses the chat.
        """
        text = self.render_chat(messages)
        return text, tuple(self._load().encode(text, add_special_tokens=False).ids)

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return the text the chat template makes of a chat."""
        if self._template is None:
            self._template = self._read_template()
        try:
            return str(
                self._template.render(
                    messages=[dict(message) for message in messages], add_generation_prompt=False, **self._special
                )
            )
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise SnapshotError(f"{self._folder.name}: the chat template refused a chat: {error}") from error

    def _load(self) -> Tokenizer:
        if self._tokenizer is None:
            data = read_bounded(self._folder / "tokenizer.json")
            try:
                tokenizer = Tokenizer.from_buffer(data)
            except Exception as error:  # the library raises bare Exception and ValueError
                raise SnapshotError(f"tokenizer.json: expected a tokenizer, got: {error}") from error
            tokenizer.no_truncation()  # a file may carry the settings of its training run
            tokenizer.no_padding()
            self._tokenizer = tokenizer
        return self._tokenizer

    def _read_template(self) -> Any:
        config: dict[str, Any] = {}
        path = self._folder / "tokenizer_config.json"
        if path.is_file():
            config = read_object(path)
        self._special = {name: _token_text(config.get(name)) for name in _SPECIAL_NAMES if config.get(name)}
        source, where = config.get("chat_template"), "tokenizer_config.json"
        if isinstance(source, list):
            named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
            source = named.get("default")
        separate = self._folder / "chat_template.jinja"
        if separate.is_file():
            source, where = _decode(read_bounded(separate), separate.name), separate.name
        if not isinstance(source, str):
            raise SnapshotError(
                f"{self._folder.name}: expected chat_template.jinja or a chat_template in tokenizer_config.json for a"
                " plan with chats, got neither"
            )
        try:
            return _environment().from_string(source)
        except TemplateError as error:
            raise SnapshotError(f"{where}: expected a chat template, got: {error}") from error


def _environment() -> ImmutableSandboxedEnvironment:
    """Return the sandbox chat templates are written for, less the clock: a plan must be the same tomorrow."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON without jinja2's HTML escapes, which models never saw."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    """Raise what a template asks to raise."""
    raise TemplateError(message)


def _token_text(value: Any) -> str:
    """Return the text of a special token, written plainly or as an object with "content"."""
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise SnapshotError(f"tokenizer_config.json: expected a special token's text, got {text!r}")
    return text


def _decode(data: bytes, name: str) -> str:
    """Decode UTF-8."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SnapshotError(f"{name}: expected UTF-8, got byte {data[error.start]} at {error.start}") from error
