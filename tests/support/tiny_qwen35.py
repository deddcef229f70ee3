"""A tiny random Qwen3.5 with a real byte-level tokenizer, as a snapshot and as a GGUF.

The GGUF is written from the snapshot by a mapping of our own, so that no test needs llama.cpp's converter. Every
axis has its own size, save key and value head width, which a GGUF cannot hold apart.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PLAIN_ADDED = ("<think>", "</think>")
TEMPLATE = (
    "{%- for message in messages -%}\n<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{%- endfor -%}\n"
)
# The released pre-tokenizer's alternatives: contractions, words with their marks, single digits, punctuation, space.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|"
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXT = (
    "The quick brown fox jumps over the lazy dog. It's the fox's day, isn't it?",
    "def add(left, right):\n    return left + right\n\nprint(add(12, 34))  # 46\n",
    "Привет мир, как дела? Приветствую всех.",
    "今天天气很好，我们去公园散步。",  # noqa: RUF001 - the comma the language has
    "naïve café résumé, e\u0301te\u0301, हिन्दी में लिखा हुआ पाठ",
    "🙂🙃🚀 numbers 1234567890 and 3.14159",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of the tiny model; `value_width` may differ from `key_width` where no GGUF is made."""

    layers: int = 4
    full_interval: int = 2
    hidden: int = 96
    intermediate: int = 160
    heads: int = 4
    kv_heads: int = 2
    head_width: int = 32
    key_heads: int = 2
    value_heads: int = 6
    key_width: int = 16
    value_width: int = 16
    conv: int = 4
    padding_rows: int = 7
    tied: bool = False
    wrapped: bool = True


def write_tokenizer(folder: Path) -> int:
    """Write tokenizer.json, its config and the chat template; return how many ids it has."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT * 8, trainer)
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in PLAIN_ADDED])
    tokenizer.save(str(folder / "tokenizer.json"))
    facts = {"eos_token": SPECIAL[2], "pad_token": SPECIAL[0], "bos_token": None, "add_bos_token": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return tokenizer.get_vocab_size(with_added_tokens=True)


def write_snapshot(folder: Path, sizes: Sizes | None = None, *, seed: int = 7) -> Path:
    """Write a snapshot with random BF16 weights and return its folder."""
    sizes = sizes or Sizes()
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = write_tokenizer(folder) + sizes.padding_rows
    text = text_config(sizes, vocabulary)
    config: dict[str, Any] = {"architectures": ["Qwen3_5ForCausalLM"], **text}
    if sizes.wrapped:
        config = {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "model_type": "qwen3_5",
            "tie_word_embeddings": sizes.tied,
            "text_config": text,
            "vision_config": {"model_type": "qwen3_5", "depth": 1, "hidden_size": 8},
        }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    prefix = "model.language_model." if sizes.wrapped else "model."
    weights = {_outer(name, prefix): value for name, value in text_weights(text, seed).items()}
    if sizes.wrapped:
        rng = np.random.default_rng(seed + 1)
        weights["model.visual.patch_embed.proj.weight"] = rng.standard_normal((8, 3)).astype(np.float32)
        weights["mtp.fc.weight"] = rng.standard_normal((sizes.hidden, 2 * sizes.hidden)).astype(np.float32)
    write_safetensors(folder / "model.safetensors", weights)
    return folder


def text_config(sizes: Sizes, vocabulary: int) -> dict[str, Any]:
    """Return the text model's part of config.json."""
    kinds = ["linear_attention", "full_attention"]
    pairs = sizes.head_width // 8  # a quarter of a head is rotated, in pairs
    return {
        "model_type": "qwen3_5_text",
        "dtype": "bfloat16",
        "vocab_size": vocabulary,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_width,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "attention_bias": False,
        "attn_output_gate": True,
        "tie_word_embeddings": sizes.tied,
        "linear_num_key_heads": sizes.key_heads,
        "linear_num_value_heads": sizes.value_heads,
        "linear_key_head_dim": sizes.key_width,
        "linear_value_head_dim": sizes.value_width,
        "linear_conv_kernel_dim": sizes.conv,
        "full_attention_interval": sizes.full_interval,
        "layer_types": [kinds[(index + 1) % sizes.full_interval == 0] for index in range(sizes.layers)],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_section": [pairs - 2 * (pairs // 4), pairs // 4, pairs // 4],
            "mrope_interleaved": True,
        },
    }


