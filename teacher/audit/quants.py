"""ggml's own quantizers and dequantizers: what the engine makes of a block, and what a type can reach.

The engine's library is used because it is what runs; tests hold every dequantizer against the gguf package, an
independent implementation in NumPy.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from receipts.errors import EngineFailedError, EngineMissingError
from teacher.candidates.llama_abi import find_library

F32 = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
EXACT_FLOATS = ("F32", "BF16")  # hold every value of a BF16 checkpoint


class _Traits(ctypes.Structure):
    _fields_ = (
        ("type_name", ctypes.c_char_p),
        ("block", ctypes.c_int64),
        ("interleave", ctypes.c_int64),
        ("block_bytes", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.c_void_p),
        ("from_float_ref", ctypes.c_void_p),
    )


_ToFloat = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


@functools.cache
def _library() -> Any:
    _, _, path = find_library()
    try:
        handle = ctypes.CDLL(str(path))
        handle.ggml_get_type_traits.restype = ctypes.POINTER(_Traits)
        handle.ggml_get_type_traits.argtypes = [ctypes.c_int]
        handle.ggml_quantize_chunk.restype = ctypes.c_size_t
        handle.ggml_quantize_chunk.argtypes = [
            ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64,
            ctypes.c_void_p,
        ]  # fmt: skip
    except (OSError, AttributeError) as error:
        raise EngineMissingError(f"{path}: expected ggml's quantizers, got {error}") from error
    return handle


@functools.cache
def _to_float(kind: str) -> Any:
    number = GGMLQuantizationType[kind]
    traits = _library().ggml_get_type_traits(int(number)).contents
    if (traits.block, traits.block_bytes) != GGML_QUANT_SIZES[number] or not traits.to_float:
        raise EngineFailedError(f"{kind}: expected blocks of {GGML_QUANT_SIZES[number]}, got another layout or none")
    return _ToFloat(traits.to_float)


def row_bytes(kind: str, columns: int) -> int:
    """Return the bytes of one row."""
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return columns // block * size


def block_length(kind: str) -> int:
    """Return the values of one block; 1 for a plain float type."""
    return int(GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0])


def dequantize(kind: str, data: Bytes, columns: int) -> F32:
    """Return rows of values, [n, columns] float32; `data` holds n rows of bytes."""
    if kind == "F32":
        return np.ascontiguousarray(data).view("<f4").reshape(-1, columns)
    source = np.ascontiguousarray(data)
    out = np.empty((source.size // row_bytes(kind, columns), columns), dtype=np.float32)
    _to_float(kind)(source.ctypes.data, out.ctypes.data, out.size)
    return out


def quantize_bytes(kind: str, values: F32) -> Bytes:
    """Return the bytes of rows, [n, bytes of a row], by the type's own quantizer, every value weighing the same."""
    source = np.ascontiguousarray(values)
    rows, columns = source.shape
    data = np.empty((rows, row_bytes(kind, columns)), dtype=np.uint8)
    # Types of two bits and fewer refuse to be made without an importance matrix.
    weights = np.ones(columns, dtype=np.float32) if kind.startswith(("IQ1", "IQ2")) else None
    _library().ggml_quantize_chunk(
        int(GGMLQuantizationType[kind]), source.ctypes.data, data.ctypes.data, 0, rows, columns,
        None if weights is None else weights.ctypes.data,
    )  # fmt: skip
    return data


def quantize(kind: str, values: F32) -> F32:
    """Return what a type makes of rows of values: quantized by `quantize_bytes` and back."""
    return values if kind == "F32" else dequantize(kind, quantize_bytes(kind, values), values.shape[1])
