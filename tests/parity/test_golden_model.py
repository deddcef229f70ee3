"""The shipped trained model: what is recorded of it still holds, and what a fault in it looks like."""

import importlib.util
import json

import numpy as np
import pytest

from receipts.chain import verify_run
from receipts.golden import Golden, check_run
from support.gguf_tools import edit_gguf, tensor_of
from support.plans import centred_difference, kl_nats, plan_of, replayed_logits
from teacher.cli import main
from teacher.model.arbiter import forward
from teacher.plans.plan import load_plan
from teacher.process.streams import run_source
from teacher.snapshot.folder import open_snapshot, read_snapshot
from teacher.snapshot.tokenizer import SnapshotTokenizer
from teacher.snapshot.weights import WeightSource

needs_engine = pytest.mark.skipif(
    importlib.util.find_spec("xllamacpp") is None, reason="needs the package xllamacpp (llama.cpp)"
)
NAMES = ("qwen35-tiny", "qwen35-tiny-tied", "qwen35-tiny-odd")
# The bounds for two F32 implementations of one trained model: 1e-9 nats is what 2e-4 of logit difference in
# every logit gives at most (half its square is 2e-8, and rounding is not one-sided), 2e-4 is 15 times 2^-24 of a
# logit of size 20 through eight layers.
KL_LIMIT, LOGIT_LIMIT = 1e-9, 2e-4


@pytest.mark.parametrize("name", NAMES)
def test_every_shipped_snapshot_verifies(golden, name):
    snapshot = open_snapshot(golden / name)
    assert snapshot.warnings == ()
    assert bool(snapshot.extras.get("vision")) == bool(snapshot.extras.get("mtp")) == (name == "qwen35-tiny")


def test_the_recorded_run_is_whole_and_within_its_own_bounds(golden):
    run = verify_run(golden / "receipts" / "qwen35-tiny-Q8_0")
    assert run.verdict.status == "PASS"
    record = Golden.load(golden / "receipts" / "qwen35-tiny-Q8_0.json")
    assert check_run(golden / "receipts" / "qwen35-tiny-Q8_0", record) == ()
    snapshot = open_snapshot(golden / "qwen35-tiny")
    assert record.inputs["snapshot_root_sha256"] == snapshot.manifest.root_digest.hex


@pytest.mark.slow
@needs_engine
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K_M"])
def test_a_new_run_is_within_the_recorded_bounds(golden, kind, tmp_path, capsys):
    run = tmp_path / "run"
    gguf = golden / "gguf" / f"qwen35-tiny-{kind}.gguf"
    assert main(["verify", str(golden / "qwen35-tiny"), str(gguf), "--out", str(run), "--quiet", "--threads", "1"]) == 0
    assert main(["golden", "check", str(run), str(golden / "receipts" / f"qwen35-tiny-{kind}.json")]) == 0
    capsys.readouterr()
    floor = verify_run(run).report.floor
    assert floor.positions > 4000
    assert floor.kl_nats.mean <= KL_LIMIT
    assert floor.max_abs_centred <= LOGIT_LIMIT
    assert floor.top1_agreement == 1.0
    other = json.loads((golden / "receipts" / f"qwen35-tiny-{kind}.json").read_text())
    other["quantities"][4]["high"] = other["quantities"][4]["low"]
    (tmp_path / "strict.json").write_text(json.dumps(other))
    assert main(["golden", "check", str(run), str(tmp_path / "strict.json")]) == 4
    assert capsys.readouterr().out.startswith("candidate.kl_nats.mean: expected")


def text_ids(golden, name, count):
    """The first ids of the built-in plan's prose, one sequence."""
    snapshot = read_snapshot(golden / name)
    plan = load_plan(None, golden / name, vocabulary_rows=snapshot.config.vocab_size)
    ids = [token for example in plan.examples for token in example.token_ids]
    return snapshot, tuple(ids[:count])


