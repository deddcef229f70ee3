"""Train a text model of configs.py on build/train.jsonl and print its loss on held-out text.

    python train.py MAIN --minutes 6

Weights are F32 while they learn, products BF16 where the device has them; what is saved is what ships: BF16, with
A_log and the gated norm in F32 as released checkpoints have them. The learning rate follows the clock, so that a run
ends when it was told to, on a GPU or on a CPU.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path

import configs
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

HERE = Path(__file__).resolve().parent
LENGTH = 512
END = "<|endoftext|>"
WARMUP_SHARE = 0.04
F32_NAMES = ("A_log", "linear_attn.norm.weight")


def tokenize(tokenizer: Tokenizer, path: Path) -> np.ndarray:
    """All documents as one row of uint16 ids, each ended by END."""
    texts = [json.loads(line)["text"] for line in path.open(encoding="utf-8")]
    end = tokenizer.token_to_id(END)
    encoded = tokenizer.encode_batch_fast(texts)
    return np.concatenate([np.array([*one.ids, end], dtype=np.uint16) for one in encoded])


def load_tokens(build: Path) -> np.ndarray:
    """The training row, made once and kept beside the texts."""
    kept = build / "train.npy"
    if not kept.exists():
        tokenizer = Tokenizer.from_file(str(build / "tokenizer/tokenizer.json"))
        np.save(kept, tokenize(tokenizer, build / "train.jsonl"))
    return np.load(kept)


def learning_rate(share: float, peak: float) -> float:
    """Linear warm-up, then a cosine to a fiftieth of the peak."""
    if share < WARMUP_SHARE:
        return peak * share / WARMUP_SHARE
    done = (share - WARMUP_SHARE) / (1 - WARMUP_SHARE)
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(done, 1.0))))


def train(model: Qwen3_5ForCausalLM, tokens: np.ndarray, *, minutes: float, batch: int, peak: float) -> None:
    """AdamW on random windows of the training row until the time is up."""
    device = next(model.parameters()).device
    row = torch.from_numpy(tokens.astype(np.int32)).to(device)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(1)
    offsets = torch.arange(LENGTH + 1)
    began, step, shown = time.monotonic(), 0, 0.0
    while (spent := (time.monotonic() - began) / 60) < minutes:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(spent / minutes, peak)
        starts = torch.randint(row.numel() - LENGTH - 1, (batch,), generator=generator)
        window = row[(starts[:, None] + offsets).to(device)].long()
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(input_ids=window[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if time.monotonic() - shown > 10:
            shown = time.monotonic()
            print(f"step {step} {spent:.2f} min loss {loss.item():.3f}", file=sys.stderr, flush=True)
    print(f"{step} steps of {batch} x {LENGTH} tokens, last loss {loss.item():.3f}", file=sys.stderr)


def save(model: Qwen3_5ForCausalLM, path: Path) -> None:
    """Write the weights in the types they ship in."""
    state = {}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        kind = torch.float32 if name.endswith(F32_NAMES) else torch.bfloat16
        state[name] = value.detach().to("cpu", kind).contiguous()
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(state, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=("MAIN", "TIED"))
    parser.add_argument("--build", type=Path, default=HERE / "build")
    parser.add_argument("--out", type=Path, help="build/NAME.safetensors")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--batch", type=int, help="sequences a step: 128 on a GPU, 8 on a CPU")
    parser.add_argument("--peak", type=float, default=3e-3, help="learning rate")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    form = getattr(configs, options.name)
    text = form.get("text_config", form)
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(**{key: value for key, value in text.items() if key != "model_type"})
    model = Qwen3_5ForCausalLM(config).to(device, torch.float32).train()
    print(f"{options.name}: {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters on {device}",
          file=sys.stderr)  # fmt: skip
    tokens = load_tokens(options.build)
    print(f"{tokens.size / 1e6:.1f} M training tokens", file=sys.stderr)
    train(model, tokens, minutes=options.minutes, batch=options.batch or (128 if device.type == "cuda" else 8),
          peak=options.peak)  # fmt: skip
    save(model, options.out or options.build / f"{options.name}.safetensors")


if __name__ == "__main__":
    main()
