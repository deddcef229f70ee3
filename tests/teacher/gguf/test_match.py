import dataclasses
import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from receipts.errors import GgufError
from support.gguf_tools import edit_gguf, tensor_of
from teacher.gguf.file import read_gguf
from teacher.gguf.match import verify_matches
from teacher.snapshot.config import parse_config, read_config


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
        ("qwen35.attention.head_count_kv", 4, r"head_count_kv 2 as config.json has, got 4"),
        ("qwen35.ssm.time_step_rank", 2, r"ssm.time_step_rank 6"),
        ("qwen35.full_attention_interval", 4, r"full_attention_interval of 4"),
        ("qwen35.full_attention_interval", 0, r"full_attention_interval as a count above 0, got 0"),
        ("qwen35.full_attention_interval", None, r"full_attention_interval of 4 \(4 where there is no such key\)"),
        ("qwen35.rope.dimension_sections", [2, 1, 1], r"Ollama's dialect"),
        ("qwen35.rope.dimension_sections", None, r"4 numbers for qwen35.rope.dimension_sections, got no such key"),
        ("qwen35.expert_count", 8, r"got it with expert_count 8 \(a mixture of experts"),
        ("qwen35.block_count", 5, r"expected 4 layers as config.json has, got 5 \(block_count less MTP blocks\)$"),
        ("qwen35.vocab_size", 7, r"a vocabulary of \d+ rows as config.json has, got 7 as vocab_size"),
        ("tokenizer.ggml.tokens", None, r"the vocabulary, texts in tokenizer.ggml.tokens, got no such key"),
        ("tokenizer.ggml.token_type", [1, 1], r"expected \d+ entries of tokenizer.ggml.token_type, .* got 2"),
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
        "1 MTP tensors, which take no part", "1 vision tensors, which take no part"
    ]  # fmt: skip


def test_an_mtp_block_that_no_key_declares_is_named(edited):
    with pytest.raises(GgufError, match=r"got 5 .*; blk\.4 holds an MTP block that no nextn_predict_layers declares"):
        edited(
            metadata={"qwen35.block_count": 5},
            tensors={"blk.4.nextn.eh_proj.weight": np.ones((4, 4))},
        )


def test_every_declared_mtp_block_must_be_there(edited):
    with pytest.raises(GgufError, match=r"MTP tensors in blk\.5, .* \(declared MTP block absent\)"):
        edited(
            metadata={"qwen35.block_count": 6, "qwen35.nextn_predict_layers": 2},
            tensors={"blk.4.nextn.eh_proj.weight": np.ones((4, 4))},
        )


def test_tensors_and_keys_unknown_here_are_noted(edited):
    notes = edited(tensors={"blk.1.lora_a": np.ones((2, 2))}, metadata={"qwen35.logit_scale": 2})
    assert [note.split(": ", 1)[1] for note in notes] == [
        "1 unknown tensors, which the engine may use: blk.1.lora_a",
        "1 keys unknown here, which the engine may use: qwen35.logit_scale",
    ]


def test_a_missing_and_a_reshaped_tensor_are_named(edited, tiny_gguf):
    with pytest.raises(GgufError, match=r"expected the tensor blk\.2\.ssm_a, got none"):
        edited(drop=("blk.2.ssm_a",))
    conv = tensor_of(tiny_gguf, "blk.0.ssm_conv1d.weight")
    with pytest.raises(GgufError, match=r"blk\.0\.ssm_conv1d\.weight of shape \[160, 4\] by config.*, got \[4, 160\]"):
        edited(tensors={"blk.0.ssm_conv1d.weight": conv.T})


def test_ollamas_name_of_the_time_step_bias_is_named_as_its_dialect(edited):
    with pytest.raises(GgufError, match=r"blk\.0\.ssm_dt\.bias, got .*, one without \.bias; this is Ollama's dialect"):
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
    (note,) = verify_matches(read_gguf(wrong), config)
    assert re.fullmatch(r"m-Q8_0.gguf: says it is Q8_0, \d+ of 64 matrices are Q4_K, \d+ of 64 matrices are Q6_K", note)
    named = edit_gguf(source, tmp_path / "m-Q6_K.gguf")
    sentence = "m-Q6_K.gguf: its name says Q6_K, general.file_type says Q4_K_M"
    assert verify_matches(read_gguf(named), config) == (sentence,)


