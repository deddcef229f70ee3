"""Is this GGUF of this model? Sizes, tensors and vocabulary, before anything is run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from receipts.errors import GgufError
from teacher.config import FULL, ModelConfig
from teacher.gguf_file import GgufFile, GgufTensor

ARCHITECTURE = "qwen35"
# general.file_type as llama.cpp numbers it, and the type that most of such a file's matrices have.
_FILE_TYPES = {
    0: ("F32", "F32"), 1: ("F16", "F16"), 2: ("Q4_0", "Q4_0"), 3: ("Q4_1", "Q4_1"), 7: ("Q8_0", "Q8_0"),
    8: ("Q5_0", "Q5_0"), 9: ("Q5_1", "Q5_1"), 10: ("Q2_K", "Q2_K"), 11: ("Q3_K_S", "Q3_K"), 12: ("Q3_K_M", "Q3_K"),
    13: ("Q3_K_L", "Q3_K"), 14: ("Q4_K_S", "Q4_K"), 15: ("Q4_K_M", "Q4_K"), 16: ("Q5_K_S", "Q5_K"),
    17: ("Q5_K_M", "Q5_K"), 18: ("Q6_K", "Q6_K"), 32: ("BF16", "BF16"),
}  # fmt: skip
_TRUNK = re.compile(r"blk\.(\d+)\.(.+)")


def verify_matches(gguf: GgufFile, config: ModelConfig) -> tuple[str, ...]:
    """Check that a GGUF says it is the config's model.

    Returns:
        What is odd but prevents nothing, such as the tensors of other parts.

    Raises:
        GgufError: names what differs, with both values.
    """
    _verify_architecture(gguf)
    blocks = _number(gguf, "block_count")
    extra_blocks = _number(gguf, "nextn_predict_layers", default=0)
    names = {tensor.name: tensor for tensor in gguf.tensors}
    if extra_blocks and not any(".nextn." in name for name in names):
        raise GgufError(
            f"{gguf.name}: expected the {extra_blocks} MTP blocks of nextn_predict_layers, got none of their tensors"
            " (declared MTP block absent)"
        )
    _verify_sizes(gguf, config, int(blocks - extra_blocks))
    rows = len(gguf.metadata.get("tokenizer.ggml.tokens", ()))
    if rows != config.vocab_size:
        raise GgufError(
            f"{gguf.name}: expected a vocabulary of {config.vocab_size} rows as config.json has, got {rows} tokens"
        )
    _verify_tensors(gguf, config, names)
    return (*_extra_notes(gguf, config), *_type_notes(gguf))


def required_tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of every tensor that llama.cpp's converter makes of the text model."""
    D, I = config.hidden_size, config.intermediate_size  # noqa: E741 - the axis's usual letter
    yield "token_embd.weight", (config.vocab_size, D)
    if not config.tie_word_embeddings:
        yield "output.weight", (config.vocab_size, D)
    yield "output_norm.weight", (D,)
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    Hv = config.linear_num_value_heads
    values = Hv * config.linear_value_head_dim
    channels = 2 * config.linear_num_key_heads * config.linear_key_head_dim + values
    shared = {
        "attn_norm.weight": (D,), "post_attention_norm.weight": (D,), "ffn_gate.weight": (I, D),
        "ffn_up.weight": (I, D), "ffn_down.weight": (D, I),
    }  # fmt: skip
    full = {
        "attn_q.weight": (2 * queries, D), "attn_k.weight": (keys, D), "attn_v.weight": (keys, D),
        "attn_output.weight": (D, queries), "attn_q_norm.weight": (config.head_dim,),
        "attn_k_norm.weight": (config.head_dim,),
    }  # fmt: skip
    linear = {
        "attn_qkv.weight": (channels, D), "attn_gate.weight": (values, D), "ssm_alpha.weight": (Hv, D),
        "ssm_beta.weight": (Hv, D), "ssm_conv1d.weight": (channels, config.linear_conv_kernel_dim), "ssm_a": (Hv,),
        "ssm_dt.bias": (Hv,), "ssm_norm.weight": (config.linear_value_head_dim,), "ssm_out.weight": (D, values),
    }  # fmt: skip
    for layer, kind in enumerate(config.layer_types):
        for name, shape in {**shared, **(full if kind == FULL else linear)}.items():
            yield f"blk.{layer}.{name}", shape


def _verify_architecture(gguf: GgufFile) -> None:
    found = gguf.metadata.get("general.architecture")
    if found != ARCHITECTURE:
        experts = " (a mixture of experts; dense models only)" if "moe" in str(found) else ""
        raise GgufError(f"{gguf.name}: expected general.architecture {ARCHITECTURE}, got {found!r}{experts}")


def _number(gguf: GgufFile, key: str, default: int | None = None) -> int | float:
    full = f"{ARCHITECTURE}.{key}"
    value = gguf.metadata.get(full, default)
    if isinstance(value, tuple) and len(set(value)) == 1:
        value = value[0]  # one number for each layer, all the same
    if type(value) not in (int, float):
        what = "no such key" if value is None else repr(value)
        raise GgufError(f"{gguf.name}: expected a number for {full}, got {what}")
    assert isinstance(value, int | float)
    return value


