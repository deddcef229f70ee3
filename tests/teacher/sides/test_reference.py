"""PyTorch's own model: the same answer however an example is cut, and every weight from the snapshot or none."""

import importlib.util
import json
import shutil

import numpy as np
import pytest

from receipts.errors import PlanError
from support.plans import centred_difference, kl_nats, plan_of, random_ids
from support.tiny_qwen35 import Sizes, write_snapshot
from teacher.plans.call_shape import CallShape
from teacher.process.streams import ask_source, run_source

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs the packages torch and transformers"
)
IDS = random_ids(130, 420, seed=4)
SHAPES = ("prefill", "decode", "chunks:63", "chunks:64", "chunks:65")
# Each cut is an F32 sum in another order. A logit is of size 15, of which F32 keeps 15 * 2^-24 = 9e-7; the triangular
# inverse of PyTorch's chunked delta rule (its calls of more than one token) amplifies that by up to about 1e3, the
# one-token rule by less: two cuts may each be 9e-4 from the exact answer.
LIMIT = 2 * 9e-4
KL_LIMIT = 1e-9


def run(snapshot, plan, **settings):
    rows = [[] for _ in plan.examples]
    with run_source("transformers", {"snapshot": str(snapshot), **settings}, plan, threads=1) as source:
        for block in source:
            rows[block.example].append(block.logits)
        return [np.concatenate(parts) for parts in rows], source.description


@pytest.fixture(scope="module")
def cuts(tiny):
    """Logits of one text cut in every way, then of its second half alone, then of the whole text once more."""
    examples = [(IDS, CallShape.parse(shape).cut(len(IDS))) for shape in SHAPES]
    logits, description = run(tiny, plan_of(*examples, (IDS[65:], (65,)), (IDS, (130,))))
    return dict(zip([*SHAPES, "second half", "again"], logits, strict=True)), description


@pytest.mark.parametrize("shape", SHAPES[1:])
def test_calls_carry_the_state_of_the_calls_before(cuts, shape):
    logits, _ = cuts
    worst = centred_difference(logits["prefill"], logits[shape])
    assert worst.max() < LIMIT, (worst.max(), worst.argmax())
    assert kl_nats(logits["prefill"], logits[shape]).mean() < KL_LIMIT


def test_a_lost_state_would_be_far_above_those_limits(cuts):
    logits, _ = cuts
    assert kl_nats(logits["prefill"][65:], logits["second half"]).mean() > 1e6 * KL_LIMIT


def test_an_example_does_not_remember_the_ones_before(cuts):
    logits, _ = cuts
    assert np.array_equal(logits["prefill"], logits["again"])


def test_the_description_says_what_computed(cuts):
    _, said = cuts
    assert said["dtype"] == "float32"
    assert said["threads"] == 1
    assert said["attention"] == "sdpa"
    assert said["float32_matmul_precision"] == "highest"
    assert all(place.startswith("transformers.models.qwen3_5.") for place in said["kernels"].values())
    assert said["ignored_tensors"] == {"model.visual": 1, "mtp": 1}


def test_bfloat16_is_another_run_and_says_so(tiny, cuts):
    (logits,), said = run(tiny, plan_of((IDS, (130,))), dtype="bfloat16")
    assert said["dtype"] == "bfloat16"
    assert 1e-5 < kl_nats(cuts[0]["prefill"], logits).mean() < 1


def test_ids_beyond_the_vocabulary_are_refused(tiny):
    with pytest.raises(PlanError, match=r"example 1: expected token ids below \d+, got 5000"):
        run(tiny, plan_of(((1,), (1,)), ((2, 5000), (2,))))


def read_shard(folder):
    data = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    spans = {name: entry for name, entry in json.loads(data[8 : 8 + size]).items() if name != "__metadata__"}
    start = 8 + size
    return {
        name: (e["dtype"], e["shape"], data[start + e["data_offsets"][0] : start + e["data_offsets"][1]])
        for name, e in spans.items()
    }


def write_shard(folder, tensors):
    header, at = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    head = json.dumps(header).encode()
    parts = [len(head).to_bytes(8, "little"), head, *(data for _, _, data in tensors.values())]
    (folder / "model.safetensors").write_bytes(b"".join(parts))


def tensors_changed(change):
    def spoil(folder):
        tensors = read_shard(folder)
        change(tensors)
        write_shard(folder, tensors)

    return spoil


def config_changed(change):
    def spoil(folder):
        config = json.loads((folder / "config.json").read_text())
        change(config["text_config"])
        (folder / "config.json").write_text(json.dumps(config))

    return spoil


A_LOG = "model.language_model.layers.0.linear_attn.A_log"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 5\n"
SPOILT = {
    "a tensor missing": (
        tensors_changed(lambda t: t.pop(A_LOG)), "EngineFailedError",
        "1 are missing, first model.layers.0.linear_attn.A_log",
    ),
    "no head although untied": (
        tensors_changed(lambda t: t.pop("lm_head.weight")), "EngineFailedError", "missing, first lm_head.weight",
    ),
    "a tensor too many": (
        tensors_changed(lambda t: t.update({A_LOG.replace("0", "9"): t[A_LOG]})), "EngineFailedError",
        "expected no tensor beyond the config's layers, got model.layers.9.linear_attn.A_log",
    ),
    "whole numbers": (
        tensors_changed(lambda t: t.update({A_LOG: ("I16", *t[A_LOG][1:])})), "EngineFailedError",
        "expected BF16 or F32 values, got torch.int16",
    ),
    "another number of value heads": (
        config_changed(lambda c: c.update(linear_num_value_heads=4)), "EngineFailedError", "expected shape",
    ),
    "a mixture of experts": (
        config_changed(lambda c: c.update(model_type="qwen3_5_moe_text")), "SnapshotError", "'qwen3_5_moe_text'",
    ),
    "no config": (lambda f: (f / "config.json").unlink(), "SnapshotError", "expected a JSON config"),
    "no shards": (lambda f: (f / "model.safetensors").unlink(), "SnapshotError", "expected safetensors files, found"),
    "a pointer in place of a shard": (
        lambda f: (f / "model.safetensors").write_bytes(POINTER), "SnapshotError", "expected a safetensors file",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def built(tiny, tmp_path_factory):
    root = tmp_path_factory.mktemp("spoilt")
    folders = {name: root / str(number) for number, name in enumerate(SPOILT)}
    for name, (spoil, *_) in SPOILT.items():
        spoil(shutil.copytree(tiny, folders[name]))
    folders["tied"] = write_snapshot(root / "tied", Sizes(tied=True, wrapped=False, value_width=24))
    names = {str(folder): name for name, folder in folders.items()}
    answer = ask_source("support.faulty_sources:BuiltReferences", {}, {"folders": list(names)})
    return {names[folder]: said for folder, said in answer.items()}


@pytest.mark.parametrize("name", SPOILT)
def test_a_snapshot_that_does_not_give_every_weight_is_refused(built, name):
    _, error, sentence = SPOILT[name]
    assert built[name][0] == error
    assert sentence in built[name][1]


def test_a_shared_embedding_serves_as_head(built):
    assert built["tied"] == ["", json.dumps({"tied_embeddings": True, "ignored_tensors": {}})]
