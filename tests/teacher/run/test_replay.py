import numpy as np
import pytest

from receipts.errors import NonFiniteError, PlanError, PrecisionError
from support.plans import plan_of, random_ids
from teacher.backend.precision import Precision
from teacher.run import replay as replay_module
from teacher.run.replay import replay
from teacher.snapshot.folder import read_snapshot

IDS = random_ids(20, 90)


@pytest.fixture(scope="module")
def opened(tiny):
    return read_snapshot(tiny)


def test_a_replay_tells_its_layers_and_leaves_hidden_states_receipt_and_policy(opened):
    told = []
    found = replay(
        opened, plan_of((IDS, (12, 8)), (IDS[:5], (5,))), max_sequence_tokens=32,
        on_layer=lambda done, total: told.append((done, total)),
    )  # fmt: skip
    assert told == [(n, 4) for n in range(1, 5)]
    assert [rows.shape for rows in found.hidden] == [(20, 96), (5, 96)]
    assert found.cache_receipt.plan.max_sequence_tokens == 32
    assert found.policy.tf32 == "0"
    assert found.policy_sha256 == found.policy.sha256()


def test_the_same_replay_gives_the_same_bits(opened):
    plan = plan_of((IDS, (20,)))
    first, second = (replay(opened, plan, max_sequence_tokens=20) for _ in range(2))
    assert np.array_equal(first.hidden[0], second.hidden[0])
    assert first.cache_receipt == second.cache_receipt


def test_a_plan_longer_than_the_cache_is_refused_before_anything_runs(opened, monkeypatch):
    monkeypatch.setattr(replay_module, "prepare_layer", lambda stored: pytest.fail("ran a layer"))
    with pytest.raises(PlanError, match=r"expected at most 3 tokens \(cache of 16\), got 7"):
        replay(opened, plan_of((IDS, (13, 7))), max_sequence_tokens=16)


def test_a_device_that_multiplies_in_tf32_is_refused(opened, monkeypatch):
    measured = Precision(product=2.1e-4, vector_product=2e-7, function_units=1.0)
    monkeypatch.setattr(replay_module, "measure", lambda: measured)
    with pytest.raises(PrecisionError, match="TF32"):
        replay(opened, plan_of((IDS, (20,))), max_sequence_tokens=20)


def test_the_first_layer_that_is_not_finite_is_named(opened, monkeypatch):
    original = replay_module.apply_layer
    seen = []

    def spoilt(x, *rest):
        seen.append(1)
        out = original(x, *rest)
        return out * float("nan") if len(seen) > 2 else out  # layer 1 is the third call of two a layer

    monkeypatch.setattr(replay_module, "apply_layer", spoilt)
    with pytest.raises(NonFiniteError, match=r"teacher layer 1: expected finite values in example 'e0'.*call 0"):
        replay(opened, plan_of((IDS, (12, 8))), max_sequence_tokens=20)


def test_a_policy_that_changes_during_a_replay_stops_it(opened, monkeypatch):
    monkeypatch.setattr("teacher.model.gated_delta.CHUNK_TOKENS", 64)
    original = replay_module.apply_layer

    def meddle(*arguments):
        monkeypatch.setattr("teacher.model.gated_delta.CHUNK_TOKENS", 32)
        return original(*arguments)

    monkeypatch.setattr(replay_module, "apply_layer", meddle)
    with pytest.raises(RuntimeError, match="policy changed"):
        replay(opened, plan_of((IDS, (12, 8))), max_sequence_tokens=20)
