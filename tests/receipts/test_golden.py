import dataclasses
import json

import pytest

from receipts.errors import InputError, OutputError
from receipts.golden import Golden, check_run, record_run
from support.run_folder import comparison, write_run


@pytest.fixture
def golden(tmp_path):
    return record_run(write_run(tmp_path / "recorded"), drift=0.2)


def drifted(tmp_path, golden, **changes):
    return check_run(write_run(tmp_path / "now", changed=changes), golden)


def test_the_same_run_is_within_its_bounds(tmp_path, golden):
    assert drifted(tmp_path, golden) == ()


def test_a_figure_may_move_by_the_declared_share_and_no_further(tmp_path, golden):
    assert drifted(tmp_path, golden, candidate=comparison(0.00119)) == ()
    moved = check_run(write_run(tmp_path / "more", changed={"candidate": comparison(0.00121)}), golden)
    assert moved[0].quantity == "candidate.kl_nats.mean"
    assert "expected 0.0008 to 0.0012 (recorded 0.001), got 0.00121" in moved[0].sentence


def test_a_better_figure_is_drift_too(tmp_path, golden):
    assert drifted(tmp_path, golden, candidate=comparison(0.0005))[0].quantity == "candidate.kl_nats.mean"


def test_the_floor_may_fall_and_may_not_grow_without_bound(tmp_path, golden):
    assert drifted(tmp_path, golden, floor=comparison(1e-13)) == ()
    moved = check_run(write_run(tmp_path / "high", changed={"floor": comparison(2e-10)}), golden)
    assert [drift.quantity for drift in moved] == ["floor.kl_nats.mean"]


def test_agreement_is_bounded_by_the_share_of_disagreement(tmp_path, golden):
    assert drifted(tmp_path, golden, candidate=comparison(top1_agreement=0.996)) == ()
    moved = check_run(write_run(tmp_path / "low", changed={"candidate": comparison(top1_agreement=0.99)}), golden)
    assert [drift.quantity for drift in moved] == ["candidate.top1_agreement"]


def test_other_inputs_cannot_be_compared(tmp_path, golden):
    other = dataclasses.replace(golden, inputs={**golden.inputs, "plan_sha256": "0" * 64})
    with pytest.raises(InputError, match="plan_sha256: expected 0000"):
        drifted(tmp_path, other)


def test_a_record_is_written_once_and_read_back(tmp_path, golden):
    golden.write(tmp_path / "golden.json")
    assert Golden.load(tmp_path / "golden.json") == golden
    with pytest.raises(OutputError, match="remove it to record anew"):
        golden.write(tmp_path / "golden.json")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": "source-teacher/golden/v1"}'])
def test_what_is_no_golden_file_is_refused(tmp_path, text):
    (tmp_path / "g.json").write_text(text)
    with pytest.raises(InputError):
        Golden.load(tmp_path / "g.json")


def test_an_unknown_quantity_is_refused_and_not_skipped(tmp_path, golden):
    form = golden.to_dict()
    form["quantities"][0]["quantity"] = "candidate.speed"
    (tmp_path / "g.json").write_text(json.dumps(form))
    with pytest.raises(InputError, match=r"candidate\.speed"):
        drifted(tmp_path, Golden.load(tmp_path / "g.json"))
