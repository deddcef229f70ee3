"""Element types against the file's label: what a quantizer passed over, and what it made coarser than it says."""

from __future__ import annotations

from collections.abc import Iterator

from receipts.findings import TypeFinding
from teacher.gguf.file import GgufFile
from teacher.gguf.match import bits_of_types, file_label, required_tensors, type_family
from teacher.snapshot.config import ModelConfig

_FLOATS = ("F32", "F16", "BF16")
# The smallest block that every quantized type falls back to: rows that it does not divide stay floats rightly.
_SMALLEST_BLOCK = 32
# llama-quantize's own mixtures that hold a type below the label's.
_MIXED = {"IQ3_XXS": ("IQ2_S",), "IQ3_XS": ("IQ2_S",)}


def audit_types(gguf: GgufFile, config: ModelConfig) -> Iterator[TypeFinding]:
    """Yield the matrices whose type is a plain float in a quantized file, or coarser than any of the label's types."""
    label = file_label(gguf)
    if label is None or label in _FLOATS:
        return
    bits, family = bits_of_types(), type_family(label)
    own = [size for name, size in bits.items() if name.startswith(family)]
    if not own:
        return
    # llama.cpp keeps the convolution in F32 always.
    matrices = {name: shape for name, shape in required_tensors(config) if len(shape) == 2 and "ssm_conv1d" not in name}
    for tensor in gguf.tensors:
        if tensor.name not in matrices:
            continue
        if tensor.type in _FLOATS:
            if matrices[tensor.name][1] % _SMALLEST_BLOCK == 0:
                yield TypeFinding(name=tensor.name, type=tensor.type, label=label, kind="above")
        elif bits[tensor.type] < min(own) and tensor.type not in _MIXED.get(label, ()):
            yield TypeFinding(name=tensor.name, type=tensor.type, label=label, kind="below")
