"""llama.cpp as a candidate: a GGUF in the engine that will run it, through its C API.

One `llama_decode` per call, with logits asked of every position, so that call boundaries and token ids are the
plan's own. Only a call longer than `n_batch` takes several, each of `n_batch` tokens until the last. No BOS is added.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from receipts.digest import sha256_file
from receipts.errors import EngineFailedError, MissingFileError, PlanError
from teacher.candidates.llama_abi import FLASH_ATTENTION, TYPES, load_library
from teacher.candidates.llama_log import EngineLog
from teacher.candidates.llama_trace import GraphTrace
from teacher.candidates.llama_vocab import answer_tokenizer, load_model
from teacher.process.frames import rows_per_frame
from teacher.process.sources import LogitBlock, Plan
from teacher.process.traces import TraceWriter

_BLOCK = 256  # llama.cpp rounds the context up to a multiple of this


class LlamaCpp:
    """A GGUF in llama.cpp; a LogitSource.

    Attributes:
        gguf: the model file, or the first of its parts.
        threads: threads of prefill and of decode.
        flash_attention: "off", "on" or "auto" (the engine's default, which on a CPU is on).
        type_k, type_v: element types of the KV cache; "f16" is the engine's default.
        max_sequence_tokens, max_call_tokens: longest example and longest call of any plan it will run.
        n_ctx: positions one example may hold; None takes max_sequence_tokens.
        n_batch: tokens of one `llama_decode`, each with its row of logits; None takes max_call_tokens, so that no
            call is split.
        n_ubatch: tokens the engine computes at once; a call is cut into these inside the engine.
        gpu_layers: layers offloaded to a GPU; 0 computes on the CPU.
        repack: let the engine rearrange quantized weights at load time for its faster kernels, as it does by default.
        library: a shared library of one's own in place of the installed package's.
    """

    def __init__(
        self,
        *,
        gguf: str,
        threads: int,
        max_sequence_tokens: int = 4096,
        max_call_tokens: int = 2048,
        flash_attention: str = "auto",
        type_k: str = "f16",
        type_v: str = "f16",
        n_ctx: int | None = None,
        n_batch: int | None = None,
        n_ubatch: int = 512,
        gpu_layers: int = 0,
        repack: bool = True,
        library: str | None = None,
    ) -> None:
        self._path = Path(gguf)
        if not self._path.is_file():
            raise MissingFileError(f"{gguf}: expected a GGUF file, found none", path=gguf)
        self._stamp = _stamp(self._path)
        for name, count in (("n_ctx", n_ctx), ("n_batch", n_batch), ("n_ubatch", n_ubatch), ("threads", threads)):
            if count is not None and count < 1:
                raise EngineFailedError(f"{name}: expected a count of at least 1, got {count}", setting=name)
        self._settings: dict[str, Any] = {
            "flash_attention": _known("flash_attention", flash_attention, FLASH_ATTENTION),
            "type_k": _known("type_k", type_k, TYPES),
            "type_v": _known("type_v", type_v, TYPES),
            "n_ctx": -(-(n_ctx or max_sequence_tokens) // _BLOCK) * _BLOCK,
            "threads": threads,
            "gpu_layers": gpu_layers,
            "repack": repack,
        }
        self._settings["n_batch"] = min(n_batch or max_call_tokens, self._settings["n_ctx"])
        self._settings["n_ubatch"] = min(n_ubatch, self._settings["n_batch"])
        self._library = load_library(None if library is None else Path(library))
        self._log = EngineLog(self._library)
        self._library.call("llama_backend_init")
        self._model, self._vocab = load_model(
            self._library, self._log, self._path, n_gpu_layers=gpu_layers, use_extra_bufts=repack
        )
        self._width: int = self._library.call("llama_vocab_n_tokens", self._vocab)
        self._context = self._start_context()

    @staticmethod
    def answer(question: Mapping[str, Any], spec: Mapping[str, Any], _: Any) -> Any:
        """Answer a question about the embedded tokenizer; see `llama_vocab.answer_tokenizer`."""
        return answer_tokenizer(question, spec)

    def describe(self) -> dict[str, Any]:
        """Return engine, version, build, the library's digest, and every setting in force."""
        library = self._library
        text = ctypes.create_string_buffer(256)
        library.call("llama_model_desc", self._model, text, len(text))
        library_digest, library_bytes = sha256_file(library.path)
        return {
            "engine": "llama.cpp",
            "package": library.package,
            "package_version": library.package_version,
            "ggml_version": _text(library.call("ggml_version")),
            "ggml_commit": _text(library.call("ggml_commit")),
            "system_info": _text(library.call("llama_print_system_info")).strip(" |"),
            "abi_layout": library.layout,
            "library": {"name": library.path.name, "sha256": library_digest.hex, "size_bytes": library_bytes},
            "model": _text(text.value),
            "vocabulary_rows": self._width,
            "settings": dict(self._settings),
            "in_force": {
                "n_ctx": library.call("llama_n_ctx", self._context),
                "n_batch": library.call("llama_n_batch", self._context),
                "n_ubatch": library.call("llama_n_ubatch", self._context),
                "threads": library.call("llama_n_threads", self._context),
                "threads_batch": library.call("llama_n_threads_batch", self._context),
                "log": self._cache_lines(),
            },
        }

    def blocks(self, plan: Plan) -> Iterator[LogitBlock]:
        """Run the plan; each example starts from cleared attention and recurrent memory.

        Raises:
            PlanError: an example or a token id is beyond what the engine was set up for.
            EngineFailedError: a call failed, or the file changed while it was in use.
        """
        for number, example in enumerate(plan.examples):
            self._check(number, example)
        for number, example in enumerate(plan.examples):
            memory = self._library.call("llama_get_memory", self._context)
            self._library.call("llama_memory_clear", memory, True)
            first = 0
            for call, length in enumerate(example.calls):
                ids = example.token_ids[first : first + length]
                for start in range(0, length, self._settings["n_batch"]):
                    piece = ids[start : start + self._settings["n_batch"]]
                    for offset, logits in self._decode(piece, first + start, f"example {number} call {call}"):
                        yield LogitBlock(example=number, call=call, position=first + start + offset, logits=logits)
                first += length
            last = self._library.call("llama_memory_seq_pos_max", memory, 0)
            if last != first - 1:
                raise EngineFailedError(
                    f"example {number}: expected the engine's last position {first - 1}, got {last}", example=number
                )
        if _stamp(self._path) != self._stamp:
            raise EngineFailedError(f"{self._path}: expected the same file after the run, got a changed one")

    def trace(self, plan: Plan, writer: TraceWriter, layer: int | None, kind: str | None) -> None:
        """Run the plan in a context of its own, and keep what the graph computes on the way.

        Raises:
            As `blocks`; EngineFailedError too when a result could not be read.
        """
        graph = GraphTrace(self._library, writer, writer.layers, layer, kind)
        before, self._context = self._context, self._start_context(graph.reader.callback)
        try:
            for _ in self.blocks(plan):
                graph.reader.raise_error()
        finally:
            self._library.call("llama_free", self._context)
            self._context = before

    def _check(self, number: int, example: Any) -> None:
        limits = self._settings
        if len(example.token_ids) > limits["n_ctx"]:
            raise PlanError(
                f"example {number}: expected at most n_ctx {limits['n_ctx']} tokens, got {len(example.token_ids)}",
                example=number,
            )
        for position, token in enumerate(example.token_ids):
            if not 0 <= token < self._width:
                raise PlanError(
                    f"example {number}: expected token ids below {self._width}, got {token} at position {position}",
                    example=number,
                    position=position,
                )

    def _decode(
        self, ids: tuple[int, ...], first: int, place: str
    ) -> Iterator[tuple[int, np.ndarray[Any, np.dtype[np.float32]]]]:
        """Run one call and yield its logits, a block of rows at a time, copied out of the engine's buffer."""
        library, count = self._library, len(ids)
        batch = library.call("llama_batch_init", count, 0, 1)
        try:
            batch.n_tokens = count
            for index, token in enumerate(ids):
                batch.token[index] = token
                batch.pos[index] = first + index
                batch.n_seq_id[index] = 1
                batch.seq_id[index][0] = 0
                batch.logits[index] = 1
            code = library.call("llama_decode", self._context, batch)
        finally:
            library.call("llama_batch_free", batch)
        if code != 0:
            raise EngineFailedError(
                f"{place}: expected llama_decode to return 0, got {code}: {self._log.complaint()}",
                code=code,
                log=self._log.last(),
            )
        start = library.call("llama_get_logits", self._context)
        if not start:
            raise EngineFailedError(f"{place}: expected logits of {count} positions, got none", log=self._log.last())
        logits = np.ctypeslib.as_array(start, shape=(count, self._width))
        step = rows_per_frame(self._width)
        for row in range(0, count, step):
            yield row, logits[row : row + step].copy()

    def _start_context(self, callback: Any = None) -> int:
        """Return a context with exactly the settings asked for, as the engine itself reports them."""
        library, want = self._library, self._settings
        params = library.call("llama_context_default_params")
        params.n_ctx, params.n_batch, params.n_ubatch = want["n_ctx"], want["n_batch"], want["n_ubatch"]
        params.n_threads = params.n_threads_batch = want["threads"]
        params.flash_attn_type = FLASH_ATTENTION[want["flash_attention"]]
        params.type_k, params.type_v = TYPES[want["type_k"]], TYPES[want["type_v"]]
        params.n_outputs_max = params.n_outputs_max_per_seq = want["n_batch"]
        params.offload_kqv = params.op_offload = int(want["gpu_layers"] != 0)
        if callback is not None:
            params.cb_eval = ctypes.cast(callback, ctypes.c_void_p)
        context = library.call("llama_init_from_model", self._model, params)
        if not context:
            raise EngineFailedError(
                f"{self._path.name}: expected llama.cpp to start a context, got: {self._log.complaint()}",
                log=self._log.last(),
            )
        reported = {
            "n_ctx": library.call("llama_n_ctx", context),
            "n_batch": library.call("llama_n_batch", context),
            "n_ubatch": library.call("llama_n_ubatch", context),
            "threads": library.call("llama_n_threads", context),
        }
        wrong = [f"{name} {want[name]}, got {got}" for name, got in reported.items() if got != want[name]]
        wrong += self._wrong_cache_types()
        if wrong:
            raise EngineFailedError(f"{library.path.name}: expected {'; '.join(wrong)}", reported=str(reported))
        return int(context)

    def _cache_lines(self) -> list[str]:
        """Return what the engine logged of its caches and of flash attention."""
        return [line.strip() for line in self._log.saying("flash_attn", "Flash Attention", "K (", "R (")]

    def _wrong_cache_types(self) -> list[str]:
        """Hold the cache types the engine logged against those asked for; it has no other way to say them."""
        lines = self._log.saying("K (")
        if not lines:
            return []
        wanted = (f"K ({self._settings['type_k']})", f"V ({self._settings['type_v']})")
        return [f"a cache of {text}, got {lines[-1].strip()!r}" for text in wanted if text not in lines[-1]]


def _known(name: str, value: str, known: Mapping[str, int]) -> str:
    if value not in known:
        raise EngineFailedError(f"{name}: expected one of {', '.join(known)}, got {value!r}", setting=name)
    return value


def _stamp(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns, found.st_ino


def _text(value: bytes | None) -> str:
    return (value or b"").decode("utf-8", errors="replace")
