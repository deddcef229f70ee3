"""The tensor audit's speed, in bytes of source weights a second, beside a plain read of the same source weights.

A random Qwen3.5 of about 130 million parameters, its matrices quantized to each type. Both sides run in turn, several
times, and the best of each counts; the files are in the page cache, so the read is one of memory.

    python ci/bench/audit.py [--runs 3] [--threads N] [--json]
"""

import argparse
import json
import resource
import sys
import tempfile
import time
from pathlib import Path

import gguf
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.tiny_qwen35 import Sizes, write_gguf, write_snapshot  # noqa: E402 - the project above this folder
from teacher.audit.quants import quantize_bytes  # noqa: E402
from teacher.audit.tensors import audit_file  # noqa: E402
from teacher.snapshot.folder import read_snapshot  # noqa: E402
from teacher.verification import usable_processors  # noqa: E402

TYPES = ("Q8_0", "Q6_K", "Q4_K", "Q4_0", "IQ4_XS")
TARGET = 300.0  # MB/s
SIZES = Sizes(
    layers=16, full_interval=4, hidden=768, intermediate=2048, heads=8, kv_heads=2, head_width=128, key_heads=8,
    value_heads=16, key_width=64, value_width=64, padding_rows=8000, tied=True, wrapped=False,
)  # fmt: skip


def requantize(source: Path, target: Path, kind: str) -> None:
    """Copy an F32 GGUF with every matrix but the convolutions in another type."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "qwen35")
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            form = field.types[0]
            writer.add_key_value(
                key, field.contents(), form, field.types[-1] if form == gguf.GGUFValueType.ARRAY else None
            )
    for tensor in reader.tensors:
        if tensor.data.ndim == 2 and "conv1d" not in tensor.name:
            writer.add_tensor(tensor.name, quantize_bytes(kind, tensor.data), raw_dtype=gguf.GGMLQuantizationType[kind])
        else:
            writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_all(folder: Path) -> None:
    buffer = bytearray(1 << 20)
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def best(action, runs: int) -> float:
    seconds = []
    for _ in range(runs):
        began = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=usable_processors())
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result: dict = {"threads": options.threads, "target_megabytes_per_second": TARGET, "types": {}}
    with tempfile.TemporaryDirectory() as work:
        folder = write_snapshot(Path(work) / "model", SIZES)
        plain = write_gguf(folder, Path(work) / "F32.gguf")
        snapshot = read_snapshot(folder)
        for kind in TYPES:
            path = Path(work) / "model.gguf"
            requantize(plain, path, kind)
            read = best(lambda: read_all(folder), options.runs)
            audit = audit_file(snapshot, path, threads=options.threads)
            if not audit.passed:
                raise SystemExit(f"{kind}: expected a clean audit, got {audit.of_verdict('worse', 'wrong')[0]}")
            seconds = best(lambda path=path: audit_file(snapshot, path, threads=options.threads), options.runs)
            result["types"][kind] = {
                "megabytes_per_second": round(audit.source_bytes / seconds / 1e6, 1),
                "times_a_plain_read": round(seconds / read, 1),
            }
            print(f"{kind} done", file=sys.stderr)
    unit = 1 if sys.platform == "darwin" else 1024
    result["peak_mebibytes"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20)
    if options.json:
        print(json.dumps(result))
        return 0
    for kind, found in result["types"].items():
        speed = found["megabytes_per_second"]
        print(
            f"{kind:8}{speed:10.1f} MB/s of source weights ({speed / TARGET:.2f} of the target),"
            f" {found['times_a_plain_read']:.1f} times a plain read"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