def text_weights(config: Mapping[str, Any], seed: int) -> dict[str, np.ndarray]:
    """Return random weights under the text model's own names, as BF16 values held in float32."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return rng.standard_normal((rows, columns)) * columns**-0.5 * 1.6

    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    weights = {"embed_tokens.weight": matrix(config["vocab_size"], hidden)}
    for index, kind in enumerate(config["layer_types"]):
        part = {
            "input_layernorm.weight": rng.standard_normal(hidden) * 0.2,
            "post_attention_layernorm.weight": rng.standard_normal(hidden) * 0.2,
            "mlp.gate_proj.weight": matrix(inner, hidden),
            "mlp.up_proj.weight": matrix(inner, hidden),
            "mlp.down_proj.weight": matrix(hidden, inner),
        }
        if kind == "full_attention":
            part |= {
                "self_attn.q_proj.weight": matrix(2 * heads * head, hidden),
                "self_attn.k_proj.weight": matrix(kv_heads * head, hidden),
                "self_attn.v_proj.weight": matrix(kv_heads * head, hidden),
                "self_attn.o_proj.weight": matrix(hidden, heads * head),
                "self_attn.q_norm.weight": rng.standard_normal(head) * 0.2,
                "self_attn.k_norm.weight": rng.standard_normal(head) * 0.2,
            }
        else:
            rows = config["linear_num_value_heads"]
            part |= {
                "linear_attn.in_proj_qkv.weight": matrix(2 * keys + values, hidden),
                "linear_attn.in_proj_z.weight": matrix(values, hidden),
                "linear_attn.in_proj_a.weight": matrix(rows, hidden),
                "linear_attn.in_proj_b.weight": matrix(rows, hidden),
                "linear_attn.conv1d.weight": rng.standard_normal(
                    (2 * keys + values, 1, config["linear_conv_kernel_dim"])
                ),
                "linear_attn.A_log": np.log(rng.uniform(0.5, 8.0, rows)),
                "linear_attn.dt_bias": rng.standard_normal(rows),
                "linear_attn.norm.weight": 1 + rng.standard_normal(config["linear_value_head_dim"]) * 0.2,
                "linear_attn.out_proj.weight": matrix(hidden, values),
            }
        weights |= {f"layers.{index}.{name}": value for name, value in part.items()}
    weights["norm.weight"] = rng.standard_normal(hidden) * 0.2
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = matrix(config["vocab_size"], hidden) * 2
    return {name: to_bf16(value) for name, value in weights.items()}


def to_bf16(value: np.ndarray) -> np.ndarray:
    """Return float32 values cut to BF16's bits."""
    return (np.asarray(value, dtype="<f4").view("<u4") & 0xFFFF0000).view("<f4")


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write float32 arrays of BF16 values as a BF16 safetensors file."""
    header, offset, parts = {}, 0, []
    for name, value in tensors.items():
        data = (value.view("<u4") >> 16).astype("<u2").tobytes()
        header[name] = {"dtype": "BF16", "shape": list(value.shape), "data_offsets": [offset, offset + len(data)]}
        parts.append(data)
        offset += len(data)
    head = json.dumps(header).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + b"".join(parts))


def read_text_weights(folder: Path) -> dict[str, np.ndarray]:
    """Return the text model's weights under its own names, from a tiny snapshot."""
    data = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    found = {}
    for name, entry in json.loads(data[8 : 8 + size]).items():
        inner = name.removeprefix("model.language_model.").removeprefix("model.")
        if inner.startswith(("layers.", "embed_tokens.", "norm.", "lm_head.")):
            first, last = (8 + size + offset for offset in entry["data_offsets"])
            bits = np.frombuffer(data[first:last], dtype="<u2").astype("<u4") << 16
            found[inner] = bits.view("<f4").reshape(entry["shape"])
    return found


def _outer(name: str, prefix: str) -> str:
    return name if name == "lm_head.weight" else prefix + name


_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
}


