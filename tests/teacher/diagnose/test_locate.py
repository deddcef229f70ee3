"""Layer localisation end to end: three engines on a tiny model, a clean file and planted faults."""

import importlib.util
import json

import numpy as np
import pytest

from support.gguf_tools import edit_gguf, tensor_of
from teacher.cli import main
from teacher.diagnose.locate import choose_examples
from teacher.plans.plan import load_plan

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="needs the package xllamacpp (llama.cpp)"),
]
EXACT = ["--set", "flash_attention=off", "--set", "type_k=f32", "--set", "type_v=f32"]
LAYERS = 4


@pytest.fixture
def located(tiny, tmp_path, capsys):
    """Run the command on short examples; return exit code and form."""
    plan = tmp_path / "plan.jsonl"
    plan.write_text(
        json.dumps({"name": "a", "token_ids": list(range(5, 75)), "calls": [66, 1, 3]})
        + "\n"
        + json.dumps({"name": "b", "token_ids": list(range(90, 60, -1)), "calls": [30]})
    )

    def run(path, *options):
        code = main(
            ["locate", str(tiny), str(path), "--plan", str(plan), "--threads", "1", "--quiet", "--json", *options]
        )
        return code, json.loads(capsys.readouterr().out)

    return run


def test_a_clean_file_is_within_its_bands_everywhere(located, tiny_gguf):
    code, form = located(tiny_gguf, *EXACT)
    assert (code, form["culprits"], form["rounding"]) == (0, [], [])
    assert form["positions"] == 100
    assert [one["layer"] for one in form["layers"]] == list(range(LAYERS))
    # Three F32 implementations of one layer: the reference's band says why; none may be exactly equal to another.
    for one in form["layers"]:
        assert 0 < one["alone_reference"] < 1e-4
        assert 0 < one["alone_engine"] < 1e-4
        assert 0 < one["alone_engine_later_calls"] < 1e-4
        assert one["candidate"] < 1e-3


@pytest.mark.parametrize("layer", range(2))
def test_one_layer_alone_shows_its_operations_in_all_engines(located, tiny_gguf, layer):
    code, form = located(tiny_gguf, *EXACT, "--layer", str(layer))
    assert (code, form["ends"], [one["layer"] for one in form["layers"]]) == (0, [], [layer])
    names = [one["operation"] for one in form["operations"]]
    assert names[0] == "input norm" and names[-1] == "feed-forward down"
    assert {"delta rule", "convolution", "decay", "beta", "gated norm"} <= set(names) or {
        "rotated keys", "attention", "gate", "query norm"
    } <= set(names)  # fmt: skip
    # llama.cpp shows every operation, with value heads in its own order, which must have been undone.
    assert all(one["engine"] is not None and one["engine"] < 1e-4 for one in form["operations"])
    assert sum(one["reference"] is not None for one in form["operations"]) >= len(names) // 2
    assert all(one["reference"] < 1e-4 for one in form["operations"] if one["reference"] is not None)


def test_wrong_weights_are_placed_in_layer_and_operation(located, tiny_gguf, tmp_path):
    name = "blk.2.ssm_dt.bias"
    path = edit_gguf(tiny_gguf, tmp_path / "m.gguf", tensors={name: tensor_of(tiny_gguf, name) + np.float32(1)})
    code, form = located(path, *EXACT)
    assert code == 4
    assert [(one["part"], one["layer"], one["operation"]) for one in form["culprits"]] == [("weights", 2, "decay")]


def test_a_wrong_constant_of_the_engine_is_placed_where_it_acts(located, tiny_gguf, tmp_path):
    path = edit_gguf(tiny_gguf, tmp_path / "m.gguf", metadata={"qwen35.rope.freq_base": 100.0})
    code, form = located(path, *EXACT)
    first = form["culprits"][0]
    assert code == 4
    assert (first["part"], first["layer"], first["operation"]) == ("engine", 1, "rotated keys")


def test_examples_are_chosen_by_name(located, tiny_gguf):
    _, form = located(tiny_gguf, *EXACT, "--example", "b", "--layer", "0")
    assert (form["examples"], form["positions"]) == (["b"], 30)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--layer", "4"], "--layer: expected 0 to 3, got 4"),
        (["--example", "c"], "--example: expected one of a, b, got 'c'"),
    ],
)
def test_what_cannot_be_traced_is_refused(tiny, tiny_gguf, tmp_path, capsys, options, part):
    plan = tmp_path / "plan.jsonl"
    plan.write_text('{"name": "a", "token_ids": [1]}\n{"name": "b", "token_ids": [2]}\n')
    assert main(["locate", str(tiny), str(tiny_gguf), "--plan", str(plan), *options]) == 2
    assert part in capsys.readouterr().err


def test_a_traced_plan_keeps_calls_and_stays_short(golden):
    plan = load_plan(None, golden / "qwen35-tiny", vocabulary_rows=2048, max_sequence_tokens=4096, call_shape="decode")
    traced = choose_examples(plan, None)
    assert len(traced.examples) == 2
    assert all(sum(one.calls) == len(one.token_ids) <= 256 for one in traced.examples)
