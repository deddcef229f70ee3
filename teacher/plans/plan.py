"""What is run: token sequences and the calls they are cut into, the same for every source."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from receipts.errors import PlanError, SnapshotError
from teacher.plans.call_shape import CallShape
from teacher.plans.lines import PlanLine, parse_plan_lines
from teacher.snapshot.tokenizer import SnapshotTokenizer

SCHEMA = "source-teacher/plan/v1"
MAX_SEQUENCE_TOKENS = 4096  # of one cache, as the cache plan limits it
BUILTIN = "builtin.jsonl"
_MAX_FILE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One token sequence, run from an empty cache.

    Attributes:
        name: unique within the plan.
        kind: what it is made of, such as "prose" or "code".
        token_ids: the sequence.
        calls: lengths of the calls it is cut into, in order; they sum to its length.
        text: what was tokenized, a chat after its template; None when ids were given.
    """

    name: str
    kind: str
    token_ids: tuple[int, ...]
    calls: tuple[int, ...]
    text: str | None

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise PlanError(f"example {self.name}: expected at least one token, got none")
        if any(call < 1 for call in self.calls):
            raise PlanError(f"example {self.name}: expected calls of at least one token, got {min(self.calls)}")
        if sum(self.calls) != len(self.token_ids):
            raise PlanError(
                f"example {self.name}: expected calls that sum to its {len(self.token_ids)} tokens, got"
                f" {sum(self.calls)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSource:
    """Where a plan came from.

    Attributes:
        name: file name without its folder.
        sha256: digest of the file's bytes, 64 hex digits.
    """

    name: str
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Examples in the order they run.

    Attributes:
        examples: at least one, names unique.
        source: the file they were read from; None for a plan made in Python.
        call_shape: the rule that cut the examples which do not bring calls of their own.
    """

    examples: tuple[Example, ...]
    source: PlanSource | None
    call_shape: CallShape

    def __post_init__(self) -> None:
        if not self.examples:
            raise PlanError("plan: expected at least one example, got none")
        names = [example.name for example in self.examples]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise PlanError(f"plan: expected names of their own, got {twice!r} twice")

    @property
    def positions(self) -> int:
        """Tokens of all examples."""
        return sum(len(example.token_ids) for example in self.examples)

    def reshaped(self, call_shape: CallShape) -> Plan:
        """Return the same tokens cut into other calls, calls of one's own included."""
        return Plan(
            examples=tuple(
                Example(
                    name=example.name,
                    kind=example.kind,
                    token_ids=example.token_ids,
                    calls=call_shape.cut(len(example.token_ids)),
                    text=example.text,
                )
                for example in self.examples
            ),
            source=self.source,
            call_shape=call_shape,
        )

    def only(self, *indices: int) -> Plan:
        """Return a plan of some of the examples, in the order given."""
        return replace(self, examples=tuple(self.examples[index] for index in indices))

    def to_record(self) -> dict[str, Any]:
        """Return the receipt's form: ids and calls in full, texts by digest."""
        return {
            "schema": SCHEMA,
            "source": None if self.source is None else {"name": self.source.name, "sha256": self.source.sha256},
            "call_shape": str(self.call_shape),
            "positions": self.positions,
            "examples": [
                {
                    "name": example.name,
                    "kind": example.kind,
                    "token_ids": list(example.token_ids),
                    "calls": list(example.calls),
                    "text_sha256": None if example.text is None else _sha256(example.text.encode("utf-8")),
                }
                for example in self.examples
            ],
        }


def load_plan(
    path: Path | None,
    folder: Path,
    *,
    vocabulary_rows: int,
    max_sequence_tokens: int = MAX_SEQUENCE_TOKENS,
    call_shape: CallShape | str = "mixed",
) -> Plan:
    """Read a plan and tokenize it with the snapshot's own tokenizer.

    Args:
        path: a JSONL file, each line {"text": ...}, {"chat": [{"role": ..., "content": ...}, ...]} or
            {"token_ids": [...]}, with "name", "kind" and "calls" where wanted; None for the built-in plan.
        folder: the snapshot, for tokenizer.json and the chat template.
        vocabulary_rows: rows of the model's embedding; every id lies below.
        max_sequence_tokens: capacity of the cache; no example may be longer.
        call_shape: cuts the examples that bring no calls.

    Raises:
        PlanError: the file, a line or an example cannot be run; names the file and the line.
        SnapshotError: the tokenizer or the chat template is missing or broken.
    """
    shape = CallShape.parse(call_shape) if isinstance(call_shape, str) else call_shape
    if not 1 <= max_sequence_tokens <= MAX_SEQUENCE_TOKENS:
        raise PlanError(f"cache capacity: expected 1 to {MAX_SEQUENCE_TOKENS} tokens, got {max_sequence_tokens}")
    name, data = _read(path)
    tokenizer = SnapshotTokenizer(folder)
    examples = tuple(
        _build_example(line, tokenizer, shape, vocabulary_rows, max_sequence_tokens)
        for line in parse_plan_lines(data, name)
    )
    if not examples:
        raise PlanError(f"{name}: expected at least one example, got an empty plan")
    return Plan(examples=examples, source=PlanSource(name=name, sha256=_sha256(data)), call_shape=shape)


def _build_example(
    line: PlanLine, tokenizer: SnapshotTokenizer, shape: CallShape, vocabulary_rows: int, capacity: int
) -> Example:
    """Tokenize one line and hold it to the model's limits."""
    text = line.text
    if line.token_ids is not None:
        ids = line.token_ids
    elif line.chat is not None:
        try:
            text, ids = tokenizer.encode_chat([{"role": role, "content": content} for role, content in line.chat])
        except SnapshotError as error:
            raise PlanError(f"{line.place}: {error}") from error
    else:
        ids = tokenizer.encode_text(line.text or "")
    if not ids:
        raise PlanError(f"{line.place}: expected at least one token, got a text of none")
    if len(ids) > capacity:
        raise PlanError(f"{line.place}: expected at most {capacity} tokens (the cache's capacity), got {len(ids)}")
    for index, token in enumerate(ids):
        if not 0 <= token < vocabulary_rows:
            raise PlanError(f"{line.place}: token {index}: expected an id below {vocabulary_rows}, got {token}")
    if line.calls is not None and sum(line.calls) != len(ids):
        raise PlanError(f"{line.place}: expected calls that sum to {len(ids)} tokens, got {sum(line.calls)}")
    return Example(name=line.name, kind=line.kind, token_ids=ids, calls=line.calls or shape.cut(len(ids)), text=text)


def _read(path: Path | None) -> tuple[str, bytes]:
    """Return name and bytes of a plan file or of the built-in plan."""
    if path is None:
        return BUILTIN, resources.files("teacher").joinpath("plans", BUILTIN).read_bytes()
    try:
        size_bytes = path.stat().st_size
        if size_bytes > _MAX_FILE_BYTES:
            raise PlanError(f"{path.name}: expected at most {_MAX_FILE_BYTES} bytes, got {size_bytes}")
        return path.name, path.read_bytes()
    except OSError as error:
        raise PlanError(f"{path.name}: cannot be read: {error.strerror}") from error


def _sha256(data: bytes) -> str:
    """Return the digest's hex digits."""
    return hashlib.sha256(data).hexdigest()
