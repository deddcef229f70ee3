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

from tokenizers import Tokenizer

from receipts.errors import GgufError
from receipts.report import TokenizerParity
from teacher.json_file import read_object
from teacher.process.streams import ask_source
from teacher.snapshot.tokenizer import SnapshotTokenizer

_NEIGHBOURS = 3  # ids shown on either side of the first difference
_TEXTS = "tokenizer_texts.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityResult:
    """Two tokenizers side by side.

    Attributes:
        parity: what enters the report.
        notes: differences of flags and padding, which change no token id.
        vocabulary_rows: tokens the GGUF lists, each with a row of logits.
        real_vocabulary: 1 + the largest id that the snapshot's tokenizer can give; the rows above are padding.
    """

    parity: TokenizerParity
    notes: tuple[str, ...]
    vocabulary_rows: int
    real_vocabulary: int


def check_tokenizer(
    folder: Path, gguf: Path, *, real_vocabulary: int | None = None, engine: str = "llama_cpp"
) -> ParityResult:
    """Compare the tokenizer in a GGUF, as the engine reads it, with the snapshot's.

    Args:
        folder: the snapshot.
        gguf: the file under audit.
        real_vocabulary: ids that count as tokens; None takes 1 + the largest that the snapshot's tokenizer can give.
        engine: whose `answer` is asked.

    Raises:
        GgufError: the file lists fewer tokens than the snapshot's tokenizer has.
        SnapshotError: the snapshot's tokenizer is missing or broken.
        EngineError: the engine is missing or cannot read the file.
    """
    tokenizer = SnapshotTokenizer(folder)
    table = tokenizer.vocabulary()
    real = max(table) + 1 if real_vocabulary is None else real_vocabulary
    texts = corpus(tokenizer.added_tokens())
    answer = ask_source(engine, {"gguf": str(gguf)}, {"texts": list(texts)})
    rows = len(answer["texts"])
    if rows < real:
        raise GgufError(
            f"{gguf.name}: expected a vocabulary of at least the {real} tokens of the snapshot's tokenizer, got {rows}"
        )
    expected = [tokenizer.encode_text(text) for text in texts]
    # llama.cpp has no Unicode normalisation, so every GGUF of a tokenizer with one differs on decomposed text. It is
    # the engine's limit and not this file's fault; whoever feeds it such text must know. So there it is held against
    # the snapshot's tokenizer less the normaliser.
    plain = _without_normaliser(folder)
    difference: str | None = None
    notes: list[str] = []
    for text, got, sentence in _differences(gguf.name, texts, expected, answer["tokens"]):
        if unicodedata.is_normalized("NFC", text) or plain.encode(text).ids != got:
            difference = sentence
            break
        notes = notes or [f"{sentence} (the engine does not compose characters, NFC)"]
    difference = difference or _first_entry(gguf.name, table, answer["texts"])
    rows_wanted = _config(folder).get("vocab_size")
    if isinstance(rows_wanted, int) and rows != rows_wanted:
        notes.append(f"{gguf.name}: expected {rows_wanted} rows of logits as config.json has, got {rows}")
    return ParityResult(
        parity=TokenizerParity(
            status="match" if difference is None else "differs",
            texts=len(texts),
            tokens=sum(len(ids) for ids in expected),
            first_difference=difference,
        ),
        notes=(*notes, *_notes(folder, gguf.name, answer)),
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
    name: str, texts: Sequence[str], expected: Sequence[Sequence[int]], actual: Sequence[list[int]]
) -> Iterator[tuple[str, list[int], str]]:
    """Yield each text that is cut otherwise, the engine's ids, and a sentence that says where."""
    for text, want, got in zip(texts, expected, actual, strict=True):
        if list(want) != list(got):
            shorter = min(len(want), len(got))
            place = next((i for i in range(shorter) if want[i] != got[i]), shorter)
            window = slice(max(place - _NEIGHBOURS, 0), place + _NEIGHBOURS + 1)
            yield (
                text,
                got,
                (
                    f"{name}: text {text!r}: expected ids {list(want[window])} at token {place} of {len(want)}, got"
                    f" {list(got[window])} of {len(got)}"
                ),
            )


def _without_normaliser(folder: Path) -> Tokenizer:
    form = read_object(folder / "tokenizer.json")
    tokenizer = Tokenizer.from_str(json.dumps({**form, "normalizer": None}))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _first_entry(name: str, table: Mapping[int, str], texts: Sequence[str]) -> str | None:
    for number in sorted(table):
        # Past the list's end stands no text; only a caller who counts fewer tokens than the tokenizer comes there.
        if number < len(texts) and texts[number] != table[number]:
            return f"{name}: token {number}: expected {table[number]!r}, got {texts[number]!r}"
    return None


def _config(folder: Path) -> dict[str, Any]:
    """Return the text model's part of config.json."""
    config = read_object(folder / "config.json")
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def _notes(folder: Path, name: str, answer: Mapping[str, Any]) -> Iterator[str]:
    config = read_object(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    for key, entry in (("add_bos", "add_bos_token"), ("add_eos", "add_eos_token")):
        if bool(config.get(entry, False)) != answer[key]:
            yield f"{name}: {key} is {answer[key]}, the snapshot's {entry} is {bool(config.get(entry, False))}"
