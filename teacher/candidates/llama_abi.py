"""The C interface of llama.cpp, bound by ctypes and refused unless the library proves to have the layout we declare.

llama.cpp passes its settings as structures by value and changes them between releases without a version number, so
a wrong layout would be used silently. The library's own defaults tell: `llama_*_default_params()` must put every
known default where one of our layouts expects it, and `llama_batch_get_one` must fill a batch as declared.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from receipts.errors import EngineFailedError, EngineMissingError

_I32, _U32, _F32 = ctypes.c_int32, ctypes.c_uint32, ctypes.c_float
_PTR, _FLAG = ctypes.c_void_p, ctypes.c_uint8  # a flag is read as a number, so that rubbish is not taken for true

LogCallback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)

TYPES: Mapping[str, int] = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "bf16": 30}
"""Element types of the KV cache by name, as ggml numbers them."""

FLASH_ATTENTION: Mapping[str, int] = {"auto": -1, "off": 0, "on": 1}
"""When flash attention is used, as llama.cpp numbers it."""

_MODEL_FIELDS: tuple[tuple[str, Any, object], ...] = (
    ("devices", _PTR, None),
    ("tensor_buft_overrides", _PTR, None),
    ("n_gpu_layers", _I32, -1),
    ("split_mode", _I32, 1),
    ("load_mode", _I32, -1),
    ("lazy_mode", _I32, 1),
    ("main_gpu", _I32, 0),
    ("tensor_split", _PTR, None),
    ("progress_callback", _PTR, None),
    ("progress_callback_user_data", _PTR, None),
    ("kv_overrides", _PTR, None),
    ("vocab_only", _FLAG, 0),
    ("check_tensors", _FLAG, 0),
    ("use_extra_bufts", _FLAG, 1),
    ("no_host", _FLAG, 0),
    ("no_alloc", _FLAG, 0),
    ("load_mtp", _FLAG, 0),
)
_CONTEXT_HEAD: tuple[tuple[str, Any, object], ...] = (
    ("n_ctx", _U32, 512),
    ("n_batch", _U32, 2048),
    ("n_ubatch", _U32, 512),
    ("n_seq_max", _U32, 1),
    ("n_rs_seq", _U32, 0),
    ("n_outputs_max", _U32, 0),
    ("n_outputs_max_per_seq", _U32, 1),
    ("n_threads", _I32, 4),
    ("n_threads_batch", _I32, 4),
    ("ctx_type", _I32, 0),
    ("rope_scaling_type", _I32, -1),
    ("pooling_type", _I32, -1),
    ("attention_type", _I32, -1),
    ("flash_attn_type", _I32, -1),
    ("rope_freq_base", _F32, 0.0),
    ("rope_freq_scale", _F32, 0.0),
    ("yarn_ext_factor", _F32, -1.0),
    ("yarn_attn_factor", _F32, -1.0),
    ("yarn_beta_fast", _F32, -1.0),
    ("yarn_beta_slow", _F32, -1.0),
    ("yarn_orig_ctx", _U32, 0),
    ("defrag_thold", _F32, -1.0),
    ("cb_eval", _PTR, None),
    ("cb_eval_user_data", _PTR, None),
    ("type_k", _I32, 1),
    ("type_v", _I32, 1),
    ("abort_callback", _PTR, None),
    ("abort_callback_data", _PTR, None),
)
_CONTEXT_TAIL: tuple[tuple[str, Any, object], ...] = (
    ("embeddings", _FLAG, 0),
    ("offload_kqv", _FLAG, 1),
    ("no_perf", _FLAG, 1),
    ("op_offload", _FLAG, 1),
    ("swa_full", _FLAG, 1),
    ("kv_unified", _FLAG, 0),
    ("samplers", _PTR, None),
    ("n_samplers", ctypes.c_size_t, 0),
    ("ctx_other", _PTR, None),
)
# Releases from October 2026 hold one more pointer behind the callbacks, which we leave empty.
_LAYOUTS: Mapping[str, tuple[tuple[str, Any, object], ...]] = {
    "2026-10": (*_CONTEXT_HEAD, ("reserved", _PTR, None), *_CONTEXT_TAIL),
    "2026-09": (*_CONTEXT_HEAD, *_CONTEXT_TAIL),
}


def _structure(name: str, fields: tuple[tuple[str, Any, object], ...]) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": [(field, kind) for field, kind, _ in fields]})


class Batch(ctypes.Structure):
    """One call's tokens: `llama_batch`."""

    _fields_ = (
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.POINTER(ctypes.c_float)),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    )