@pytest.mark.parametrize("name", NAMES)
def test_teacher_and_pytorch_agree_and_the_arbiter_says_which_is_off(golden, name, tmp_path):
    snapshot, ids = text_ids(golden, name, 400)
    plan = plan_of((ids, (330, *(1,) * 70)))
    (teacher,) = replayed_logits(snapshot, plan, 400)
    with run_source("transformers", {"snapshot": str(golden / name)}, plan, threads=1) as reference:
        torch = np.concatenate([block.logits for block in reference])
    exact = forward(WeightSource(snapshot), snapshot.config, ids)
    assert kl_nats(teacher, torch).mean() <= KL_LIMIT
    assert centred_difference(teacher, torch).max() <= LOGIT_LIMIT
    assert kl_nats(exact, teacher).mean() <= KL_LIMIT
    assert centred_difference(exact, teacher).max() <= LOGIT_LIMIT
    # Both round F32 sums in an order of their own; neither may lie an order of magnitude further out.
    assert kl_nats(exact, teacher).mean() <= 10 * kl_nats(exact, torch).mean()


def test_prefill_chunks_and_decode_agree(golden):
    snapshot, ids = text_ids(golden, "qwen35-tiny", 200)
    (whole,) = replayed_logits(snapshot, plan_of((ids, (200,))), 200)
    for calls in ((1,) * 200, (63, 63, 63, 11), (64, 64, 64, 8), (65, 65, 65, 5)):
        (cut,) = replayed_logits(snapshot, plan_of((ids, calls)), 200)
        assert centred_difference(whole, cut).max() <= LOGIT_LIMIT


def test_the_model_is_trained(golden):
    """Peaked logits, and a loss far below what counting tokens gives."""
    snapshot = read_snapshot(golden / "qwen35-tiny")
    tokenizer = SnapshotTokenizer(golden / "qwen35-tiny")
    lines = (golden / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [tokenizer.encode_text(json.loads(line)["text"])[:256] for line in lines]
    counts = np.bincount([token for ids in texts for token in ids]).astype(np.float64)
    share = counts[counts > 0] / counts.sum()
    entropy = -(share * np.log(share)).sum()
    sample = texts[::15]
    losses, tops = [], []
    for ids, logits in zip(sample, replayed_logits(snapshot, plan_of(*((ids, (len(ids),)) for ids in sample)), 256)):
        shares = np.exp(logits - logits.max(-1, keepdims=True), dtype=np.float64)
        shares /= shares.sum(-1, keepdims=True)
        losses.extend(-np.log(shares[np.arange(len(ids) - 1), ids[1:]]))
        tops.extend(shares.max(-1))
    assert entropy > 6
    assert np.mean(losses) < entropy / 2
    assert np.mean(tops) > 0.4


FAULTS = {
    "blk.3.attn_q_norm.weight": (lambda v: v - 1, "norm weight lacks +1"),
    "blk.5.ssm_a": (lambda v: v.reshape(2, 4).T.reshape(-1), "value heads not reordered"),
    "blk.1.ssm_norm.weight": (lambda v: v + 1, "the gated norm has +1"),
    "blk.4.ssm_conv1d.weight": (lambda v: v[:, ::-1], "convolution taps reversed"),
}


@pytest.mark.slow
@needs_engine
@pytest.mark.parametrize("tensor", FAULTS)
def test_one_wrong_tensor_in_one_layer_of_the_q8_0_file_fails(golden, tensor, tmp_path, capsys):
    fault, cause = FAULTS[tensor]
    source = golden / "gguf" / "qwen35-tiny-Q8_0.gguf"
    values = np.asarray(fault(tensor_of(source, tensor)), np.float32)
    gguf = edit_gguf(source, tmp_path / "wrong-Q8_0.gguf", tensors={tensor: values})
    lines = (golden / "heldout.jsonl").read_text(encoding="utf-8").splitlines()[::25]
    texts = [{"text": json.loads(line)["text"][:400]} for line in lines]
    (tmp_path / "plan.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    argv = ["verify", str(golden / "qwen35-tiny"), str(gguf), "--quiet", "--spread", "none", "--calls", "prefill"]
    argv += ["--threads", "1"]
    assert main([*argv, "--plan", str(tmp_path / "plan.jsonl"), "--out", str(tmp_path / "run")]) == 4
    said = " ".join(capsys.readouterr().out.split())  # the table's lines are folded
    assert "FAIL" in said
    assert f"tensor audit: {tensor} is w" in said
    assert cause in said