def write_gguf(snapshot: Path, path: Path) -> Path:
    """Write the snapshot as an F32 GGUF with its tokenizer embedded, and return the path."""
    import gguf

    config = json.loads((snapshot / "config.json").read_text())
    text = config.get("text_config", config)
    writer = gguf.GGUFWriter(path, "qwen35")
    writer.add_block_count(text["num_hidden_layers"])
    writer.add_context_length(text["max_position_embeddings"])
    writer.add_embedding_length(text["hidden_size"])
    writer.add_feed_forward_length(text["intermediate_size"])
    writer.add_head_count(text["num_attention_heads"])
    writer.add_head_count_kv(text["num_key_value_heads"])
    writer.add_key_length(text["head_dim"])
    writer.add_value_length(text["head_dim"])
    rope = text["rope_parameters"]
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    writer.add_rope_dimension_count(int(text["head_dim"] * rope["partial_rotary_factor"]))
    writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    writer.add_layer_norm_rms_eps(text["rms_norm_eps"])
    writer.add_ssm_conv_kernel(text["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(text["linear_key_head_dim"])
    writer.add_ssm_group_count(text["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(text["linear_num_value_heads"])
    writer.add_ssm_inner_size(text["linear_value_head_dim"] * text["linear_num_value_heads"])
    writer.add_full_attention_interval(text["full_attention_interval"])
    writer.add_file_type(0)
    _add_tokenizer(writer, snapshot, text["vocab_size"])
    for name, value in _gguf_tensors(text, read_text_weights(snapshot)):
        writer.add_tensor(name, np.ascontiguousarray(value, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: Any, snapshot: Path, rows: int) -> None:
    import gguf

    form = json.loads((snapshot / "tokenizer.json").read_text(encoding="utf-8"))
    texts = {number: text for text, number in form["model"]["vocab"].items()}
    kinds = dict.fromkeys(texts, gguf.TokenType.NORMAL)
    for token in form["added_tokens"]:
        texts[token["id"]] = token["content"]
        kinds[token["id"]] = gguf.TokenType.CONTROL if token["special"] else gguf.TokenType.USER_DEFINED
    ids = {text: number for number, text in texts.items()}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list([texts.get(number, f"[PAD{number}]") for number in range(rows)])
    writer.add_token_types([kinds.get(number, gguf.TokenType.UNUSED) for number in range(rows)])
    merges = form["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_eos_token_id(ids[SPECIAL[2]])
    writer.add_pad_token_id(ids[SPECIAL[0]])
    writer.add_add_bos_token(False)
    writer.add_chat_template((snapshot / "chat_template.jinja").read_text())


def _gguf_tensors(config: Mapping[str, Any], weights: Mapping[str, np.ndarray]) -> Iterable[tuple[str, np.ndarray]]:
    outer = {"embed_tokens.weight": "token_embd.weight", "lm_head.weight": "output.weight"}
    key_heads, value_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    keys, width = key_heads * config["linear_key_head_dim"], config["linear_value_head_dim"]
    # Source order: value heads of one key head stand together. GGUF order: heads of equal rank stand together.
    heads = np.arange(value_heads).reshape(key_heads, -1).T.reshape(-1)
    lanes = (heads[:, None] * width + np.arange(width)).reshape(-1)
    tail = np.concatenate([np.arange(2 * keys), 2 * keys + lanes])
    for name, source in weights.items():
        value = source
        if name in outer:
            yield outer[name], value
            continue
        if name == "norm.weight":
            yield "output_norm.weight", value + np.float32(1)
            continue
        _, index, inner = name.split(".", 2)
        if inner.endswith("norm.weight") and inner != "linear_attn.norm.weight":
            value = value + np.float32(1)
        elif inner == "linear_attn.A_log":
            value = -np.exp(value[heads])
        elif inner in ("linear_attn.dt_bias", "linear_attn.in_proj_a.weight", "linear_attn.in_proj_b.weight"):
            value = value[heads]
        elif inner == "linear_attn.in_proj_z.weight":
            value = value[lanes]
        elif inner == "linear_attn.out_proj.weight":
            value = value[:, lanes]
        elif inner == "linear_attn.in_proj_qkv.weight":
            value = value[tail]
        elif inner == "linear_attn.conv1d.weight":
            value = value[tail, 0]
        yield f"blk.{index}.{_NAMES[inner]}", value
