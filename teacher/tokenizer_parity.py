"""Does the GGUF cut texts into tokens as the snapshot does? Asked of the engine itself, before any logits are compared.

A wrong pre-tokenizer or a lost special token changes every later figure and looks like a bad quantization. So the
engine's own reading of the embedded tokenizer is held against the snapshot's, text by text and id by id.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from receipts.errors import GgufError
from receipts.report import TokenizerParity
from teacher.json_file import read_bounded, read_object
from teacher.streams import ask_source
from teacher.tokenizer import SnapshotTokenizer

_NEIGHBOURS = 3  # ids shown on either side of the first difference
_TEXTS = "tokenizer_texts.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityResult:
    """Two tokenizers side by side.

    Attributes:
        parity: what enters the report.
        notes: differences of flags and template, which change no token id.
        vocabulary_rows: tokens the GGUF lists.
        real_vocabulary: 1 + the largest id that the snapshot's tokenizer can give; the rows above are padding.
    """

    parity: TokenizerParity
    notes: tuple[str, ...]
    vocabulary_rows: int
    real_vocabulary: int


def check_tokenizer(folder: Path, gguf: Path, *, engine: str = "llama_cpp") -> ParityResult:
    """Compare the tokenizer in a GGUF, as the engine reads it, with the snapshot's.

    Args:
        folder: the snapshot.
        gguf: the file under audit.
        engine: whose `answer` is asked.

    Raises:
        GgufError: the file lists fewer tokens than the snapshot's tokenizer has.
        SnapshotError: the snapshot's tokenizer is missing or broken.
        EngineError: the engine is missing or cannot read the file.
    """
    tokenizer = SnapshotTokenizer(folder)
    table = tokenizer.vocabulary()
    real = max(table) + 1
    texts = corpus(tokenizer.added_tokens())
    answer = ask_source(engine, {"gguf": str(gguf)}, {"texts": list(texts)})
    rows = len(answer["texts"])
    if rows < real:
        raise GgufError(
            f"{gguf.name}: expected a vocabulary of at least the {real} tokens of the snapshot's tokenizer, got {rows}"
        )
    expected = [tokenizer.encode_text(text) for text in texts]
    composed: list[str] = []
    decomposed: list[str] = []
    for text, sentence in _differences(gguf.name, texts, expected, answer["tokens"]):
        (composed if unicodedata.is_normalized("NFC", text) else decomposed).append(sentence)
    difference = composed[0] if composed else _first_entry(gguf.name, table, answer["texts"])
    # llama.cpp has no Unicode normalisation, so every GGUF of a tokenizer with one differs here. It is the engine's
    # limit and not this file's fault; whoever feeds it decomposed text must know.
    notes = [f"{sentence} (the engine does not compose characters, NFC)" for sentence in decomposed[:1]]
    return ParityResult(
        parity=TokenizerParity(
            status="match" if difference is None else "differs",
            texts=len(texts),
            tokens=sum(len(ids) for ids in expected),
            first_difference=difference,
        ),
        notes=(*notes, *_notes(folder, gguf.name, table, answer)),
        vocabulary_rows=rows,
        real_vocabulary=real,
    )


def corpus(added_tokens: Sequence[str]) -> tuple[str, ...]:
    """Return the texts that are compared: the built-in pieces, pairs of them, and every added token in a context."""
    data = resources.files("teacher").joinpath("plans", _TEXTS).read_text(encoding="utf-8")
    pieces = [str(json.loads(line)) for line in data.splitlines()]
    pairs = [f"{left} {right}" for left, right in zip(pieces, pieces[7:], strict=False)]
    marked = [f"a{token}b {token}\n{token}{token}" for token in added_tokens]
    return (*pieces, *pairs, *marked)


def _differences(
    name: str, texts: Sequence[str], expected: Sequence[Sequence[int]], actual: Sequence[Sequence[int]]
) -> Iterator[tuple[str, str]]:
    """Yield each text that is cut otherwise, and a sentence that says where."""
    for text, want, got in zip(texts, expected, actual, strict=True):
        if list(want) != list(got):
            shorter = min(len(want), len(got))
            place = next((i for i in range(shorter) if want[i] != got[i]), shorter)
            window = slice(max(place - _NEIGHBOURS, 0), place + _NEIGHBOURS + 1)
            yield text, (
                f"{name}: text {text!r}: expected ids {list(want[window])} at token {place} of {len(want)}, got"
                f" {list(got[window])} of {len(got)}"
            )


def _first_entry(name: str, table: Mapping[int, str], texts: Sequence[str]) -> str | None:
    for number in sorted(table):
        if texts[number] != table[number]:
            return f"{name}: token {number}: expected {table[number]!r}, got {texts[number]!r}"
    return None


def _notes(folder: Path, name: str, table: Mapping[int, str], answer: Mapping[str, Any]) -> Iterator[str]:
    config = read_object(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    ids = {text: number for number, text in table.items()}
    for key, entry in (("bos_token_id", "bos_token"), ("eos_token_id", "eos_token"), ("padding_token_id", "pad_token")):
        text = config.get(entry)
        text = text.get("content") if isinstance(text, dict) else text
        want, got = ids.get(text) if isinstance(text, str) else None, answer["special"].get(key)
        if want != got:
            yield f"{name}: {key} is {got}, the snapshot's {entry} is {want}"
    for key, entry in (("add_bos", "add_bos_token"), ("add_eos", "add_eos_token")):
        if bool(config.get(entry, False)) != answer[key]:
            yield f"{name}: {key} is {answer[key]}, the snapshot's {entry} is {bool(config.get(entry, False))}"
    yield from _template_notes(folder, name, config, answer["chat_template"])


def _template_notes(folder: Path, name: str, config: Mapping[str, Any], actual: str | None) -> Iterator[str]:
    separate = folder / "chat_template.jinja"
    expected = config.get("chat_template")
    if separate.is_file():
        expected = read_bounded(separate).decode("utf-8", errors="replace")
    if not isinstance(expected, str) or expected == actual:
        return
    if actual is None:
        yield f"{name}: has no chat template, the snapshot has one"
        return
    place = next(
        (i for i, (e, a) in enumerate(zip(expected, actual, strict=False)) if e != a), min(len(expected), len(actual))
    )
    yield (
        f"{name}: its chat template differs from the snapshot's at character {place}: expected"
        f" {expected[place : place + 20]!r}, got {actual[place : place + 20]!r}"
    )
