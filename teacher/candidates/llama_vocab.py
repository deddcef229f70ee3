"""A GGUF's model and embedded tokenizer as llama.cpp itself reads them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from receipts.errors import EngineFailedError, GgufError
from teacher.candidates.llama_abi import Library, load_library
from teacher.candidates.llama_log import EngineLog

_CONTROL, _USER_DEFINED, _UNUSED = 1 << 3, 1 << 4, 1 << 1  # llama.cpp's token attributes


def load_model(library: Library, log: EngineLog, path: Path, **settings: object) -> tuple[int, int]:
    """Return model and vocabulary handles of a GGUF.

    Raises:
        GgufError: the engine refuses the file; says what the engine said.
    """
    params = library.call("llama_model_default_params")
    for name, value in settings.items():
        setattr(params, name, int(value) if isinstance(value, bool) else value)
    model = library.call("llama_model_load_from_file", os.fsencode(path), params)
    if not model:
        raise GgufError(
            f"{path}: expected llama.cpp to load it, got: {log.complaint()}", path=str(path), log=log.last()
        )
    return model, library.call("llama_model_get_vocab", model)


def answer_tokenizer(question: Mapping[str, Any], spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the embedded tokenizer's tables and how it cuts the question's texts.

    Args:
        question: `texts`, a list of strings.
        spec: `gguf`, the model file; `library`, as for the candidate.

    Returns:
        `rows`; `texts` (token string of each id) and `kinds` ("normal", "control", "user", "unused") by id;
        `add_bos`, `add_eos`; `pre`;
        `tokens` (ids of each text, special tokens recognised, nothing added) and `framed` (ids of "a" with whatever
        the file asks to be added).
    """
    library = load_library(None if spec.get("library") is None else Path(spec["library"]))
    log = EngineLog(library)
    library.call("llama_backend_init")
    model, vocab = load_model(library, log, Path(spec["gguf"]), vocab_only=1)
    rows = library.call("llama_vocab_n_tokens", vocab)
    return {
        "rows": rows,
        "texts": [_decoded(library.call("llama_vocab_get_text", vocab, row)) for row in range(rows)],
        "kinds": [_kind(library.call("llama_vocab_get_attr", vocab, row)) for row in range(rows)],
        "add_bos": bool(library.call("llama_vocab_get_add_bos", vocab)),
        "add_eos": bool(library.call("llama_vocab_get_add_eos", vocab)),
        "pre": _metadata(library, model, "tokenizer.ggml.pre"),
        "tokens": [tokenize(library, vocab, text) for text in question["texts"]],
        "framed": tokenize(library, vocab, "a", add_special=True),
    }


def tokenize(library: Library, vocab: int, text: str, *, add_special: bool = False) -> list[int]:
    """Return the ids of a text; special tokens written in it are recognised."""
    data = text.encode("utf-8")
    room = len(data) + 8  # a token covers at least one byte, and a few may be added
    ids = (ctypes.c_int32 * room)()
    count = library.call("llama_tokenize", vocab, data, len(data), ids, room, add_special, True)
    if count < 0:
        raise EngineFailedError(f"text {text[:20]!r}: expected at most {room} tokens, got {-count}")
    return list(ids[:count])


def _metadata(library: Library, model: int, key: str) -> str | None:
    buffer = ctypes.create_string_buffer(256)
    length = library.call("llama_model_meta_val_str", model, key.encode(), buffer, len(buffer))
    return None if length < 0 else _decoded(buffer.value)


def _kind(attributes: int) -> str:
    for bit, name in ((_CONTROL, "control"), (_USER_DEFINED, "user"), (_UNUSED, "unused")):
        if attributes & bit:
            return name
    return "normal"


def _decoded(data: bytes) -> str:
    # A table entry may be no text at all; escapes keep two different byte strings different.
    return data.decode("utf-8", errors="backslashreplace")
