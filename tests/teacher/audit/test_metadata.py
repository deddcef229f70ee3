import json
import shutil

import pytest

from receipts.errors import GgufError
from support.gguf_tools import edit_gguf, tensor_of
from teacher.audit.metadata import audit_metadata
from teacher.audit.types import audit_types
from teacher.gguf.file import read_gguf
from teacher.gguf.match import verify_matches
from teacher.snapshot.config import read_config

TOKENS, MERGES, KINDS = (f"tokenizer.ggml.{name}" for name in ("tokens", "merges", "token_type"))


@pytest.fixture
def snapshot(tiny, tmp_path):
    return shutil.copytree(tiny, tmp_path / "snapshot")


@pytest.fixture
def findings(tiny, tiny_gguf, tmp_path):
    """Change keys of the tiny GGUF and return what the audit says of them."""

    def change(folder=tiny, **metadata):
        path = edit_gguf(tiny_gguf, tmp_path / "m.gguf", metadata=metadata)
        gguf, config = read_gguf(path), read_config(folder / "config.json")
        verify_matches(gguf, config)  # none of these makes the two incomparable
        return list(audit_metadata(gguf, folder, config))

    return change


def test_the_file_of_the_snapshot_has_no_findings(findings):
    assert findings() == []


@pytest.mark.parametrize(
    ("changes", "kind", "part"),
    [
        ({"qwen35.attention.layer_norm_rms_epsilon": 1e-5}, "math", "rms_epsilon: expected 1e-06 as the snapshot"),
        ({"qwen35.rope.dimension_count": 32}, "math", "dimension_count: expected 8 as the snapshot has, got 32"),
        ({"qwen35.rope.dimension_sections": [4, 0, 0, 0]}, "math", "[2, 1, 1] as the snapshot has, got [4, 0, 0, 0]"),
        ({"qwen35.rope.freq_base": 1e6}, "math", "expected 10000000 as the snapshot has, got 1000000"),
        ({"qwen35.rope.freq_base": float("nan")}, "math", "got nan"),
        ({"qwen35.rope.scaling.type": "yarn"}, "math", "got 'yarn' by 1"),
        ({"qwen35.context_length": 2048}, "usage", "context_length: expected 4096 as the snapshot has, got 2048"),
        ({"qwen35.context_length": None}, "usage", "got none"),
        ({"tokenizer.ggml.eos_token_id": 5}, "usage", "tokenizer.ggml.eos_token_id: expected"),
        ({"tokenizer.ggml.padding_token_id": None}, "usage", "tokenizer.ggml.padding_token_id: expected"),
        ({"tokenizer.chat_template": None}, "usage", "expected a template as the snapshot has, got none"),
    ],
)  # fmt: skip
def test_a_key_that_says_something_else_is_named_with_both_values(findings, changes, kind, part):
    (finding,) = findings(**changes)
    assert finding.kind == kind
    assert finding.key in changes
    assert part in finding.sentence


def test_a_number_that_f32_rounds_is_the_same_number(findings, snapshot):
    config = json.loads((snapshot / "config.json").read_text())
    config["text_config"]["rms_norm_eps"] = 1e-6 * (1 + 2**-25)
    (snapshot / "config.json").write_text(json.dumps(config))
    assert findings(snapshot) == []


def test_a_template_that_differs_by_a_newline_is_placed(findings, tiny):
    template = (tiny / "chat_template.jinja").read_text()
    (finding,) = findings(**{"tokenizer.chat_template": template.replace("\n", "", 1)})
    assert f"at character {template.index(chr(10))} as the snapshot has" in finding.sentence


def test_a_template_that_only_the_file_has_is_named(findings, snapshot):
    (snapshot / "chat_template.jinja").unlink()
    (finding,) = findings(snapshot)
    assert "expected none as the snapshot has, got a template" in finding.sentence


def test_two_exchanged_merges_are_placed(findings, tiny_gguf):
    merges = list(read_gguf(tiny_gguf).metadata[MERGES])
    changed = [*merges[:4], merges[5], merges[4], *merges[6:]]
    (finding,) = findings(**{MERGES: changed})
    assert f"{merges[4]!r} at merge 4 of {len(merges)} as the snapshot has, got {merges[5]!r}" in finding.sentence


