"""Keys of a GGUF against the snapshot: constants of the math, and everything that decides how the model is used.

Sizes and the layers' schedule are not here: where they differ nothing can be compared, so `gguf_match` refuses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from reprlib import repr as short
from typing import Any

import numpy as np
from gguf import TokenType

from receipts.findings import MetadataFinding
from teacher.gguf.file import GgufFile
from teacher.gguf.match import ARCHITECTURE
from teacher.json_file import read_bounded, read_object
from teacher.snapshot.config import ModelConfig
from teacher.snapshot.tokenizer import SnapshotTokenizer

# Real numbers are stored as F32, which holds them to one part in 2^24.
_F32_DIGITS = 2.0**-23
_SPECIAL = (("bos_token_id", "bos_token"), ("eos_token_id", "eos_token"), ("padding_token_id", "pad_token"))


def audit_metadata(gguf: GgufFile, folder: Path, config: ModelConfig) -> Iterator[MetadataFinding]:
    """Yield each key that does not say what the snapshot says.

    Args:
        gguf: a checked header of the config's model.
        folder: the snapshot.
        config: its sizes and constants.

    Raises:
        SnapshotError: the snapshot's tokenizer is missing or broken.
    """
    yield from _constants(gguf, config)
    yield from _context(gguf, config)
    yield from _tokenizer_tables(gguf, folder)
    yield from _special_tokens(gguf, folder)
    yield from _template(gguf, folder)


def _finding(gguf: GgufFile, key: str, kind: str, expected: object, actual: object) -> MetadataFinding:
    want, got = (value if isinstance(value, str) else _shown(value) for value in (expected, actual))
    sentence = f"metadata audit: {gguf.name}: {key}: expected {want} as the snapshot has, got {got}"
    return MetadataFinding(key=key, kind=kind, sentence=sentence)


def _shown(value: object) -> str:
    if value is None:
        return "none"
    # A GGUF holds F32 numbers; their shortest form is what a person typed.
    return f"{float(str(np.float32(value))):.9g}" if isinstance(value, float) else short(value)


def _constants(gguf: GgufFile, config: ModelConfig) -> Iterator[MetadataFinding]:
    wanted: dict[str, float] = {
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.dimension_count": config.rotary_dim,
        "rope.freq_base": config.rope_theta,
    }
    for name, want in wanted.items():
        key = f"{ARCHITECTURE}.{name}"
        got = gguf.metadata[key]
        if not math.isclose(got, want, rel_tol=_F32_DIGITS):
            yield _finding(gguf, key, "math", want, got)
    key = f"{ARCHITECTURE}.rope.dimension_sections"
    sections = gguf.metadata[key]
    if config.mrope_section is not None and sections != (*config.mrope_section, 0, 0, 0, 0)[:4]:
        yield _finding(gguf, key, "math", str(list(config.mrope_section)), str(list(sections)))
    scaling = gguf.metadata.get(f"{ARCHITECTURE}.rope.scaling.type", "none")
    factor = gguf.metadata.get(f"{ARCHITECTURE}.rope.scaling.factor", 1)
    if scaling not in ("none", "linear") or factor not in (0, 1):
        key = f"{ARCHITECTURE}.rope.scaling.type"
        yield _finding(gguf, key, "math", "none", f"{short(scaling)} by {short(factor)}")


def _context(gguf: GgufFile, config: ModelConfig) -> Iterator[MetadataFinding]:
    key = f"{ARCHITECTURE}.context_length"
    got = gguf.metadata.get(key)
    if got != config.max_position_embeddings:
        yield _finding(gguf, key, "usage", config.max_position_embeddings, got)


def _tokenizer_tables(gguf: GgufFile, folder: Path) -> Iterator[MetadataFinding]:
    """Hold vocabulary, token types and merges against tokenizer.json, entry by entry."""
    form = read_object(folder / "tokenizer.json")
    table = SnapshotTokenizer(folder).vocabulary()
    key = "tokenizer.ggml.tokens"
    tokens = gguf.metadata[key]
    for number, text in sorted(table.items()):
        if number >= len(tokens) or tokens[number] != text:
            got = repr(tokens[number]) if number < len(tokens) else "none"
            yield _finding(gguf, key, "usage", f"{text!r} at token {number}", got)
            break
    key = "tokenizer.ggml.merges"
    merges = [" ".join(one) if isinstance(one, list) else one for one in _model(form).get("merges", ())]
    found = gguf.metadata.get(key, ())
    if merges and (at := _first_difference(merges, found)) is not None:
        want, got = (repr(side[at]) if at < len(side) else "none" for side in (merges, found))
        yield _finding(gguf, key, "usage", f"{want} at merge {at} of {len(merges)}", f"{got} of {len(found)}")
    yield from _token_types(gguf, form)


def _model(form: Mapping[str, Any]) -> Mapping[str, Any]:
    model = form.get("model")
    return model if isinstance(model, dict) else {}


def _first_difference(left: Sequence[object], right: Sequence[object]) -> int | None:
    for at, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return at
    return None if len(left) == len(right) else min(len(left), len(right))


def _token_types(gguf: GgufFile, form: Mapping[str, Any]) -> Iterator[MetadataFinding]:
    key = "tokenizer.ggml.token_type"
    types = gguf.metadata.get(key)
    if not isinstance(types, tuple):
        return
    # The converter takes an added token that looks like a mark, such as <|fim_prefix|>, for a special one as well.
    added = {
        token["id"]: (TokenType.CONTROL,) if token.get("special") else (TokenType.USER_DEFINED, TokenType.CONTROL)
        for token in form.get("added_tokens", ())
    }
    plain = dict.fromkeys(_model(form).get("vocab", {}).values(), (TokenType.NORMAL, TokenType.BYTE))
    for number, allowed in sorted({**plain, **added}.items()):
        if number < len(types) and types[number] not in allowed:
            want = f"{allowed[0].name} for token {number}"
            yield _finding(gguf, key, "usage", want, _type_name(types[number]))
            return


def _type_name(value: Any) -> str:
    try:
        return TokenType(value).name
    except ValueError:
        return short(value)


def _special_tokens(gguf: GgufFile, folder: Path) -> Iterator[MetadataFinding]:
    path = folder / "tokenizer_config.json"
    facts = read_object(path) if path.is_file() else {}
    outer = read_object(folder / "config.json")
    model = outer["text_config"] if isinstance(outer.get("text_config"), dict) else outer
    ids = {text: number for number, text in SnapshotTokenizer(folder).vocabulary().items()}
    for name, entry in _SPECIAL:
        text = facts.get(entry)
        text = text.get("content") if isinstance(text, dict) else text
        want = ids.get(text) if isinstance(text, str) else None
        # Where the tokenizer names none, a converter rightly takes the model's.
        want = model.get(f"{entry}_id") if want is None else want
        got = gguf.metadata.get(f"tokenizer.ggml.{name}")
        if want != got:
            yield _finding(gguf, f"tokenizer.ggml.{name}", "usage", want, got)


def _template(gguf: GgufFile, folder: Path) -> Iterator[MetadataFinding]:
    """Hold the embedded chat template against the snapshot's, byte by byte."""
    separate = folder / "chat_template.jinja"
    path = folder / "tokenizer_config.json"
    source = read_object(path).get("chat_template") if path.is_file() else None
    if isinstance(source, list):  # several by name, of which an engine runs the default
        named = {form.get("name"): form.get("template") for form in source if isinstance(form, dict)}
        source = named.get("default")
    expected = read_bounded(separate).decode(errors="replace") if separate.is_file() else source
    key = "tokenizer.chat_template"
    found = gguf.metadata.get(key)
    if not isinstance(expected, str) or not isinstance(found, str):
        if isinstance(expected, str) or isinstance(found, str):
            words = ("a template", "none") if isinstance(expected, str) else ("none", "a template")
            yield _finding(gguf, key, "usage", *words)
    elif (at := _first_difference(expected, found)) is not None:
        want, got = (repr(side[at : at + 20]) for side in (expected, found))
        yield _finding(gguf, key, "usage", f"{want} at character {at}", got)
