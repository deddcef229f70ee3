"""The sizes of a dense Qwen3.5 text model, from config.json as it is written.

The raw file is read and never a library's idea of it: a class default in the place of a value has broken
conversions before. A key nobody here knows is reported; a key that would change the math is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from receipts.cache_plan import CacheSizes
from receipts.errors import SnapshotError
from teacher.json_file import read_object

FULL, LINEAR = "full_attention", "linear_attention"
_WRAPPED, _TEXT = "qwen3_5", "qwen3_5_text"
_COUNTS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
    "linear_value_head_dim", "linear_conv_kernel_dim", "max_position_embeddings",
)  # fmt: skip
_RATIOS = (
    ("num_attention_heads", "num_key_value_heads"),
    ("linear_num_value_heads", "linear_num_key_heads"),
)
# Values under which the teacher's math is the model's; any other value is another model.
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "attn_output_gate": (True,),
    "hidden_act": ("silu",),
    "mamba_ssm_dtype": ("float32",),
    "mlp_only_layers": ([], None),
    "output_gate_type": ("swish", "silu"),
    "rope_scaling": (None,),
    "sliding_window": (None,),
    "use_sliding_window": (False,),
    "quantization_config": (None,),
}
_NO_MATH = {
    "architectures", "attention_dropout", "bos_token_id", "dtype", "torch_dtype", "eos_token_id", "pad_token_id",
    "full_attention_interval", "initializer_range", "layer_types", "model_type", "mtp_num_hidden_layers",
    "mtp_use_dedicated_embeddings", "partial_rotary_factor", "rms_norm_eps", "rope_parameters", "rope_theta",
    "tie_word_embeddings", "transformers_version", "use_cache",
}  # fmt: skip
_WRAPPER_KEYS = {
    "architectures", "image_token_id", "language_model_only", "model_type", "text_config", "tie_word_embeddings",
    "transformers_version", "video_token_id", "vision_config", "vision_end_token_id", "vision_start_token_id",
    "dtype", "torch_dtype",
}  # fmt: skip
_ROPE_KEYS = {"mrope_interleaved", "mrope_section", "partial_rotary_factor", "rope_theta", "rope_type", "type"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes of the text model, spelled as in config.json.

    Attributes:
        layer_types: "full_attention" or "linear_attention" of each layer.
        rotary_dim: leading entries of a head that are rotated; head_dim times partial_rotary_factor.
        rope_theta: base of the rotary frequencies.
        mrope_section: how the rotary pairs are shared between time, height and width; text gives all three the same
            position, so it does not enter the text model.
        tie_word_embeddings: whether the output head is the embedding table.
        mtp_num_hidden_layers: layers of the multi-token-prediction block, which is no part of the text model.
        warnings: what was odd but harmless, unknown keys among it.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    layer_types: tuple[str, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    mrope_section: tuple[int, ...] | None
    rms_norm_eps: float
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    mtp_num_hidden_layers: int
    warnings: tuple[str, ...]

    def cache_sizes(self) -> CacheSizes:
        """Return the sizes the cache depends on."""
        shared = {name: getattr(self, name) for name in CacheSizes.__slots__ if name != "dense"}
        return CacheSizes(**shared, dense=True)


def read_config(path: Path) -> ModelConfig:
    """Read and check config.json.

    Raises:
        SnapshotError: a field is missing, of a wrong type, contradicts another, or changes the math; names the field.
    """
    return parse_config(read_object(path), path.name)


def parse_config(form: Mapping[str, Any], name: str = "config.json") -> ModelConfig:
    """Check the object in config.json; see `read_config`."""
    text, place = _text_config(form, name)
    counts = {key: _count(text, key, place) for key in _COUNTS}
    _verify_fixed(text, place)
    if form is not text:
        _verify_fixed({key: form[key] for key in ("quantization_config",) if key in form}, name)
    rope_theta, factor, section = _rope(text, place)
    config = ModelConfig(
        **counts,
        layer_types=_layer_types(text, counts["num_hidden_layers"], place),
        rotary_dim=_rotary_dim(counts["head_dim"], factor, section, place),
        rope_theta=rope_theta,
        mrope_section=section,
        rms_norm_eps=_number(text, "rms_norm_eps", place),
        tie_word_embeddings=_tied(form, text, name),
        mtp_num_hidden_layers=_optional_count(text, "mtp_num_hidden_layers", place),
        warnings=tuple(_warnings(form, text, name, place)),
    )
    for many, few in _RATIOS:
        if counts[many] % counts[few]:
            raise SnapshotError(
                f"{place}: expected {many} to be a multiple of {few}, got {counts[many]} and {counts[few]}"
            )
    return config


def _text_config(form: Mapping[str, Any], name: str) -> tuple[Mapping[str, Any], str]:
    kind = form.get("model_type")
    if kind == _WRAPPED and isinstance(form.get("text_config"), dict):
        text: Mapping[str, Any] = form["text_config"]
        place = f"{name} text_config"
    elif kind == _TEXT:
        text, place = form, name
    else:
        experts = " (a mixture of experts has no plan here; dense models only)" if "moe" in str(kind) else ""
        raise SnapshotError(f"{name}: expected model_type {_WRAPPED} or {_TEXT}, got {kind!r}{experts}")
    if text.get("model_type", _TEXT) != _TEXT:
        raise SnapshotError(f"{place}: expected model_type {_TEXT}, got {text['model_type']!r}")
    experts_keys = sorted(key for key in text if "expert" in key and text[key])
    if experts_keys:
        raise SnapshotError(
            f"{place}: expected a dense feed-forward in every layer, got the mixture-of-experts key {experts_keys[0]!r}"
        )
    return text, place


def _verify_fixed(text: Mapping[str, Any], place: str) -> None:
    for key, allowed in _FIXED.items():
        if key in text and text[key] not in allowed:
            hint = " (the source is not BF16)" if key == "quantization_config" else ""
            raise SnapshotError(f"{place}: expected {key} to be {allowed[0]!r}, got {text[key]!r}{hint}")


def _missing(key: str, place: str) -> SnapshotError:
    return SnapshotError(f"{place}: expected the field {key}, got none")


def _count(text: Mapping[str, Any], key: str, place: str) -> int:
    if key not in text:
        raise _missing(key, place)
    value = text[key]
    if type(value) is not int or not 0 < value < 2**31:
        raise SnapshotError(f"{place}: expected {key} to be a whole number from 1 to 2^31 - 1, got {value!r}")
    return value


def _optional_count(text: Mapping[str, Any], key: str, place: str) -> int:
    return _count(text, key, place) if text.get(key) else 0


def _number(form: Mapping[str, Any], key: str, place: str) -> float:
    if key not in form:
        raise _missing(key, place)
    value = form[key]
    if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
        raise SnapshotError(f"{place}: expected {key} to be a number above 0, got {value!r}")
    return float(value)


def _layer_types(text: Mapping[str, Any], layers: int, place: str) -> tuple[str, ...]:
    if "layer_types" not in text:
        raise _missing("layer_types", place)
    kinds = text["layer_types"]
    if not isinstance(kinds, list) or len(kinds) != layers:
        got = len(kinds) if isinstance(kinds, list) else repr(kinds)
        raise SnapshotError(f"{place}: expected {layers} layer_types (num_hidden_layers), got {got}")
    for index, kind in enumerate(kinds):
        if kind not in (FULL, LINEAR):
            raise SnapshotError(f"{place}: expected layer_types[{index}] to be {FULL} or {LINEAR}, got {kind!r}")
    return tuple(kinds)


def _rope(text: Mapping[str, Any], place: str) -> tuple[float, float, tuple[int, ...] | None]:
    rope = text.get("rope_parameters", {})
    if not isinstance(rope, dict):
        raise SnapshotError(f"{place}: expected rope_parameters to be an object, got {type(rope).__name__}")
    both = {}
    for key in ("rope_theta", "partial_rotary_factor"):
        values = {_number(form, key, place) for form in (rope, text) if key in form}
        if len(values) > 1:
            raise SnapshotError(f"{place}: expected one {key}, got {sorted(values)} in the file and in rope_parameters")
        if not values:
            raise _missing(key, f"{place} rope_parameters")
        both[key] = values.pop()
    if not both["partial_rotary_factor"] <= 1:
        raise SnapshotError(
            f"{place}: expected partial_rotary_factor to be at most 1, got {both['partial_rotary_factor']}"
        )
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise SnapshotError(f"{place}: expected rope_type 'default', got {kind!r}")
    section = rope.get("mrope_section")
    if section is not None and not (isinstance(section, list) and all(type(n) is int and n >= 0 for n in section)):
        raise SnapshotError(f"{place}: expected mrope_section to be whole numbers, got {section!r}")
    return both["rope_theta"], both["partial_rotary_factor"], None if section is None else tuple(section)


def _rotary_dim(head_dim: int, factor: float, section: tuple[int, ...] | None, place: str) -> int:
    rotary_dim = int(head_dim * factor)
    if rotary_dim < 2 or rotary_dim % 2:
        raise SnapshotError(
            f"{place}: expected an even number of rotated entries, got head_dim {head_dim} x {factor} = {rotary_dim}"
        )
    if section is not None and sum(section) != rotary_dim // 2:
        raise SnapshotError(
            f"{place}: expected mrope_section to sum to {rotary_dim // 2} rotary pairs, got {list(section)}"
        )
    return rotary_dim


def _tied(form: Mapping[str, Any], text: Mapping[str, Any], name: str) -> bool:
    key = "tie_word_embeddings"
    values = [part[key] for part in (text, form) if key in part]
    if not values:
        raise _missing(key, name)
    if any(type(value) is not bool for value in values) or len(set(values)) > 1:
        raise SnapshotError(f"{name}: expected one true or false for {key}, got {values}")
    return bool(values[0])


def _warnings(form: Mapping[str, Any], text: Mapping[str, Any], name: str, place: str) -> list[str]:
    known = set(_COUNTS) | set(_FIXED) | _NO_MATH
    found = [f"{place}: unknown key {key!r} = {text[key]!r}" for key in sorted(set(text) - known - _outer(form, text))]
    if form is not text:
        extra = sorted(set(form) - _WRAPPER_KEYS - {"quantization_config"})
        found += [f"{name}: unknown key {key!r} = {form[key]!r}" for key in extra]
    rope = text.get("rope_parameters", {})
    found += [f"{place} rope_parameters: unknown key {key!r} = {rope[key]!r}" for key in sorted(set(rope) - _ROPE_KEYS)]
    for part, where in ((text, place), (form, name)):
        dtype = part.get("dtype", part.get("torch_dtype", "bfloat16"))
        if dtype != "bfloat16":
            found.append(f"{where}: dtype is {dtype!r} and not 'bfloat16'; the tensors themselves decide")
        if form is text:
            break
    interval = text.get("full_attention_interval")
    if type(interval) is int and interval > 0:
        derived = [FULL if (i + 1) % interval == 0 else LINEAR for i in range(len(text["layer_types"]))]
        if derived != text["layer_types"]:
            found.append(f"{place}: full_attention_interval {interval} does not give layer_types, which are followed")
    return found


def _outer(form: Mapping[str, Any], text: Mapping[str, Any]) -> set[str]:
    return _WRAPPER_KEYS if form is text else set()