def test_a_merge_fewer_is_placed_at_the_end(findings, tiny_gguf):
    merges = list(read_gguf(tiny_gguf).metadata[MERGES])
    (finding,) = findings(**{MERGES: merges[:-1]})
    assert f"at merge {len(merges) - 1} of {len(merges)}" in finding.sentence
    assert "got none" in finding.sentence


def test_exchanged_tokens_are_placed(findings, tiny_gguf):
    tokens = list(read_gguf(tiny_gguf).metadata[TOKENS])
    tokens[70], tokens[71] = tokens[71], tokens[70]
    (finding,) = findings(**{TOKENS: tokens})
    assert f"{tokens[71]!r} at token 70" in finding.sentence


def test_a_special_token_of_another_kind_is_named(findings, tiny, tiny_gguf):
    kinds = list(read_gguf(tiny_gguf).metadata[KINDS])
    added = {t["content"]: t["id"] for t in json.loads((tiny / "tokenizer.json").read_text())["added_tokens"]}
    kinds[added["<|im_end|>"]] = 1
    (finding,) = findings(**{KINDS: kinds})
    assert f"CONTROL for token {added['<|im_end|>']} as the snapshot has, got NORMAL" in finding.sentence
    kinds[added["<|im_end|>"]], kinds[added["<think>"]] = 3, 3
    assert findings(**{KINDS: kinds}) == []  # what a converter does with added tokens that look like marks


def test_a_bos_that_only_the_models_config_names_is_no_difference(findings, snapshot):
    config = json.loads((snapshot / "config.json").read_text())
    config["text_config"]["bos_token_id"] = 3
    (snapshot / "config.json").write_text(json.dumps(config))
    (finding,) = findings(snapshot)
    assert finding.key == "tokenizer.ggml.bos_token_id"
    assert findings(snapshot, **{"tokenizer.ggml.bos_token_id": 3}) == []


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"qwen35.attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon, got no such key"),
        ({"qwen35.rope.dimension_count": None}, "rope.dimension_count, got no such key"),
        ({"qwen35.rope.freq_base": None}, "rope.freq_base, got no such key"),
    ],
)
def test_a_constant_that_is_no_number_is_refused(findings, change, part):
    with pytest.raises(GgufError, match=part):
        findings(**change)


def types_of(path, tiny):
    return list(audit_types(read_gguf(path), read_config(tiny / "config.json")))


def test_a_matrix_left_in_a_float_type_is_named(tiny, tiny_gguf, tmp_path):
    path = edit_gguf(tiny_gguf, tmp_path / "m.gguf", metadata={"general.file_type": 7})
    found = types_of(path, tiny)
    assert {finding.kind for finding in found} == {"above"}
    # Its rows of 96 are whole Q8_0 blocks of 32; norms, vectors and the convolution are F32 in every file.
    assert any(finding.name == "blk.1.ffn_up.weight" for finding in found)
    assert not any("norm" in finding.name or "conv1d" in finding.name for finding in found)
    assert "blk.1.ffn_up.weight is F32 in a Q8_0 file: it was left unquantized" in {f.sentence[12:] for f in found}


def test_a_type_coarser_than_the_label_is_named(tiny, tiny_gguf, tmp_path):
    name = "blk.1.ffn_up.weight"
    path = edit_gguf(
        tiny_gguf, tmp_path / "m.gguf", metadata={"general.file_type": 7},
        tensors={name: tensor_of(tiny_gguf, name)}, types={name: "Q4_0"},
    )  # fmt: skip
    (finding,) = [finding for finding in types_of(path, tiny) if finding.kind == "below"]
    assert (finding.name, finding.type, finding.label) == (name, "Q4_0", "Q8_0")


def test_a_float_file_has_no_types_to_judge(tiny, tiny_gguf):
    assert types_of(tiny_gguf, tiny) == []
