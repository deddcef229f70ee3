"""Copies of a GGUF with some metadata and tensors changed, and raw headers built byte by byte."""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from teacher.audit.quants import quantize_bytes

_ARRAY = gguf.GGUFValueType.ARRAY


def edit_gguf(
    source: Path,
    target: Path,
    *,
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    types: Mapping[str, str] | None = None,
    rename: Mapping[str, str] | None = None,
    drop: tuple[str, ...] = (),
) -> Path:
    """Copy a GGUF.

    Args:
        metadata: key -> new value, of the kind the key had; None removes it; a new key is a number or a text.
        tensors: name -> new float32 array, written in the type the tensor had; an unchanged one keeps its bytes.
        types: name -> element type of a new array, where it is another one.
        rename: old tensor name -> new one.
        drop: tensors left out.
    """
    reader = gguf.GGUFReader(source)
    changes = dict(metadata or {})
    architecture = changes.get("general.architecture", reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(target, architecture)
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        value = changes.pop(key, field.contents())
        if value is None:
            continue
        kind = field.types[0]
        writer.add_key_value(key, value, kind, field.types[-1] if kind == _ARRAY else None)
    for key, value in changes.items():
        if value is not None and key != "general.architecture":
            kind = gguf.GGUFValueType.STRING if isinstance(value, str) else gguf.GGUFValueType.UINT32
            writer.add_key_value(key, value, kind)
    for tensor in reader.tensors:
        if tensor.name in drop:
            continue
        name = (rename or {}).get(tensor.name, tensor.name)
        changed = (tensors or {}).get(tensor.name)
        if changed is None:
            writer.add_tensor(name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
        else:
            _add(writer, name, changed, (types or {}).get(tensor.name, tensor.tensor_type.name))
    for name, value in (tensors or {}).items():
        if all(tensor.name != name for tensor in reader.tensors):
            _add(writer, name, value, (types or {}).get(name, "F32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _add(writer: gguf.GGUFWriter, name: str, values: np.ndarray, kind: str) -> None:
    values = np.ascontiguousarray(values, np.float32)
    if kind == "F32":
        writer.add_tensor(name, values)
    else:
        writer.add_tensor(name, quantize_bytes(kind, values), raw_dtype=gguf.GGMLQuantizationType[kind])


def tensor_of(source: Path, name: str) -> np.ndarray:
    """The values of a tensor, in float32."""
    tensor = next(tensor for tensor in gguf.GGUFReader(source).tensors if tensor.name == name)
    return np.array(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32)


def text(value: str) -> bytes:
    """A string as the format has it."""
    return struct.pack("<Q", len(value)) + value.encode()


def entry(name: str, axes: tuple[int, ...], kind: int, offset: int) -> bytes:
    """One tensor's entry."""
    return text(name) + struct.pack(f"<I{len(axes)}QIQ", len(axes), *axes, kind, offset)


def raw_gguf(
    *,
    keys: tuple[bytes, ...] = (),
    entries: tuple[bytes, ...] = (entry("a", (4,), 0, 0),),
    data: bytes = b"\0" * 32,
    version: int = 3,
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
) -> bytes:
    """A whole file from its parts."""
    tensors, pairs = counts or (len(entries), len(keys))
    head = b"GGUF" + struct.pack("<IQQ", version, tensors, pairs) + b"".join(keys) + b"".join(entries)
    return head + b"\0" * (-len(head) % alignment) + data
