"""Train the byte-level BPE tokenizer and write tokenizer.json, tokenizer_config.json, vocab.json and merges.txt.

The normalizer, the splitting expression and the 33 added tokens (their order too) are those of the released
Qwen3.5 tokenizers, so that a GGUF's `tokenizer.ggml.pre` of "qwen35" is true; the merges are our own.
"""

import argparse
import json
import random
from pathlib import Path

from configs import ADDED_TOKENS, BASE_TOKENS, CONTROL_TOKENS, PRETOKENIZE_REGEX
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

HERE = Path(__file__).resolve().parent
# What the merges are learned from: bytes of each source. Chats bring only their markup and are left out.
SAMPLE_BYTES = {"kjv": 2.5e6, "docs": 3e6, "code": 3e6, "jargon": 1e6, "poems": 2.5e6, "rights": 3e5, "digits": 1e5}


def sample_texts(train: Path) -> list[str]:
    """Documents in a fixed shuffle until each source has its share."""
    rows = [json.loads(line) for line in train.open(encoding="utf-8")]
    random.Random(0).shuffle(rows)
    left = dict(SAMPLE_BYTES)
    texts = []
    for row in rows:
        if left.get(row["source"], 0) > 0:
            left[row["source"]] -= len(row["text"].encode())
            texts.append(row["text"])
    return texts


def build_tokenizer(texts: list[str], base_tokens: int) -> Tokenizer:
    """Byte-level BPE with `base_tokens` entries, then ADDED_TOKENS; no texts gives the 256 bytes alone."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=base_tokens, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    assert tokenizer.get_vocab_size() == base_tokens, "too little text for so many merges"
    tokenizer.add_tokens(
        [AddedToken(token, special=token in CONTROL_TOKENS, normalized=False) for token in ADDED_TOKENS]
    )
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path, base_tokens: int) -> None:
    """Write the four files beside a snapshot's config, and the chat template with them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    model = json.loads(tokenizer.to_str())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"], ensure_ascii=False), "utf-8")
    merges = "".join(f"{left} {right}\n" for left, right in model["merges"])
    (folder / "merges.txt").write_text("#version: 0.2\n" + merges, "utf-8")
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    decoder = {
        str(base_tokens + index): {"content": token, **flags, "special": token in CONTROL_TOKENS}
        for index, token in enumerate(ADDED_TOKENS)
    }
    template = (HERE / "chat_template.jinja").read_text("utf-8")
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": decoder,
        "additional_special_tokens": list(CONTROL_TOKENS)[1:14],
        "audio_bos_token": "<|audio_start|>",
        "audio_eos_token": "<|audio_end|>",
        "audio_token": "<|audio_pad|>",
        "bos_token": None,
        "chat_template": template,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "image_token": "<|image_pad|>",
        "model_max_length": 4096,
        "pad_token": "<|endoftext|>",
        "pretokenize_regex": PRETOKENIZE_REGEX,
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
        "video_token": "<|video_pad|>",
        "vision_bos_token": "<|vision_start|>",
        "vision_eos_token": "<|vision_end|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8")
    (folder / "chat_template.jinja").write_text(template, "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", type=Path, default=HERE / "build/train.jsonl")
    parser.add_argument("--out", type=Path, default=HERE / "build/tokenizer")
    options = parser.parse_args()
    write_tokenizer(build_tokenizer(sample_texts(options.train), BASE_TOKENS), options.out, BASE_TOKENS)
    write_tokenizer(build_tokenizer([], 256), options.out.with_name("tokenizer-bytes"), 256)


if __name__ == "__main__":
    main()
