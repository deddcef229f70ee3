import copy
import json

import pytest

from receipts.errors import SnapshotError
from teacher.snapshot.config import parse_config, read_config


@pytest.fixture
def form(tiny):
    return json.loads((tiny / "config.json").read_text())


def test_sizes_are_read_as_they_are_written(form):
    config = parse_config(form)
    text = form["text_config"]
    assert config.hidden_size == text["hidden_size"]
    assert config.rotary_dim == text["head_dim"] * text["rope_parameters"]["partial_rotary_factor"]
    assert list(config.layer_types) == text["layer_types"]
    assert config.tie_word_embeddings is False
    assert config.cache_sizes().linear_value_head_dim == text["linear_value_head_dim"]


def test_a_plain_text_config_reads_the_same(form):
    assert parse_config(form["text_config"]) == parse_config(form)


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("layer_types", ["linear_attention"], r"expected 4 layer_types \(num_hidden_layers\), got 1"),
        ("layer_types", ["linear_attention", "full", "x", "y"], r"layer_types\[1\]"),
        ("linear_num_value_heads", 5, r"linear_num_value_heads to be a multiple of linear_num_key_heads, got 5 and 2"),
        ("num_attention_heads", 3, r"num_attention_heads to be a multiple"),
        ("hidden_size", "96", r"hidden_size to be a whole number"),
        ("hidden_size", True, r"hidden_size to be a whole number"),
        ("hidden_size", 0, r"hidden_size to be a whole number"),
        ("head_dim", None, r"head_dim to be a whole number"),
        ("rms_norm_eps", 0, r"rms_norm_eps to be a number above 0"),
        ("hidden_act", "gelu", r"hidden_act to be 'silu', got 'gelu'"),
        ("attn_output_gate", False, r"attn_output_gate to be True"),
        ("attention_bias", True, r"attention_bias to be False"),
        ("sliding_window", 128, r"sliding_window to be None"),
        ("num_experts", 64, r"mixture-of-experts key 'num_experts'"),
        ("quantization_config", {"quant_method": "fp8"}, r"the source is not BF16"),
        ("model_type", "qwen3_5_moe_text", r"expected model_type qwen3_5_text"),
        ("partial_rotary_factor", 0.5, r"one partial_rotary_factor, got \[0.25, 0.5\]"),
        ("tie_word_embeddings", True, r"one true or false for tie_word_embeddings"),
    ],
)
def test_contradictions_and_changed_math_are_refused_by_name(form, key, value, sentence):
    form["text_config"][key] = value
    with pytest.raises(SnapshotError, match=sentence):
        parse_config(form)


@pytest.mark.parametrize(
    "key", ["vocab_size", "layer_types", "linear_num_value_heads", "rms_norm_eps", "head_dim", "intermediate_size"]
)
def test_a_missing_field_is_never_filled_with_a_default(form, key):
    del form["text_config"][key]
    with pytest.raises(SnapshotError, match=f"expected the field {key}, got none"):
        parse_config(form)


def test_a_missing_rope_theta_is_named(form):
    del form["text_config"]["rope_parameters"]["rope_theta"]
    with pytest.raises(SnapshotError, match="expected the field rope_theta"):
        parse_config(form)


def test_another_rope_is_refused(form):
    form["text_config"]["rope_parameters"]["rope_type"] = "yarn"
    with pytest.raises(SnapshotError, match="rope_type 'default', got 'yarn'"):
        parse_config(form)


def test_mrope_sections_must_cover_the_rotary_pairs(form):
    form["text_config"]["rope_parameters"]["mrope_section"] = [1, 1, 1]
    with pytest.raises(SnapshotError, match="mrope_section to sum to 4"):
        parse_config(form)


def test_a_mixture_of_experts_is_refused_by_its_model_type():
    with pytest.raises(SnapshotError, match="mixture of experts"):
        parse_config({"model_type": "qwen3_5_moe", "text_config": {}})


def test_unknown_keys_are_reported_wherever_they_stand(form):
    before = parse_config(form).warnings
    changed = copy.deepcopy(form)
    changed["text_config"]["hiden_size"] = 4
    changed["text_config"]["rope_parameters"]["scale"] = 2
    changed["extra"] = 1
    found = set(parse_config(changed).warnings) - set(before)
    assert len(found) == 3
    assert any("text_config: unknown key 'hiden_size' = 4" in warning for warning in found)


def test_layer_types_win_over_the_interval_and_the_reader_is_told(form):
    form["text_config"]["layer_types"] = ["full_attention", "linear_attention"] * 2
    config = parse_config(form)
    assert config.layer_types[0] == "full_attention"
    assert any("full_attention_interval" in warning for warning in config.warnings)


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b'{"a": 1, "a": 2}', b"\xff", b"[" * 100_000])
def test_what_is_no_config_is_one_sentence(tmp_path, data):
    (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(SnapshotError, match=r"config\.json"):
        read_config(tmp_path / "config.json")
