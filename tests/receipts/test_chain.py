import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from receipts.canonical import canonical_bytes
from receipts.chain import FILES, MEASURED, SUMS, RunWriter, verify_run
from receipts.errors import (
    CanonicalError,
    HarnessError,
    IntegrityError,
    MissingFileError,
    OutputError,
    ReceiptFormatError,
    UnexpectedFileError,
)
from support.forgery import forge, reseal
from support.run_folder import comparison, write_run


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run")


def test_a_whole_run_verifies_and_gives_its_verdict(run):
    found = verify_run(run)
    assert found.verdict.status == "PASS"
    assert set(found.digests) == {path.name for path in run.iterdir()}
    assert found.run_sha256 == found.digests["verdict.json"]


def test_the_same_values_give_the_same_bytes(run, tmp_path):
    again = write_run(tmp_path / "again")
    for path in run.iterdir():
        assert (again / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("name", [*FILES, SUMS])
def test_any_changed_byte_is_an_error_that_names_the_file(run, name):
    path = run / name
    data = path.read_bytes()
    # Every byte of the small files; of the others every 7th, and each that gives JSON its form.
    places = [i for i in range(len(data)) if len(data) < 700 or i % 7 == 0 or data[i] in b'{}[]:,"']
    for place in places:
        changed = bytearray(data)
        changed[place] ^= (0x01, 0x20, 0x80)[place % 3]  # another letter, the other case, no ASCII at all
        path.write_bytes(bytes(changed))
        with pytest.raises(HarnessError) as caught:
            verify_run(run)
        # Nothing but its line vouches for host.json: there the two are named together, the file first.
        line = data[data.rfind(b"\n", 0, place) + 1 :].split(b"\n", 1)[0]
        first = "host.json" if name == SUMS and line.endswith(b"  host.json") else name
        found = str(caught.value)
        assert found.startswith((first, name)) and name in found, (place, found)
    path.write_bytes(data)
    verify_run(run)


@pytest.mark.parametrize("name", [*FILES, SUMS])
def test_a_missing_file_is_named(run, name):
    (run / name).unlink()
    with pytest.raises(MissingFileError, match=name):
        verify_run(run)


def test_a_file_too_many_is_named(run):
    (run / "extra.txt").write_text("x")
    with pytest.raises(UnexpectedFileError, match=r"extra\.txt"):
        verify_run(run)


def test_a_link_in_the_place_of_a_file_is_refused(run, tmp_path):
    (run / "plan.json").rename(tmp_path / "plan.json")
    (run / "plan.json").symlink_to(tmp_path / "plan.json")
    with pytest.raises(UnexpectedFileError, match=r"plan\.json"):
        verify_run(run)


def test_reordered_keys_are_not_the_same_bytes(run):
    form = json.loads((run / "plan.json").read_bytes())
    (run / "plan.json").write_text(json.dumps(dict(reversed(form.items()))))
    reseal(run)
    with pytest.raises(HarnessError, match=r"plan\.json.*RFC 8785"):
        verify_run(run)


@pytest.mark.parametrize("name", [*MEASURED, "report.json", "policy.toml"])
def test_a_forged_file_with_new_sums_is_found_by_what_used_it(run, name):
    data = (run / name).read_bytes()
    if name == "policy.toml":
        forged = data.replace(b"0.01", b"0.02")
    else:
        form = json.loads(data)
        form["forged"] = True
        forged = canonical_bytes(form)
    (run / name).write_bytes(forged)
    reseal(run)
    with pytest.raises(IntegrityError, match=rf"^{name}: expected sha256 .* recorded it"):
        verify_run(run)


def test_a_forged_verdict_is_decided_again(tmp_path):
    run = write_run(tmp_path / "run", changed={"candidate": comparison(0.5)})
    assert verify_run(run).verdict.status == "FAIL"
    form = json.loads((run / "verdict.json").read_bytes())
    form["status"] = "PASS"
    (run / "verdict.json").write_bytes(canonical_bytes(form))
    reseal(run)
    with pytest.raises(IntegrityError, match=r"verdict\.json: expected what report\.json and policy\.toml give"):
        verify_run(run)


def test_a_key_that_stands_twice_is_refused(run):
    data = (run / "plan.json").read_bytes()
    (run / "plan.json").write_bytes(b'{"examples":[],' + data[1:])
    reseal(run)
    with pytest.raises(HarnessError, match=r"^plan\.json: expected each key once, got 'examples' twice"):
        verify_run(run)


@pytest.mark.parametrize("data", [b"[" * 900 + b"]" * 900, b"1" * 5000, b"[]", b""])
def test_what_is_no_receipt_is_named(run, data):
    (run / "host.json").write_bytes(data)
    reseal(run)
    with pytest.raises(HarnessError, match=r"^host\.json: expected"):
        verify_run(run)


def call(number, **changes):
    return lambda form: form["calls"][number].update(changes)


def example(number, **changes):
    return lambda form: form["examples"][number].update(changes)


FORGED = {
    "a call left out": ("calls.json", lambda form: form["calls"].pop(), "expected 3 calls of plan.json, got 2"),
    "calls in another order": ("calls.json", lambda form: form["calls"].reverse(), "expected position 0 and 3 rows"),
    "another position": ("calls.json", call(1, position=2), "expected position 3 and 1 rows"),
    "an index that is no number": ("calls.json", call(1, call=True), "expected int, got bool"),
    "another width": ("calls.json", call(0, width=99), "expected rows of 100 logits as in report.json, got 99"),
    "no digest": ("calls.json", call(0, teacher_sha256="A" * 64), "expected teacher_sha256 to be 64 hex digits"),
    "a field too many": ("calls.json", call(0, note="x"), "unknown ['note']"),
    "another graph policy": ("calls.json", lambda form: form["graph_policy"].update(tf32="1"), "expected graph policy"),
    "a token more": ("plan.json", lambda form: form["examples"][0]["token_ids"].append(1), "sum to their number"),
    "tokens that are no ids": ("plan.json", example(0, token_ids=["a"] * 4), "expected token ids"),
    "a token below 0": ("plan.json", example(0, token_ids=[0, 1, 2, -1]), "expected token ids"),
    "tokens that are no list": ("plan.json", example(0, token_ids=5), "expected its fields"),
    "an empty call": ("plan.json", example(1, calls=[0, 2]), "calls of at least one token"),
    "no examples": ("plan.json", lambda form: form.update(examples=[]), "expected at least one example"),
    "a cache that held tokens": (
        "cache.json", lambda form: form["receipt"].update(fresh_semantic_state=False), "expected receipt_sha256",
    ),
    "a path out of the snapshot": (
        "snapshot.json", lambda form: form["manifest"]["entries"][0].update(path="../x"), "expected a plain path",
    ),
    "another root": (
        "snapshot.json", lambda form: form["manifest"].update(root_sha256="0" * 64), "expected root sha256",
    ),
    "fewer positions": (
        "report.json", lambda form: form["candidate"].update(positions=5), "expected the 6 positions of plan.json",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FORGED)
def test_a_run_forged_with_every_digest_made_anew_is_found_by_what_it_says(run, case):
    name, edit, sentence = FORGED[case]
    forge(run, name, edit)
    with pytest.raises((IntegrityError, ReceiptFormatError), match=re.escape(sentence)) as caught:
        verify_run(run)
    assert str(caught.value).startswith(name)


def test_a_forgery_that_changes_nothing_is_no_forgery(run):
    before = verify_run(run).run_sha256
    forge(run, "plan.json", lambda form: None)
    assert verify_run(run).run_sha256 == before


def test_a_run_is_not_finished_without_all_its_receipts(tmp_path):
    with pytest.raises(MissingFileError, match=r"^cache\.json"), RunWriter(tmp_path / "run") as writer:
        for name in FILES:
            if name != "cache.json":
                writer.add_bytes(name, b"{}")
        writer.finish()
    assert list(tmp_path.iterdir()) == []


UNWRITABLE = [np.float32(1), np.float64(1), np.int64(1), b"x", {1}, float("nan"), Path("x"), 2**60]


@pytest.mark.parametrize("value", UNWRITABLE, ids=lambda value: type(value).__name__)
def test_a_record_of_unknown_type_is_an_error_and_never_a_text(tmp_path, value):
    with pytest.raises(CanonicalError, match=r"^\$\.here\[0\]: expected"), RunWriter(tmp_path / "run") as writer:
        writer.add("plan.json", {"here": [value]})
    assert list(tmp_path.iterdir()) == []


def test_sums_are_what_sha256sum_reads(run):
    if shutil.which("sha256sum") is None:
        pytest.skip("needs the program sha256sum")
    import subprocess

    done = subprocess.run(["sha256sum", "--check", "--strict", SUMS], cwd=run, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_failed_run_leaves_nothing(tmp_path):
    with pytest.raises(RuntimeError, match="stop"), RunWriter(tmp_path / "deep" / "run") as writer:
        writer.add("plan.json", {"schema": "source-teacher/plan/v1"})
        raise RuntimeError("stop")
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_never_written_over(run):
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    with pytest.raises(OutputError, match="expected no such folder yet"):
        RunWriter(run)
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="expected a place that can be written"):
        RunWriter(tmp_path / "file" / "run")
    if os.getuid() != 0:
        (tmp_path / "closed").mkdir(mode=0o500)
        with pytest.raises(OutputError, match="expected a place that can be written"):
            RunWriter(tmp_path / "closed" / "run")
