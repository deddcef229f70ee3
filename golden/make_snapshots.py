"""Write the three snapshots from trained weights, configs and tokenizers, as released checkpoints are laid out.

MAIN becomes qwen35-tiny: wrapped for vision and text, in shards, with a vision tower and an MTP block. Both are
untrained; they are there so that loading the text model alone is real. TIED becomes qwen35-tiny-tied, a plain text
model in one file. ODD becomes qwen35-tiny-odd, random, with sizes that a GGUF cannot hold.
"""

import argparse
import json
import shutil
from pathlib import Path

import configs
import torch
from safetensors.torch import load_file, save_file
from train import F32_NAMES
from transformers import Qwen3_5Config, Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration, Qwen3_5TextConfig

HERE = Path(__file__).resolve().parent
SHARDS = 3
Tensors = dict[str, torch.Tensor]


def write_json(path: Path, value: object) -> None:
    """JSON as the released files have it: two spaces, one newline."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")


def write_shards(folder: Path, tensors: Tensors) -> None:
    """Cut tensors, in order of name, into SHARDS files of about one size, with their index."""
    size = sum(value.nbytes for value in tensors.values())
    parts: list[Tensors] = [{} for _ in range(SHARDS)]
    done = 0
    for name in sorted(tensors):
        parts[min(done * SHARDS // size, SHARDS - 1)][name] = tensors[name]
        done += tensors[name].nbytes
    weight_map = {}
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05d}-of-{SHARDS:05d}.safetensors"
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / "model.safetensors.index.json", index)


def vision_tensors() -> Tensors:
    """The vision tower that transformers makes of MAIN, at its random start."""
    torch.manual_seed(11)
    config = Qwen3_5Config(**{key: value for key, value in configs.MAIN.items() if key != "model_type"})
    state = Qwen3_5ForConditionalGeneration(config).state_dict()
    return {name: value.to(torch.bfloat16) for name, value in state.items() if name.startswith("model.visual.")}


def mtp_tensors(text: dict[str, int]) -> Tensors:
    """One MTP block at a random start: two norms, a joining product, one full-attention layer, a norm."""
    D, inner, width = text["hidden_size"], text["intermediate_size"], text["head_dim"]
    queries, keys = text["num_attention_heads"] * width, text["num_key_value_heads"] * width
    shapes = {
        "mtp.fc.weight": (D, 2 * D),
        "mtp.norm.weight": (D,),
        "mtp.pre_fc_norm_embedding.weight": (D,),
        "mtp.pre_fc_norm_hidden.weight": (D,),
        "mtp.layers.0.input_layernorm.weight": (D,),
        "mtp.layers.0.post_attention_layernorm.weight": (D,),
        "mtp.layers.0.mlp.gate_proj.weight": (inner, D),
        "mtp.layers.0.mlp.up_proj.weight": (inner, D),
        "mtp.layers.0.mlp.down_proj.weight": (D, inner),
        "mtp.layers.0.self_attn.q_proj.weight": (2 * queries, D),
        "mtp.layers.0.self_attn.k_proj.weight": (keys, D),
        "mtp.layers.0.self_attn.v_proj.weight": (keys, D),
        "mtp.layers.0.self_attn.o_proj.weight": (D, queries),
        "mtp.layers.0.self_attn.q_norm.weight": (width,),
        "mtp.layers.0.self_attn.k_norm.weight": (width,),
    }
    generator = torch.Generator().manual_seed(12)
    return {name: (torch.randn(shape, generator=generator) * 0.02).bfloat16() for name, shape in shapes.items()}


def odd_tensors() -> Tensors:
    """ODD at a random start that gives logits some spread: products keep the size of what they are given."""
    config = Qwen3_5TextConfig(**{key: value for key, value in configs.ODD.items() if key != "model_type"})
    generator = torch.Generator().manual_seed(13)
    tensors = {}
    for name, value in Qwen3_5ForCausalLM(config).state_dict().items():
        noise = torch.randn(value.shape, generator=generator)
        if name.endswith("A_log"):
            made = torch.log(0.2 + 4 * torch.rand(value.shape, generator=generator))
        elif name.endswith("linear_attn.norm.weight"):
            made = 1 + 0.1 * noise
        elif value.ndim == 1:
            made = 0.1 * noise
        else:
            made = noise * {"model.embed_tokens.weight": 1.0, "lm_head.weight": 0.4}.get(name, value.shape[-1] ** -0.5)
        tensors[name] = made.to(torch.float32 if name.endswith(F32_NAMES) else torch.bfloat16)
    return tensors


def write_snapshot(folder: Path, config: dict, tensors: Tensors, tokenizer: Path, *, sharded: bool) -> None:
    """One model folder, from nothing."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(tokenizer, folder)
    write_json(folder / "config.json", config)
    end = config.get("text_config", config)["eos_token_id"]
    generation = {
        "do_sample": True, "eos_token_id": [end + 2, end], "pad_token_id": end, "temperature": 0.6, "top_k": 20,
        "top_p": 0.95, "transformers_version": config["transformers_version"],
    }  # fmt: skip
    write_json(folder / "generation_config.json", generation)
    if sharded:
        write_shards(folder, tensors)
    else:
        ordered = {name: tensors[name] for name in sorted(tensors)}
        save_file(ordered, folder / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, default=HERE / "build")
    parser.add_argument("--out", type=Path, default=HERE)
    options = parser.parse_args()
    main_text = load_file(options.build / "MAIN.safetensors")
    wrapped = {name.replace("model.", "model.language_model.", 1): value for name, value in main_text.items()}
    tensors = {**wrapped, **vision_tensors(), **mtp_tensors(configs.MAIN_TEXT)}
    tokenizer = options.build / "tokenizer"
    write_snapshot(options.out / "qwen35-tiny", configs.MAIN, tensors, tokenizer, sharded=True)
    tied = load_file(options.build / "TIED.safetensors")
    write_snapshot(options.out / "qwen35-tiny-tied", configs.TIED, tied, tokenizer, sharded=False)
    bytes_only = options.build / "tokenizer-bytes"
    write_snapshot(options.out / "qwen35-tiny-odd", configs.ODD, odd_tensors(), bytes_only, sharded=False)


if __name__ == "__main__":
    main()
