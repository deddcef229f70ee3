import json
import os
import shutil

import pytest
from support.run_folder import comparison, write_run

from receipts.canonical import canonical_bytes
from receipts.chain import FILES, SUMS, RunWriter, verify_run
from receipts.errors import HarnessError, IntegrityError, MissingFileError, OutputError, UnexpectedFileError


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run")


def reseal(folder):
    """Write SHA256SUMS anew, as somebody who forges a file would."""
    import hashlib

    lines = [f"{hashlib.sha256((folder / n).read_bytes()).hexdigest()}  {n}\n" for n in sorted(FILES)]
    (folder / SUMS).write_text("".join(lines))


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
        changed[place] ^= 0x01
        path.write_bytes(bytes(changed))
        with pytest.raises(HarnessError) as caught:
            verify_run(run)
        assert name in str(caught.value), (place, str(caught.value))
    path.write_bytes(data)
    verify_run(run)


@pytest.mark.parametrize("name", [*FILES, SUMS])
def test_a_missing_file_is_named(run, name):
    (run / name).unlink()
    with pytest.raises(MissingFileError, match=name):
        verify_run(run)


def test_a_file_too_many_is_named(run):
    (run / "extra.txt").write_text("x")
    with pytest.raises(UnexpectedFileError, match="extra.txt"):
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


@pytest.mark.parametrize("name", ["plan.json", "cache.json", "report.json", "candidate.json", "policy.toml"])
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
