import json

import numpy as np
import pytest
from support.gguf_tools import edit_gguf, tensor_of

from receipts.errors import GgufError
from teacher.config import parse_config, read_config
from teacher.gguf_file import read_gguf
from teacher.gguf_match import verify_matches


@pytest.fixture
def edited(tiny, tiny_gguf, tmp_path):
    """Check the tiny GGUF after an edit, against the tiny config."""

    def check(name="edited-F32.gguf", **changes):
        return verify_matches(
            read_gguf(edit_gguf(tiny_gguf, tmp_path / name, **changes)), read_config(tiny / "config.json")
        )

    return check


def test_the_models_own_file_matches_without_a_note(edited):
    assert edited() == ()


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("general.architecture", "qwen3", r"general.architecture qwen35, got 'qwen3'"),
        ("general.architecture", "qwen35moe", r"mixture of experts"),
        ("qwen35.block_count", None, r"a number for qwen35.block_count, got no such key"),
        ("qwen35.attention.layer_norm_rms_epsilon", None, r"layer_norm_rms_epsilon, got no such key"),
        ("qwen35.block_count", 3, r"expected 4 layers as config.json has, got 3"),
        ("qwen35.embedding_length", 128, r"embedding_length 96 as config.json has, got 128; this is another model"),
        ("qwen35.rope.dimension_count", 32, r"rope.dimension_count 8 as config.json has, got 32"),
        ("qwen35.rope.freq_base", 10000.0, r"rope.freq_base"),
        ("qwen35.attention.head_count_kv", 4, r"head_count_kv 2 as config.json has, got 4"),
        ("qwen35.ssm.time_step_rank", 2, r"ssm.time_step_rank 6"),
        ("qwen35.full_attention_interval", 4, r"full_attention_interval of 4"),
        ("qwen35.rope.dimension_sections", [2, 1, 1], r"Ollama's dialect"),
        ("qwen35.rope.dimension_sections", [1, 1, 2, 0], r"rope.dimension_sections \[.*\] as config.json has"),
        ("qwen35.nextn_predict_layers", 1, r"declared MTP block absent"),
    ],
)
def test_a_file_of_another_model_is_refused_by_what_differs(edited, key, value, sentence):
    with pytest.raises(GgufError, match=sentence):
        edited(metadata={key: value})


def test_an_mtp_block_is_not_a_layer(edited, tiny_gguf):
    notes = edited(
        metadata={"qwen35.block_count": 5, "qwen35.nextn_predict_layers": 1},
        tensors={"blk.4.nextn.eh_proj.weight": np.ones((4, 4)), "v.blk.0.attn.weight": np.ones((2, 2))},
    )
    assert [note.split(": ")[1] for note in notes] == [
        "1 MTP tensors take no part", "1 vision tensors take no part"
    ]  # fmt: skip


def test_a_missing_a_reshaped_and_a_strange_tensor_are_named(edited, tiny_gguf):
    with pytest.raises(GgufError, match=r"expected the tensor blk\.2\.ssm_a, got none"):
        edited(drop=("blk.2.ssm_a",))
    conv = tensor_of(tiny_gguf, "blk.0.ssm_conv1d.weight")
    with pytest.raises(GgufError, match=r"blk\.0\.ssm_conv1d\.weight of shape \[160, 4\] by config\.json, got \[4, 160\]"):
        edited(tensors={"blk.0.ssm_conv1d.weight": conv.T})
    with pytest.raises(GgufError, match=r"got blk\.1\.lora_a"):
        edited(tensors={"blk.1.lora_a": np.ones((2, 2))})


def test_ollamas_name_of_the_time_step_bias_is_named_as_its_dialect(edited):
    with pytest.raises(GgufError, match=r"blk\.0\.ssm_dt\.bias, got none but one without \.bias, as in Ollama's dialect"):
        edited(rename={"blk.0.ssm_dt.bias": "blk.0.ssm_dt"})


@pytest.mark.parametrize("change", [-1, 1])
def test_another_vocabulary_is_refused_with_both_sizes(tiny, tiny_gguf, tmp_path, change):
    tokens = list(read_gguf(tiny_gguf).metadata["tokenizer.ggml.tokens"])
    more = [*tokens, "extra"] if change > 0 else tokens[:-1]
    path = edit_gguf(tiny_gguf, tmp_path / "v.gguf", metadata={"tokenizer.ggml.tokens": more})
    with pytest.raises(GgufError, match=f"vocabulary of {len(tokens)} rows .*, got {len(more)} tokens"):
        verify_matches(read_gguf(path), read_config(tiny / "config.json"))


def test_a_file_that_says_one_type_and_holds_another_is_noted(golden, tmp_path):
    source = golden / "gguf" / "qwen35-tiny-Q4_K_M.gguf"
    config = read_config(golden / "qwen35-tiny" / "config.json")
    assert verify_matches(read_gguf(source), config) == ()
    wrong = edit_gguf(source, tmp_path / "m-Q8_0.gguf", metadata={"general.file_type": 7})
    assert "says it is Q8_0, its matrices are" in verify_matches(read_gguf(wrong), config)[0]
    named = edit_gguf(source, tmp_path / "m-Q6_K.gguf")
    assert verify_matches(read_gguf(named), config) == ("m-Q6_K.gguf: its name says Q6_K, general.file_type says Q4_K_M",)


def test_a_config_that_disagrees_with_the_file_is_named(tiny, tiny_gguf):
    form = json.loads((tiny / "config.json").read_text())
    form["text_config"]["intermediate_size"] = 200
    with pytest.raises(GgufError, match=r"feed_forward_length 200 as config.json has, got 160"):
        verify_matches(read_gguf(tiny_gguf), parse_config(form))