def _verify_sizes(gguf: GgufFile, config: ModelConfig, trunk: int) -> None:
    if trunk != config.num_hidden_layers:
        raise GgufError(
            f"{gguf.name}: expected {config.num_hidden_layers} layers as config.json has, got {trunk} (block_count less"
            " MTP blocks)"
        )
    expected: dict[str, int | float] = {
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.dimension_count": config.rotary_dim,
        "rope.freq_base": config.rope_theta,
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
    }
    for key, want in expected.items():
        got = _number_or_layers(gguf, key, config)
        # Real numbers are stored as F32, which holds them to one part in 2^24.
        if abs(got - want) > abs(want) * 2.0**-23:
            raise GgufError(
                f"{gguf.name}: expected {ARCHITECTURE}.{key} {want:g} as config.json has, got {got:g}; this is another"
                " model"
            )
    sections = gguf.metadata.get(f"{ARCHITECTURE}.rope.dimension_sections")
    if isinstance(sections, tuple) and len(sections) == 3:
        raise GgufError(
            f"{gguf.name}: expected 4 entries of rope.dimension_sections, got 3; this is Ollama's dialect,"
            " which llama.cpp does not load"
        )
    section = config.mrope_section
    if section is not None and isinstance(sections, tuple) and tuple(sections[: len(section)]) != section:
        raise GgufError(
            f"{gguf.name}: expected rope.dimension_sections {list(section)} as config.json has, got {list(sections)}"
        )
    interval = gguf.metadata.get(f"{ARCHITECTURE}.full_attention_interval")
    if type(interval) is int and interval > 0:
        kinds = [(layer + 1) % interval == 0 for layer in range(config.num_hidden_layers)]
        if kinds != [kind == FULL for kind in config.layer_types]:
            raise GgufError(
                f"{gguf.name}: expected the layer_types of config.json, got a full_attention_interval of {interval},"
                " which gives others"
            )


def _number_or_layers(gguf: GgufFile, key: str, config: ModelConfig) -> float:
    """Return a size; where the file has one for each layer, that of the full-attention layers."""
    value = gguf.metadata.get(f"{ARCHITECTURE}.{key}")
    if isinstance(value, tuple) and len(value) >= config.num_hidden_layers:
        of_full = {value[layer] for layer, kind in enumerate(config.layer_types) if kind == FULL}
        if len(of_full) == 1:
            return float(of_full.pop())
    return float(_number(gguf, key))


def _verify_tensors(gguf: GgufFile, config: ModelConfig, names: dict[str, GgufTensor]) -> None:
    for name, shape in required_tensors(config):
        tensor = names.get(name)
        if tensor is None:
            dialect = name.endswith("ssm_dt.bias") and name.removesuffix(".bias") in names
            hint = " but one without .bias, as in Ollama's dialect, which llama.cpp does not load" if dialect else ""
            raise GgufError(f"{gguf.name}: expected the tensor {name}, got none{hint}")
        if tensor.shape != shape:
            raise GgufError(
                f"{gguf.name}: expected {name} of shape {list(shape)} by config.json, got {list(tensor.shape)}"
            )


def _extra_notes(gguf: GgufFile, config: ModelConfig) -> Iterator[str]:
    required = {name for name, _ in required_tensors(config)}
    parts: Counter[str] = Counter()
    for tensor in gguf.tensors:
        if tensor.name in required:
            continue
        block = _TRUNK.fullmatch(tensor.name)
        if (block and int(block.group(1)) >= config.num_hidden_layers) or tensor.name.startswith("mtp."):
            parts["MTP"] += 1
        elif tensor.name.startswith(("v.", "mm.")):
            parts["vision"] += 1
        elif tensor.name == "output.weight":
            yield f"{gguf.name}: holds output.weight although config.json ties the embeddings"
        else:
            raise GgufError(f"{gguf.name}: expected only tensors of the text model, vision or MTP, got {tensor.name}")
    for part, count in sorted(parts.items()):
        yield f"{gguf.name}: {count} {part} tensors take no part"


def _type_notes(gguf: GgufFile) -> Iterator[str]:
    matrices = [t for t in gguf.tensors if len(t.shape) == 2 and ".ssm_conv1d" not in t.name and t.type != "F32"]
    types = Counter(tensor.type for tensor in matrices)
    kind = gguf.metadata.get("general.file_type")
    if not isinstance(kind, int) or kind not in _FILE_TYPES:
        yield f"{gguf.name}: general.file_type is {kind!r}, which names no type known here"
        return
    label, main = _FILE_TYPES[kind]
    listed = ", ".join(f"{count} {name}" for name, count in types.most_common())
    if matrices and main != "F32" and types.most_common(1)[0][0] != main:
        yield f"{gguf.name}: says it is {label}, its matrices are {listed}"
    elif main == "F32" and matrices:
        yield f"{gguf.name}: says it is F32, its matrices are {listed}"
    named = re.search(r"(?i)(?<![A-Z0-9])(BF16|F16|F32|I?Q\d(?:_[A-Z0-9]+)*)(?![A-Z0-9_])", gguf.name)
    if named and named.group(1).upper() != label:
        yield f"{gguf.name}: its name says {named.group(1).upper()}, general.file_type says {label}"