_TEXT, _INT, _BOOL = ctypes.c_char_p, ctypes.c_int32, ctypes.c_bool
_FUNCTIONS: Mapping[str, tuple[Any, tuple[Any, ...]]] = {
    "llama_backend_init": (None, ()),
    "llama_log_set": (None, (LogCallback, _PTR)),
    "llama_print_system_info": (_TEXT, ()),
    "ggml_version": (_TEXT, ()),
    "ggml_commit": (_TEXT, ()),
    "llama_model_get_vocab": (_PTR, (_PTR,)),
    "llama_model_free": (None, (_PTR,)),
    "llama_model_desc": (_INT, (_PTR, _TEXT, ctypes.c_size_t)),
    "llama_model_n_layer": (_INT, (_PTR,)),
    "llama_model_meta_val_str": (_INT, (_PTR, _TEXT, _TEXT, ctypes.c_size_t)),
    "llama_free": (None, (_PTR,)),
    "llama_n_ctx": (_U32, (_PTR,)),
    "llama_n_batch": (_U32, (_PTR,)),
    "llama_n_ubatch": (_U32, (_PTR,)),
    "llama_n_threads": (_INT, (_PTR,)),
    "llama_n_threads_batch": (_INT, (_PTR,)),
    "llama_get_memory": (_PTR, (_PTR,)),
    "llama_memory_clear": (None, (_PTR, _BOOL)),
    "llama_memory_seq_pos_max": (_INT, (_PTR, _INT)),
    "llama_batch_get_one": (Batch, (ctypes.POINTER(ctypes.c_int32), _INT)),
    "llama_batch_init": (Batch, (_INT, _INT, _INT)),
    "llama_batch_free": (None, (Batch,)),
    "llama_decode": (_INT, (_PTR, Batch)),
    "llama_get_logits": (ctypes.POINTER(ctypes.c_float), (_PTR,)),
    "llama_vocab_n_tokens": (_INT, (_PTR,)),
    "llama_vocab_type": (ctypes.c_int, (_PTR,)),
    "llama_vocab_get_text": (_TEXT, (_PTR, _INT)),
    "llama_vocab_get_attr": (ctypes.c_int, (_PTR, _INT)),
    "llama_vocab_get_add_bos": (_BOOL, (_PTR,)),
    "llama_vocab_get_add_eos": (_BOOL, (_PTR,)),
    "llama_vocab_bos": (_INT, (_PTR,)),
    "llama_vocab_eos": (_INT, (_PTR,)),
    "llama_vocab_pad": (_INT, (_PTR,)),
    "ggml_get_name": (_TEXT, (_PTR,)),
    "ggml_backend_tensor_get": (None, (_PTR, _PTR, ctypes.c_size_t, ctypes.c_size_t)),
    "llama_tokenize": (_INT, (_PTR, _TEXT, _INT, ctypes.POINTER(ctypes.c_int32), _INT, _BOOL, _BOOL)),
}

# Package -> where its library lies inside the package.
_PACKAGES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "xllamacpp": ("xllamacpp", ("xllamacpp*.so", "xllamacpp*.pyd", "xllamacpp*.dylib")),
    "llama-cpp-python": ("llama_cpp", ("lib/libllama.so", "lib/libllama.dylib", "lib/llama.dll")),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """A llama.cpp library that has proved its layout.

    Attributes:
        package: the Python package it came in, empty for a library given by path.
        package_version: that package's version.
        path: the shared library.
        layout: name of the layout its defaults agree with.
        model_params, context_params: the structures of that layout.
        functions: the C functions by name.
    """

    package: str
    package_version: str
    path: Path
    layout: str
    model_params: type[ctypes.Structure]
    context_params: type[ctypes.Structure]
    functions: Mapping[str, Callable[..., Any]]

    def call(self, name: str, *arguments: Any) -> Any:
        """Call one C function."""
        return self.functions[name](*arguments)


