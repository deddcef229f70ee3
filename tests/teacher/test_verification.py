"""The whole job on the tiny model: one command, its receipts, and everything that must stop it."""

import importlib.util
import json
import shutil

import numpy as np
import pytest

from receipts.chain import verify_run
from receipts.cli import main as receipts_main
from receipts.digest import sha256_file
from receipts.errors import DigestMismatchError, EngineFailedError
from support.gguf_tools import edit_gguf, tensor_of
from support.tiny_qwen35 import Sizes, write_gguf, write_snapshot
from teacher.cli import main
from teacher.verification import Options, verify

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("xllamacpp") is None, reason="needs the package xllamacpp (llama.cpp)"
)
POLICY = """
schema = "source-teacher/policy/v1"
name = "tiny"
reason = "an F32 file of a tiny model"
[floor]
max_share = 0.1
max_kl_nats_mean = 1e-8
reason = "two F32 implementations"
[sample]
min_positions = 40
min_examples = 2
standard_errors = 2.0
reason = "a small plan"
[tokenizer]
require = "match"
reason = "other ids are another prompt"
[[limit]]
quantity = "candidate.kl_nats.mean"
max = 1e-4
reason = "flash attention rounds to F16"
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Policy and plan files of a small run."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "tiny.toml").write_text(POLICY)
    lines = [
        {"text": "The quick brown fox jumps over the lazy dog."},
        {"chat": [{"role": "user", "content": "12 + 34?"}, {"role": "assistant", "content": "46"}], "name": "sum"},
        {"token_ids": [5, 6, 7, 8, 9], "calls": [2, 1, 2]},
    ]
    (folder / "plan.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def arguments(snapshot, gguf, inputs, out, *more, diagnose=False):
    return [
        "verify", str(snapshot), str(gguf), "--plan", str(inputs / "plan.jsonl"), "--policy", str(inputs / "tiny.toml"),
        "--out", str(out), "--quiet", "--threads", "1", "--spread", "none",
        *(() if diagnose else ("--no-diagnosis",)), *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def run(tiny, tiny_gguf, inputs, tmp_path_factory):
    """One run of the whole job."""
    out = tmp_path_factory.mktemp("runs") / "run"
    assert main(arguments(tiny, tiny_gguf, inputs, out, "--spread", "decode", "--reference-bf16", diagnose=True)) == 0
    return out


def test_the_run_folder_is_whole_and_says_pass(run, capsys):
    assert receipts_main(["verify", str(run)]) == 0
    assert "verdict: PASS" in capsys.readouterr().out
    found = verify_run(run)
    assert found.report.floor.kl_nats.mean < 1e-9
    assert found.report.reference_bf16.kl_nats.mean > found.report.floor.kl_nats.mean
    assert [side.actual for side in found.report.spread] == ["candidate decode:1"]
    assert found.report.candidate.by_example[1].label == "sum"


def test_the_receipts_name_what_was_used(run, tiny_gguf):
    found = verify_run(run).receipts
    assert found["candidate.json"]["file"]["name"] == tiny_gguf.name
    assert found["reference.json"]["bfloat16"]["dtype"] == "bfloat16"
    assert found["cache.json"]["receipt"]["plan"]["profile"] == "dense_qwen35_source_teacher_base_text_f32_cache_v1"
    assert found["calls.json"]["teacher"]["precision"]["product"] < 2.7e-6
    assert [example["calls"] for example in found["plan.json"]["examples"]][2] == [2, 1, 2]
    text = json.dumps({name: value for name, value in found.items() if name != "host.json"})
    assert "/tmp" not in text and "started" not in text


def test_the_same_inputs_give_the_same_digests(run, tiny, tiny_gguf, inputs, tmp_path):
    out = tmp_path / "again"
    assert main(arguments(tiny, tiny_gguf, inputs, out, "--spread", "decode", "--reference-bf16", diagnose=True)) == 0
    for path in run.iterdir():
        if path.name not in ("host.json", "SHA256SUMS"):
            assert (out / path.name).read_bytes() == path.read_bytes(), path.name


def test_json_goes_to_stdout_alone(tiny, tiny_gguf, inputs, tmp_path, capsys):
    assert main(arguments(tiny, tiny_gguf, inputs, tmp_path / "run", "--json")) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["verdict"]["status"] == "PASS"
    assert captured.err == ""


def test_the_five_lines_of_the_readme_work(tiny, tiny_gguf, inputs):
    verdict = verify(
        tiny, tiny_gguf, inputs / "plan.jsonl", inputs / "tiny.toml", options=Options(spread=(), threads=1)
    )
    assert verdict.passed
    assert verdict.status == "PASS"


# Beside those of tests/faults, which run on the trained model.
FAULTS = {
    "ssm_a exponentiated twice": ("blk.0.ssm_a", lambda v: -np.exp(v)),
    "taps scrambled": ("blk.0.ssm_conv1d.weight", lambda v: v.T.reshape(v.shape)),
    "query norm without its 1": ("blk.1.attn_q_norm.weight", lambda v: v - 1),
    "value heads of one tensor in source order": ("blk.0.ssm_dt.bias", lambda v: v.reshape(3, 2).T.reshape(-1)),
    "embedding lost": ("token_embd.weight", np.zeros_like),
    "head lost": ("output.weight", np.zeros_like),
    "one NaN": ("blk.3.ffn_down.weight", lambda v: np.where(np.arange(v.size).reshape(v.shape) == 7, np.nan, v)),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_conversion_fault_that_loads_and_runs_fails_with_exit_code_4(
    fault, tiny, tiny_gguf, inputs, tmp_path, capsys
):
    name, change = FAULTS[fault]
    values = np.asarray(change(tensor_of(tiny_gguf, name)), np.float32)
    gguf = edit_gguf(tiny_gguf, tmp_path / "wrong-F32.gguf", tensors={name: values})
    assert main(arguments(tiny, gguf, inputs, tmp_path / "run", "--json")) == 4
    form = json.loads(capsys.readouterr().out)
    assert form["verdict"]["status"] == "FAIL"
    if fault == "head lost":
        assert form["report"]["candidate"]["constant_rows"] == form["report"]["candidate"]["positions"]
    if fault == "one NaN":
        assert form["report"]["candidate"]["nonfinite_rows"] > 0
    assert verify_run(tmp_path / "run").verdict.status == "FAIL"


def truncated(path, tmp_path, name):
    (tmp_path / name).write_bytes(path.read_bytes()[:-100])
    return tmp_path / name


BAD = {
    "missing folder": (lambda s, g, t: (t / "none", g), "expected a model folder or a hub id"),
    "missing GGUF": (lambda s, g, t: (s, t / "none.gguf"), "expected a GGUF file, got no such file"),
    "truncated GGUF": (lambda s, g, t: (s, truncated(g, t, "cut.gguf")), "truncated"),
    "pointer for a GGUF": (
        lambda s, g, t: (s, pointer(t / "p.gguf")), "p.gguf: expected a GGUF file, got a Git LFS pointer"
    ),
    "GGUF of another model, same vocabulary": (
        lambda s, g, t: (s, other_gguf(t, Sizes(hidden=64))), "embedding_length 96 as config.json has, got 64"
    ),
    "GGUF of another vocabulary": (
        lambda s, g, t: (s, other_gguf(t, Sizes(padding_rows=9))), "expected a vocabulary of"
    ),
    "truncated shard": (lambda s, g, t: (cut_snapshot(s, t), g), r"model.safetensors: expected .* \(truncated\)"),
    "other tokenizer": (
        lambda s, g, t: (s, edit_gguf(g, t / "t.gguf", metadata={"tokenizer.ggml.pre": "default"})),
        "expected the snapshot's tokenizer, got another: .*expected ids",
    ),
}  # fmt: skip


def pointer(path):
    path.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'ab' * 32}\nsize 5\n")
    return path


def other_gguf(folder, sizes):
    return write_gguf(write_snapshot(folder / "other", sizes), folder / "other.gguf")


def cut_snapshot(snapshot, folder):
    copy = shutil.copytree(snapshot, folder / "cut")
    data = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(data[:-1])
    return copy


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence_exit_code_2_and_nothing_left(case, tiny, tiny_gguf, inputs, tmp_path, capsys):
    make, sentence = BAD[case]
    (tmp_path / "w").mkdir()
    snapshot, gguf = make(tiny, tiny_gguf, tmp_path / "w")
    refused(arguments(snapshot, gguf, inputs, tmp_path / "out" / "run"), sentence, capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["w"]


def refused(argv, sentence, capsys):
    import re

    assert main(argv) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1, err
    assert re.search(sentence, err), err


@pytest.mark.parametrize(
    ("line", "more", "sentence"),
    [
        ("", (), "got an empty plan"),
        ('{"token_ids": [1, 99999]}', (), "plan.jsonl:1: token 1: expected an id below"),
        ('{"token_ids": [1, 2, 3]}', ("--max-tokens", "2"), "expected at most 2 tokens"),
        ('{"token_ids": [1]}', ("--max-tokens", "5000"), "expected 1 to 4096 tokens, got 5000"),
        ('{"token_ids": [%d]}', (), "expected ids of real tokens"),
        ('{"token_ids": [1]}', ("--calls", "sideways"), "call shape 'sideways'"),
        ('{"token_ids": [1]}', ("--spread", "prefill,up"), "call shape 'up'"),
        ('{"token_ids": [1]}', ("--engine", "warp_drive"), "engine 'warp_drive'"),
        ('{"token_ids": [1]}', ("--set", "speed"), "expected NAME=VALUE, got 'speed'"),
        ('{"token_ids": [1]}', ("--set", "type_k=q3"), "type_k: expected one of"),
        ('{"token_ids": [1]}', ("--threads", "0"), "--threads: expected at least 1, got 0"),
        ('{"token_ids": [1]}', ("--policy", "nothing"), "nothing: expected a policy file or one of"),
        ('{"token_ids": [1]}', ("--revision", "main"), "expected no revision with a folder"),
    ],
)
def test_bad_arguments_are_refused_the_same_way(line, more, sentence, tiny, tiny_gguf, inputs, tmp_path, capsys):
    if "%d" in line:
        line %= json.loads((tiny / "config.json").read_text())["text_config"]["vocab_size"] - 1
    (tmp_path / "plan.jsonl").write_text(line)
    argv = arguments(tiny, tiny_gguf, inputs, tmp_path / "out" / "run", *more)
    argv[argv.index("--plan") + 1] = str(tmp_path / "plan.jsonl")
    refused(argv, sentence, capsys)
    assert not (tmp_path / "out").exists()


def test_a_place_that_cannot_be_written_is_found_before_anything_runs(tiny, tiny_gguf, inputs, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    blocked = arguments(tiny, tiny_gguf, inputs, tmp_path / "file" / "run")
    refused(blocked, "expected a place that can be written", capsys)
    (tmp_path / "there").mkdir()
    refused(arguments(tiny, tiny_gguf, inputs, tmp_path / "there"), "expected no such folder yet", capsys)


def test_a_machine_without_the_engine_says_which_package_is_missing(
    tiny, tiny_gguf, inputs, tmp_path, capsys, monkeypatch
):
    for package in ("xllamacpp", "llama_cpp"):
        (tmp_path / "empty" / package).mkdir(parents=True)
        (tmp_path / "empty" / package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path / "empty")  # the workers look here first, and find no library
    refused(arguments(tiny, tiny_gguf, inputs, tmp_path / "run"), "llama.cpp: expected package xllamacpp or", capsys)


def test_an_engine_that_no_module_holds_is_named(tiny, tiny_gguf, inputs, tmp_path, capsys):
    argv = arguments(tiny, tiny_gguf, inputs, tmp_path / "run", "--engine", "support.missing:Engine")
    refused(argv, "engine 'support.missing:Engine': expected", capsys)


def test_a_candidate_that_answers_differently_each_time_is_no_candidate(tiny, tiny_gguf, inputs, tmp_path, capsys):
    argv = arguments(tiny, tiny_gguf, inputs, tmp_path / "run", "--engine", "support.sources:Unstable")
    argv[argv.index("--spread") + 1] = "decode"
    argv += ["--set", f"width={json.loads((tiny / 'config.json').read_text())['text_config']['vocab_size']}"]
    refused(argv, "candidate: expected the same logits for the same calls", capsys)


def test_an_input_that_changes_during_the_run_fails_it(snapshot, tiny_gguf, inputs, tmp_path):
    def meddle(stage, done, total):
        if stage.startswith("teacher against candidate"):
            path = snapshot / "generation_config.json"
            path.write_text("{}" if not path.exists() else path.read_text())

    with pytest.raises((DigestMismatchError, EngineFailedError, Exception), match=r"generation_config\.json"):
        verify(
            snapshot, tiny_gguf, inputs / "plan.jsonl", inputs / "tiny.toml", out=tmp_path / "run",
            options=Options(spread=(), threads=1), on_progress=meddle,
        )  # fmt: skip
    assert not (tmp_path / "run").exists()


def test_a_report_explains_itself_in_four_cells_and_layers(run):
    report = verify_run(run).report
    diagnosis = report.diagnosis
    cells = diagnosis.cells
    assert (cells.weights.expected, cells.weights.actual) == ("teacher", "gguf weights")
    assert (cells.engine.expected, cells.engine.actual) == ("gguf weights", "candidate")
    # An F32 file holds the source's weights but for exp(A_log), which two libraries round otherwise.
    assert 0 <= cells.weights.kl_nats.mean < 1e-10
    assert cells.conversion is None
    assert len(diagnosis.localisation.layers) == 4
    assert diagnosis.sentences == ()
    assert diagnosis.arbitration is None
    assert report.worst[0].kl_nats == report.candidate.kl_nats.max


def test_an_unquantized_file_is_the_fourth_cell_and_an_input(tiny, tiny_gguf, inputs, tmp_path, capsys):
    name = "blk.1.ffn_down.weight"
    changed = edit_gguf(tiny_gguf, tmp_path / "m-F32.gguf", tensors={name: tensor_of(tiny_gguf, name) * 1.01})
    argv = arguments(tiny, changed, inputs, tmp_path / "run", "--unquantized", str(tiny_gguf), "--json", diagnose=True)
    main(argv)
    form = json.loads(capsys.readouterr().out)
    cells = form["report"]["diagnosis"]["cells"]
    found = {one["name"]: one["kl_nats_mean"] for one in cells["contrasts"]}
    assert list(found) == ["floor", "weights", "engine", "conversion", "total", "interaction"]
    # The change stands in the file's weights alone; engine and conversion are llama.cpp on F32 with an F16 cache.
    assert found["weights"] > 100 * found["conversion"]
    assert abs(found["total"] - found["weights"]) < 0.1 * found["total"]
    receipt = json.loads((tmp_path / "run" / "candidate.json").read_text())
    assert receipt["unquantized"]["sha256"] == sha256_file(tiny_gguf)[0].hex


def test_a_run_without_diagnosis_decides_only(tiny, tiny_gguf, inputs, tmp_path, capsys):
    assert main(arguments(tiny, tiny_gguf, inputs, tmp_path / "run")) == 0
    assert verify_run(tmp_path / "run").report.diagnosis is None
    assert "layers:" not in capsys.readouterr().out
