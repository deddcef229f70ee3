import json

import pytest

from receipts.cli import main
from support.findings import audit, diagnosis
from support.forgery import reseal
from support.run_folder import POLICY, comparison, write_run


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run")


def test_verify_says_that_a_run_is_whole(run, capsys):
    assert main(["verify", str(run)]) == 0
    out = capsys.readouterr().out
    assert "whole, 11 files" in out
    assert "verdict: PASS" in out


def test_verify_exits_with_2_and_names_the_changed_file(run, capsys):
    data = (run / "calls.json").read_bytes()
    (run / "calls.json").write_bytes(data[:-2] + b" }")
    assert main(["verify", str(run), "--json"]) == 2
    captured = capsys.readouterr()
    assert "calls.json" in json.loads(captured.out)["error"]["message"]
    assert captured.err.startswith("receipts: calls.json")


def test_a_failed_gate_is_still_a_whole_run(tmp_path, capsys):
    run = write_run(tmp_path / "run", changed={"candidate": comparison(0.5)})
    assert main(["verify", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "FAIL"


def test_show_prints_sides_checks_and_digests(run, capsys):
    assert main(["show", str(run)]) == 0
    out = capsys.readouterr().out
    for part in ("teacher against pytorch-f32", "teacher against candidate", "PASS", "tiny.gguf", "plan.json"):
        assert part in out
    assert main(["show", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["receipts"]["verdict.json"]["status"] == "PASS"


def test_show_prints_causes(tmp_path, capsys):
    run = write_run(tmp_path / "run", changed={"audit": audit(), "diagnosis": diagnosis()})
    assert main(["show", str(run)]) == 0
    out = capsys.readouterr().out
    for part in ("the sign of A_log is lost", "weights: weights does something",
                 "first in down_proj", "PyTorch is off"):  # fmt: skip
        assert part in out


@pytest.mark.parametrize(("limit", "code"), [(b"0.01", 0), (b"0.0001", 4), (b"0.00105", 3)])
def test_decide_exits_by_the_verdict_of_any_policy(run, tmp_path, limit, code, capsys):
    (tmp_path / "p.toml").write_bytes(POLICY.replace(b"max = 0.01", b"max = " + limit))
    assert main(["decide", str(run / "report.json"), str(tmp_path / "p.toml"), "--json"]) == code
    assert json.loads(capsys.readouterr().out)["policy"] == "small"


def test_what_a_stranger_wrote_cannot_move_the_cursor(tmp_path, capsys):
    run = write_run(tmp_path / "run", changed={"notes": ("\x1b[2J\nPASS: forged",)})
    assert main(["show", str(run)]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "note: \\x1b[2J\\nPASS: forged" in out.splitlines()


def test_show_of_a_run_without_host_facts_is_one_sentence(run, capsys):
    (run / "host.json").write_bytes(b'{"schema":"source-teacher/host/v1"}')
    reseal(run)
    assert main(["verify", str(run)]) == 0
    capsys.readouterr()
    assert main(["show", str(run)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("data", [b"[]", b"[" * 900 + b"]" * 900, b"[" * 10**5, b"1" * 5000, b"{", b"\xff"])
def test_decide_refuses_what_is_no_report_in_one_sentence(data, run, tmp_path, capsys):
    (tmp_path / "odd.json").write_bytes(data)
    assert main(["decide", str(tmp_path / "odd.json"), str(run / "policy.toml")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("receipts: odd.json: expected") and error.count("\n") == 1


@pytest.mark.parametrize("arguments", [["verify", "nowhere"], ["decide", "none.json", "none.toml"]])
def test_what_is_not_there_is_one_sentence_and_exit_code_2(arguments, capsys):
    assert main(arguments) == 2
    assert capsys.readouterr().err.count("\n") == 1
