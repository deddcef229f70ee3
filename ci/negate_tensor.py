"""Copy a GGUF and negate one of its F32 tensors: the smallest conversion bug that still loads and runs."""

import shutil
import sys
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader


def main(argv: list[str]) -> int:
    if len(argv) != 3:
        print("usage: negate_tensor.py SOURCE.gguf TENSOR TARGET.gguf", file=sys.stderr)
        return 2
    source, name, target = argv
    partial = Path(target + ".partial")
    shutil.copyfile(source, partial)
    tensors = {tensor.name: tensor for tensor in GGUFReader(partial, "r+").tensors}
    tensor = tensors.get(name)
    if tensor is None or tensor.tensor_type != GGMLQuantizationType.F32:
        partial.unlink()
        found = "no such tensor" if tensor is None else tensor.tensor_type.name
        print(f"{source}: expected an F32 tensor {name}, got {found}", file=sys.stderr)
        return 2
    np.negative(tensor.data, out=tensor.data)
    tensor.data.flush()
    partial.rename(target)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
