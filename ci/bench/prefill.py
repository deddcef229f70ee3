"""Teacher prefill against transformers in F32, same weights, same threads, same tokens.

A random Qwen3.5 of about 100 million parameters, 512 tokens in one call. Each side runs alone in a process of its
own, in turn, several times; the best of each is compared, which is what the processors can do when nobody disturbs.

    python ci/bench/prefill.py [--runs 5] [--threads N] [--json]
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.tiny_qwen35 import Sizes, write_snapshot  # noqa: E402 - the project above this folder
from teacher.process.streams import ask_source  # noqa: E402
from teacher.verification import usable_processors  # noqa: E402

TOKENS = 512
SIZES = Sizes(
    layers=16, full_interval=4, hidden=768, intermediate=2048, heads=8, kv_heads=2, head_width=128, key_heads=8,
    value_heads=16, key_width=64, value_width=64, padding_rows=8000, tied=True, wrapped=False,
)  # fmt: skip


def ids() -> list[int]:
    return [int(i) for i in np.random.default_rng(0).integers(0, 300, TOKENS)]


class TeacherTimer:
    """Times the teacher's layers and head, weights already in place."""

    @staticmethod
    def answer(question: dict, spec: dict) -> list[float]:
        from receipts.cache_plan import plan_cache
        from teacher.backend.device import mx
        from teacher.model.blocks import apply_layer, prepare_layer
        from teacher.model.cache import allocate_slot
        from teacher.model.head import OutputHead, embed
        from teacher.snapshot.folder import read_snapshot
        from teacher.snapshot.weights import WeightSource

        snapshot = read_snapshot(spec["snapshot"])
        config, source = snapshot.config, WeightSource(snapshot)
        plan = plan_cache(config.cache_sizes(), TOKENS)
        layers = [prepare_layer(source.layer(i)) for i in range(config.num_hidden_layers)]
        head = OutputHead(source, config)
        seconds = []
        for _ in range(question["runs"] + 1):
            slots = [allocate_slot(plan, i) for i in range(config.num_hidden_layers)]
            began = time.perf_counter()
            x = embed(source, question["ids"])
            for weights, slot in zip(layers, slots, strict=True):
                x = apply_layer(x, weights, config, slot, 0)
            for _rows in head.logits(head.normalise(x)):
                pass
            mx.synchronize()
            seconds.append(time.perf_counter() - began)
        return seconds[1:]  # the first warms up


class TransformersTimer:
    """Times transformers' forward, weights already in place."""

    @staticmethod
    def answer(question: dict, spec: dict) -> list[float]:
        import torch

        from teacher.sides.reference import build_model, read_text_config

        torch.set_num_threads(spec["threads"])
        folder = Path(spec["snapshot"])
        text, tied = read_text_config(folder)
        model, _ = build_model(folder, text, tied, torch.float32, "sdpa")
        row = torch.tensor([question["ids"]])
        seconds = []
        for _ in range(question["runs"] + 1):
            began = time.perf_counter()
            with torch.inference_mode():
                model(input_ids=row, use_cache=True)
            seconds.append(time.perf_counter() - began)
        return seconds[1:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=usable_processors())
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        folder = write_snapshot(Path(work) / "random", SIZES)
        parameters = sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 2e6
        question = {"ids": ids(), "runs": options.runs}
        spec = {"snapshot": str(folder), "threads": options.threads}
        best = {}
        for name in ("TeacherTimer", "TransformersTimer"):
            print(f"timing {name}", file=sys.stderr)
            env = {"PYTHONPATH": f"{ROOT / 'ci' / 'bench'}:{ROOT}:{ROOT / 'tests'}"}
            env |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(options.threads))
            env |= {"OPENBLAS_THREAD_TIMEOUT": "26", "GOMP_SPINCOUNT": "300000"}  # both libraries' own defaults
            best[name] = min(ask_source(f"prefill:{name}", spec, question, env=env))
    teacher, peer = (TOKENS / best[name] for name in ("TeacherTimer", "TransformersTimer"))
    result = {
        "parameters_millions": round(parameters, 1), "tokens": TOKENS, "threads": options.threads,
        "teacher_tokens_per_second": round(teacher, 1), "transformers_tokens_per_second": round(peer, 1),
        "ratio": round(teacher / peer, 2),
    }  # fmt: skip
    if options.json:
        print(json.dumps(result))
    else:
        print(f"{result['parameters_millions']} M parameters, {TOKENS} tokens in one call, {options.threads} threads")
        print(f"teacher       {teacher:8.1f} tokens a second")
        print(f"transformers  {peer:8.1f} tokens a second (F32)")
        print(f"ratio         {teacher / peer:8.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
