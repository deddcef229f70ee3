"""Loss of a snapshot on held-out text, beside what the token counts alone would give.

python eval_loss.py qwen35-tiny
"""

import argparse
import json
import math
import sys
from collections import Counter
from pathlib import Path

import torch
from tokenizers import Tokenizer

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from teacher.sides.reference import build_model, read_text_config  # noqa: E402 - the project beside this folder

LIMIT = 1024  # tokens of one text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("snapshot", type=Path)
    parser.add_argument("--held-out", type=Path, default=HERE / "heldout.jsonl")
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(options.snapshot / "tokenizer.json"))
    text, tied = read_text_config(options.snapshot)
    model, _ = build_model(options.snapshot, text, tied, torch.float32, "sdpa")
    rows = [json.loads(line) for line in options.held_out.open(encoding="utf-8")]
    counts: Counter[int] = Counter()
    by_source: dict[str, list[float]] = {}
    top, right = [], []
    for row in rows:
        ids = tokenizer.encode(row["text"]).ids[:LIMIT]
        if len(ids) < 2:
            continue
        counts.update(ids[1:])
        with torch.inference_mode():
            share = model(input_ids=torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
        following = torch.tensor(ids[1:])
        losses = -share.gather(1, following[:, None])[:, 0]
        by_source.setdefault(row["source"], []).extend(losses.tolist())
        best, guess = share.max(-1)
        top += best.exp().tolist()
        right += (guess == following).tolist()
    total = sum(counts.values())
    entropy = -sum(n / total * math.log(n / total) for n in counts.values())
    losses = [loss for part in by_source.values() for loss in part]
    print(f"{options.snapshot.name}: {total} held-out tokens")
    print(f"loss             {sum(losses) / total:.3f} nats a token")
    print(f"unigram entropy  {entropy:.3f} nats a token")
    print(f"top probability  {sum(top) / total:.3f} in the mean; the top token is right in {sum(right) / total:.1%}")
    for source, part in by_source.items():
        print(f"  {source:8} {sum(part) / len(part):.3f} over {len(part)}")


if __name__ == "__main__":
    main()
