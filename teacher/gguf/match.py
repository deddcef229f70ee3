"""Is this GGUF of this model? Sizes, tensors and vocabulary, before anything is run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from reprlib import repr as short
from typing import Any

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType

from receipts.errors import GgufError
from teacher.gguf.file import GgufFile, GgufTensor
from teacher.snapshot.config import FULL, ModelConfig

ARCHITECTURE = "qwen35"
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)", re.ASCII)
_TYPE_IN_NAME = re.compile(
    r"(?i)(?<![A-Z0-9])((?:BF|F|MXFP|NVFP)\d+|TQ\d_\d|I?Q\d(?:_[A-Z0-9]+)*)(?![A-Z0-9])", re.ASCII
)
CONSTANTS = ("attention.layer_norm_rms_epsilon", "rope.dimension_count", "rope.freq_base")
_DEFAULT_INTERVAL = 4  # what llama.cpp takes where the file has no full_attention_interval
_OTHER_KEYS = (
    "block_count", "context_length", "full_attention_interval", "nextn_predict_layers", "rope.dimension_sections",
    "vocab_size", "expert_count", "rope.scaling.type", "rope.scaling.factor", "attention.recurrent_layers",
)  # fmt: skip


def verify_matches(gguf: GgufFile, config: ModelConfig) -> tuple[str, ...]:
    """Check that a GGUF says it is the config's model.

    Returns:
        What is odd but prevents nothing: tensors of other parts, keys unknown here, types other than the file says.

    Raises:
        GgufError: names what differs, with both values.
    """
    names = {tensor.name: tensor for tensor in gguf.tensors}
    _verify_architecture(gguf)
    _verify_dialect(gguf, names)
    _verify_layers(gguf, config, names)
    _verify_sizes(gguf, config)
    _verify_constants(gguf)
    _verify_vocabulary(gguf, config)
    required = dict(required_tensors(config))
    _verify_tensors(gguf, required, names)
    return (*_extra_notes(gguf, config, required), *_type_notes(gguf, required))


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


def _key(gguf: GgufFile, key: str, default: Any = None) -> Any:
    return gguf.metadata.get(f"{ARCHITECTURE}.{key}", default)


def _verify_architecture(gguf: GgufFile) -> None:
    found = gguf.metadata.get("general.architecture")
    experts = _key(gguf, "expert_count", 0)
    if found == ARCHITECTURE and not experts:
        return
    got = short(found) if found != ARCHITECTURE else f"it with expert_count {short(experts)}"
    hint = " (a mixture of experts; dense models only)" if "moe" in str(found) or experts else ""
    raise GgufError(f"{gguf.name}: expected general.architecture {ARCHITECTURE}, got {got}{hint}")


def _verify_dialect(gguf: GgufFile, names: Mapping[str, GgufTensor]) -> None:
    """Refuse what Ollama writes and llama.cpp does not load, before it looks like a broken file."""
    sections = _key(gguf, "rope.dimension_sections")
    bare = next((name for name in names if name.endswith(".ssm_dt") and f"{name}.bias" not in names), None)
    if isinstance(sections, tuple) and len(sections) == 3:
        what = "4 entries of rope.dimension_sections, got 3"
    elif bare:
        what = f"the tensor {bare}.bias, got {bare}, one without .bias"
    else:
        return
    raise GgufError(f"{gguf.name}: expected {what}; this is Ollama's dialect, which llama.cpp does not load")


def _verify_layers(gguf: GgufFile, config: ModelConfig, names: Mapping[str, GgufTensor]) -> None:
    """Hold the count and the kinds of the layers against the config; MTP blocks stand behind them and are none."""
    blocks, extra = _count(gguf, "block_count"), _count(gguf, "nextn_predict_layers", 0)
    trunk, layers = blocks - extra, config.num_hidden_layers
    held = {int(found[1]) for found in map(_BLOCK.fullmatch, names) if found and found[2].startswith("nextn.")}
    absent = next((block for block in range(max(trunk, 0), blocks) if block not in held), None)
    if absent is not None:
        raise GgufError(
            f"{gguf.name}: expected MTP tensors in blk.{absent}, by nextn_predict_layers {extra}, got none"
            " (declared MTP block absent)"
        )
    if trunk != layers:
        undeclared = f"; blk.{max(held)} holds an MTP block that no nextn_predict_layers declares" if held else ""
        raise GgufError(
            f"{gguf.name}: expected {layers} layers as config.json has, got {trunk} (block_count less MTP blocks)"
            f"{undeclared if not extra else ''}"
        )
    interval = _key(gguf, "full_attention_interval", _DEFAULT_INTERVAL)
    linear = _key(gguf, "attention.recurrent_layers")
    if linear is not None:
        what = f"attention.recurrent_layers {short(linear)}"
        kinds = [not flag for flag in linear[:layers]] if isinstance(linear, tuple) else [not linear] * layers
    elif type(interval) is int and interval > 0:
        what = f"a full_attention_interval of {interval}"
        kinds = [(layer + 1) % interval == 0 for layer in range(layers)]
    else:
        raise GgufError(f"{gguf.name}: expected full_attention_interval as a count above 0, got {short(interval)}")
    if kinds != [kind == FULL for kind in config.layer_types]:
        missing = f" ({_DEFAULT_INTERVAL} where there is no such key)" if interval == _DEFAULT_INTERVAL else ""
        raise GgufError(
            f"{gguf.name}: expected the layer_types of config.json, got {what}{missing}, which gives others"
        )


def _count(gguf: GgufFile, key: str, default: int | None = None) -> int:
    value = _key(gguf, key, default)
    if type(value) is not int:
        raise _no_number(gguf, key, value)
    return int(value)


def _no_number(gguf: GgufFile, key: str, value: Any) -> GgufError:
    what = "no such key" if value is None else short(value)
    return GgufError(f"{gguf.name}: expected a number for {ARCHITECTURE}.{key}, got {what}")


def _sizes(config: ModelConfig) -> dict[str, int]:
    """Return what the config wants for each size key."""
    return {
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
    }


def _verify_sizes(gguf: GgufFile, config: ModelConfig) -> None:
    full = [layer for layer, kind in enumerate(config.layer_types) if kind == FULL]
    for key, want in _sizes(config).items():
        got = _key(gguf, key)
        if isinstance(got, tuple) and len(got) >= len(config.layer_types):
            # One number for each layer: heads of full attention are 0 in the linear layers of some files.
            of_full = {got[layer] for layer in full}
            got = of_full.pop() if len(of_full) == 1 else got
        if type(got) is not int:
            raise _no_number(gguf, key, got)
        if got != want:
            raise GgufError(
                f"{gguf.name}: expected {ARCHITECTURE}.{key} {want} as config.json has, got {got}; this is another"
                " model"
            )


def _verify_constants(gguf: GgufFile) -> None:
    """Refuse a file without the constants that the engine cannot do without; `audit.metadata` judges their values."""
    for key in CONSTANTS:
        if type(_key(gguf, key)) not in (int, float):
            raise _no_number(gguf, key, _key(gguf, key))
    sections = _key(gguf, "rope.dimension_sections")
    if not isinstance(sections, tuple) or len(sections) != 4:
        got = "no such key" if sections is None else short(sections)
        raise GgufError(f"{gguf.name}: expected 4 numbers for {ARCHITECTURE}.rope.dimension_sections, got {got}")


def _verify_vocabulary(gguf: GgufFile, config: ModelConfig) -> None:
    tokens = gguf.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, tuple) or not all(isinstance(token, str) for token in tokens):
        got = "no such key" if tokens is None else short(tokens)
        raise GgufError(f"{gguf.name}: expected the vocabulary, texts in tokenizer.ggml.tokens, got {got}")
    for what, rows in ("tokens", len(tokens)), ("as vocab_size", _key(gguf, "vocab_size", config.vocab_size)):
        if rows != config.vocab_size:
            raise GgufError(
                f"{gguf.name}: expected a vocabulary of {config.vocab_size} rows as config.json has, got {short(rows)}"
                f" {what}"
            )
    for key in ("token_type", "scores"):  # the engine reads one for each token, whatever their count
        listed = gguf.metadata.get(f"tokenizer.ggml.{key}")
        if listed is not None and not (isinstance(listed, tuple) and len(listed) == len(tokens)):
            got = str(len(listed)) if isinstance(listed, tuple) else short(listed)
            raise GgufError(
                f"{gguf.name}: expected {len(tokens)} entries of tokenizer.ggml.{key}, one for each token of the"
                f" vocabulary, got {got}"
            )


def _verify_tensors(gguf: GgufFile, required: Mapping[str, tuple[int, ...]], names: Mapping[str, GgufTensor]) -> None:
    for name, shape in required.items():
        tensor = names.get(name)
        if tensor is None:
            raise GgufError(f"{gguf.name}: expected the tensor {name}, got none")
        if tensor.shape != shape:
            raise GgufError(
                f"{gguf.name}: expected {name} of shape {list(shape)} by config.json, got {list(tensor.shape)}"
            )


def _extra_notes(gguf: GgufFile, config: ModelConfig, required: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    parts: dict[str, list[str]] = {"MTP": [], "vision": [], "unknown": []}
    for tensor in gguf.tensors:
        block = _BLOCK.fullmatch(tensor.name)
        if tensor.name in required:
            continue
        if tensor.name == "output.weight":
            yield f"{gguf.name}: holds output.weight although config.json ties the embeddings"
        elif (block and int(block[1]) >= config.num_hidden_layers) or tensor.name.startswith("mtp."):
            parts["MTP"].append(tensor.name)
        elif tensor.name.startswith(("v.", "mm.")):
            parts["vision"].append(tensor.name)
        else:
            parts["unknown"].append(tensor.name)
    for part, found in parts.items():
        if found:
            effect = "which the engine may use" if part == "unknown" else "which take no part"
            more = ", .." if len(found) > 3 else ""
            yield f"{gguf.name}: {len(found)} {part} tensors, {effect}: {', '.join(found[:3])}{more}"
    known = {f"{ARCHITECTURE}.{key}" for key in (*_sizes(config), *CONSTANTS, *_OTHER_KEYS)}
    keys = sorted(key for key in gguf.metadata if key.startswith(f"{ARCHITECTURE}.") and key not in known)
    if keys:
        yield f"{gguf.name}: {len(keys)} keys unknown here, which the engine may use: {', '.join(keys[:5])}"


def _type_notes(gguf: GgufFile, required: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    label = file_label(gguf)
    if label is None:
        kind = gguf.metadata.get("general.file_type")
        yield f"{gguf.name}: general.file_type is {short(kind)}, which names no type known here"
        return
    # The convolution is F32 in every file.
    matrices = {name for name, shape in required.items() if len(shape) == 2 and ".ssm_conv1d" not in name}
    types = Counter(tensor.type for tensor in gguf.tensors if tensor.name in matrices)
    odd = _odd_types(label, types)
    if odd:
        listed = ", ".join(f"{types[name]} of {len(matrices)} matrices are {name}" for name in odd)
        yield f"{gguf.name}: says it is {label}, {listed}"
    named = [text.upper() for text in _TYPE_IN_NAME.findall(gguf.name)]
    if named and not any(text.startswith(label) or label.startswith(text) for text in named):
        yield f"{gguf.name}: its name says {named[-1]}, general.file_type says {label}"


def file_label(gguf: GgufFile) -> str | None:
    """Return what general.file_type says the file is, such as "Q4_K_M"; None where it says nothing known."""
    kind = gguf.metadata.get("general.file_type")
    try:
        return LlamaFileType(kind if type(kind) is int else -1).name.removeprefix("MOSTLY_").removeprefix("ALL_")
    except ValueError:
        return None


def type_family(label: str) -> str:
    """Return what the names of a label's own element types begin with: "Q4_K" of "Q4_K_M"."""
    found = re.match(r"IQ\d|T?Q\d_[K\d]|[A-Z]+\d+", label)
    return found.group() if found else label


def bits_of_types() -> dict[str, float]:
    """Return the bits that a value takes, by element type."""
    return {kind.name: 8 * GGML_QUANT_SIZES[kind][1] / GGML_QUANT_SIZES[kind][0] for kind in GGMLQuantizationType}


def _odd_types(label: str, types: Counter[str]) -> list[str]:
    """Return types that a file of this label does not have: all others where most are, else those coarser than it."""
    family, bits = type_family(label), bits_of_types()
    least = min((bits[name] for name in bits if name.startswith(family)), default=0)
    others = [name for name, _ in types.most_common() if not name.startswith(family)]
    if types and types.most_common(1)[0][0] in others:
        return others
    return [name for name in others if bits[name] < least]