def test_a_config_that_disagrees_with_the_file_is_named(tiny, tiny_gguf):
    form = json.loads((tiny / "config.json").read_text())
    form["text_config"]["intermediate_size"] = 200
    with pytest.raises(GgufError, match=r"feed_forward_length 200 as config.json has, got 160"):
        verify_matches(read_gguf(tiny_gguf), parse_config(form))


@pytest.mark.parametrize(
    ("name", "file_type", "types", "notes"),
    [
        ("m.gguf", 15, ["Q4_K"] * 6 + ["Q6_K"], []),
        ("m-Q4_K_M.gguf", 15, ["Q4_K"], []),
        ("m-Q6_K_L.gguf", 18, ["Q6_K"], []),
        ("m.gguf", 15, ["Q8_0"], ["says it is Q4_K_M, N of N matrices are Q8_0"]),
        ("m.gguf", 7, ["F32"], ["says it is Q8_0, N of N matrices are F32"]),
        ("m.gguf", 7, ["Q8_0"] * 31 + ["Q4_0"], ["says it is Q8_0, 1 of N matrices are Q4_0"]),
        ("m.gguf", 27, ["IQ3_S", "IQ3_S", "Q4_K"], []),
        ("m.gguf", 32, ["BF16"], []),
        ("m-f16.gguf", 32, ["BF16"], ["its name says F16, general.file_type says BF16"]),
        ("m-Q4_K_XL.gguf", 15, ["Q4_K"], ["its name says Q4_K_XL, general.file_type says Q4_K_M"]),
        ("Qwen3.5-4B-from-F16-Q8_0.gguf", 7, ["Q8_0"], []),
        ("m.gguf", 999, ["Q8_0"], ["general.file_type is 999, which names no type known here"]),
        ("m.gguf", "Q8_0", ["Q8_0"], ["general.file_type is 'Q8_0', which names no type known here"]),
    ],
)
def test_the_types_of_the_matrices_are_held_against_file_type_and_name(tiny, tiny_gguf, name, file_type, types, notes):
    plain = read_gguf(tiny_gguf)
    matrix = [t.name for t in plain.tensors if len(t.shape) == 2 and "conv1d" not in t.name]
    kinds = {one: types[index % len(types)] for index, one in enumerate(matrix)}
    changed = dataclasses.replace(
        plain,
        name=name,
        metadata={**plain.metadata, "general.file_type": file_type},
        tensors=tuple(dataclasses.replace(t, type=kinds.get(t.name, t.type)) for t in plain.tensors),
    )
    wanted = tuple(f"{name}: {note}".replace("N", str(len(matrix))) for note in notes)
    assert len(matrix) < 80
    assert verify_matches(changed, read_config(tiny / "config.json")) == wanted


def test_sizes_given_for_each_layer_are_those_of_full_attention(tiny, tiny_gguf):
    plain, config = read_gguf(tiny_gguf), read_config(tiny / "config.json")
    heads = tuple(2 if kind == "full_attention" else 0 for kind in config.layer_types)
    kinds = tuple(kind != "full_attention" for kind in config.layer_types)
    changes = {"qwen35.attention.head_count_kv": heads, "qwen35.attention.recurrent_layers": kinds}
    assert verify_matches(dataclasses.replace(plain, metadata={**plain.metadata, **changes}), config) == ()
    changes = {"qwen35.attention.recurrent_layers": kinds[::-1]}
    with pytest.raises(GgufError, match=r"expected the layer_types of config\.json, got attention\.recurrent_layers"):
        verify_matches(dataclasses.replace(plain, metadata={**plain.metadata, **changes}), config)


_SCALARS = st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=4)
_VALUES = st.none() | st.recursive(_SCALARS, lambda inner: st.lists(inner, max_size=6).map(tuple), max_leaves=12)


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_no_value_of_any_key_gives_another_error(tiny, tiny_gguf, data):
    plain, config = read_gguf(tiny_gguf), read_config(tiny / "config.json")
    extra = ("nextn_predict_layers", "expert_count", "attention.recurrent_layers", "rope.scaling.type", "vocab_size")
    keys = {*plain.metadata, "tokenizer.ggml.scores", *(f"qwen35.{name}" for name in extra)}
    key = data.draw(st.sampled_from(sorted(keys)))
    value = data.draw(_VALUES)
    metadata = {**plain.metadata, key: value}
    if value is None:
        del metadata[key]
    try:
        notes = verify_matches(dataclasses.replace(plain, metadata=metadata), config)
        assert all(isinstance(note, str) for note in notes)
    except GgufError as error:
        assert len(str(error)) < 1000
