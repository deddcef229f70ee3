"""Peak memory of `teacher verify` on the shipped model, process by process, beside what the whole would take.

python ci/bench/verify_memory.py [--json]
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "golden"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        run = Path(work) / "run"
        command = [
            sys.executable, "-m", "teacher", "verify", str(GOLDEN / "qwen35-tiny"),
            str(GOLDEN / "gguf" / "qwen35-tiny-Q8_0.gguf"), "--out", str(run), "--json", "--quiet",
        ]  # fmt: skip
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
        form = json.loads(done.stdout)
        peaks = json.loads((run / "host.json").read_text())["peak_memory_bytes"]
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux kibibytes
    peaks["largest of all, the parent included"] = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * unit
    report = form["report"]
    rows = report["candidate"]["positions"] * report["vocabulary_rows"] * 4
    result = {
        "peak_mebibytes": {name: round(size / 2**20, 1) for name, size in peaks.items()},
        "logits_of_one_side_mebibytes": round(rows / 2**20, 1),
        "teacher_to_pytorch": round(peaks["teacher"] / peaks["pytorch-f32"], 2),
    }
    if options.json:
        print(json.dumps(result))
        return 0
    for name, size in result["peak_mebibytes"].items():
        print(f"{name:40}{size:10.1f} MiB")
    print(f"{'logits of one side, never held':40}{result['logits_of_one_side_mebibytes']:10.1f} MiB")
    print(f"{'teacher to PyTorch':40}{result['teacher_to_pytorch']:10.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