def find_library() -> tuple[str, str, Path]:
    """Return package, version and library of the first installed engine, without running the package's Python.

    Raises:
        EngineMissingError: none of the packages is installed.
    """
    for package, (module, patterns) in _PACKAGES.items():
        found = importlib.util.find_spec(module)
        for folder in (found.submodule_search_locations or ()) if found else ():
            for pattern in patterns:
                for path in sorted(Path(folder).glob(pattern)):
                    return package, importlib.metadata.version(package), path
    names = " or ".join(_PACKAGES)
    raise EngineMissingError(f"llama.cpp: expected package {names}, found neither", packages=list(_PACKAGES))


def load_library(path: Path | None = None) -> Library:
    """Load llama.cpp and hold it to a known layout.

    Args:
        path: a shared library; None takes the installed package's.

    Raises:
        EngineMissingError: no package is installed, or the library cannot be loaded.
        EngineFailedError: a function is absent, or the defaults agree with no layout we know.
    """
    package, version, path = ("", "", path) if path is not None else find_library()
    try:
        handle = ctypes.CDLL(str(path))
    except OSError as error:
        raise EngineMissingError(f"{path}: expected a library that loads, got {error}", path=str(path)) from error
    layout, model, context = _agreeing_layout(handle, path)
    functions = {name: _bind(handle, path, name, *shape) for name, shape in _FUNCTIONS.items()}
    for name, result, arguments in (
        ("llama_model_default_params", model, ()),
        ("llama_context_default_params", context, ()),
        ("llama_model_load_from_file", _PTR, (_TEXT, model)),
        ("llama_init_from_model", _PTR, (_PTR, context)),
    ):
        functions[name] = _bind(handle, path, name, result, arguments)
    _check_batch(functions, path)
    return Library(
        package=package,
        package_version=version,
        path=path,
        layout=layout,
        model_params=model,
        context_params=context,
        functions=functions,
    )


def _bind(handle: ctypes.CDLL, path: Path, name: str, result: Any, arguments: tuple[Any, ...]) -> Callable[..., Any]:
    try:
        function = handle[name]  # a fresh object: an attribute would be shared between layouts under trial
    except AttributeError as error:
        raise EngineFailedError(f"{path.name}: expected function {name}, found none", function=name) from error
    function.restype, function.argtypes = result, arguments
    return function


def first_disagreement(values: ctypes.Structure, fields: tuple[tuple[str, Any, object], ...]) -> str | None:
    """Return what the first field with another value than its default says, None when all agree."""
    for name, _, wanted in fields:
        got = getattr(values, name)
        if got != wanted:
            return f"{name}: expected default {wanted}, got {got}"
    return None


def _agreeing_layout(handle: ctypes.CDLL, path: Path) -> tuple[str, type[ctypes.Structure], type[ctypes.Structure]]:
    """Return the layout in which every default of both structures stands where it should."""
    model = _structure("ModelParams", _MODEL_FIELDS)
    values = _bind(handle, path, "llama_model_default_params", model, ())()
    wrong = first_disagreement(values, _MODEL_FIELDS)
    complaints = [] if wrong is None else [f"model settings, {wrong}"]
    for name, fields in _LAYOUTS.items() if wrong is None else ():
        context = _structure("ContextParams", fields)
        values = _bind(handle, path, "llama_context_default_params", context, ())()
        wrong = first_disagreement(values, fields)
        if wrong is None:
            return name, model, context
        complaints.append(f"layout {name}, {wrong}")
    raise EngineFailedError(
        f"{path.name}: expected a llama.cpp whose defaults fit a known layout, got {'; '.join(complaints)}",
        path=str(path),
        complaints=complaints,
    )


def _check_batch(functions: Mapping[str, Callable[..., Any]], path: Path) -> None:
    """Refuse a library that fills a batch in another layout than `Batch`."""
    ids = (ctypes.c_int32 * 3)(1, 2, 3)
    batch = functions["llama_batch_get_one"](ids, 3)
    address = ctypes.cast(batch.token, _PTR).value
    rest = [bool(getattr(batch, name)) for name in ("embd", "pos", "n_seq_id", "seq_id", "logits")]
    if batch.n_tokens != 3 or address != ctypes.addressof(ids) or any(rest):
        raise EngineFailedError(f"{path.name}: expected llama_batch as declared, got another layout", path=str(path))
