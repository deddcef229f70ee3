"""Sources that misbehave, each in a process of its own."""

import os
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest

from receipts.errors import EngineFailedError, EngineMissingError, NonFiniteError, PlanError
from support.faulty_sources import NOISE
from support.plans import plan_of
from support.sources import WIDTH
from teacher.process.streams import ask_source, run_source

PLAN = plan_of(((1, 2, 3, 4, 5), (3, 2)), ((6, 7), (2,)))
KIND = "support.sources:Source"


def run(fault="", **changes):
    with run_source(KIND, {"fault": fault}, PLAN, threads=1, **changes) as source:
        return list(source), source


FAULTY = "support.faulty_sources"


def held():
    """What a run could leave: files, threads, open files, children."""
    fds = Path("/proc/self/fd")
    return (
        set(Path(tempfile.gettempdir()).iterdir()),
        threading.active_count(),
        len(list(fds.iterdir())) if fds.is_dir() else 0,
        children(),
    )


def children():
    lists = Path("/proc/self/task").glob("*/children")
    return {number for path in lists for number in path.read_text().split()}


def gone(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    state = Path(f"/proc/{process}/stat")  # an orphan that nobody has reaped yet has ended all the same
    return state.is_file() and state.read_text().rsplit(")", 1)[1].split()[0] == "Z"


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("teacher.process.streams._GRACE_SECONDS", 0.5)
    before = held()
    yield
    assert held() == before


def test_blocks_arrive_in_order_and_whole():
    blocks, source = run()
    assert [(b.example, b.call, b.position, b.logits.shape) for b in blocks] == [
        (0, 0, 0, (3, WIDTH)), (0, 1, 3, (2, WIDTH)), (1, 0, 0, (2, WIDTH))
    ]  # fmt: skip
    assert blocks[2].logits[0, 0] == 100
    assert source.closing["peak_memory_bytes"] > 1 << 20


def test_a_source_sees_its_own_settings_and_none_of_the_parents(monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_PARENT", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    _, source = run(env={"EXTRA": "yes"})
    assert source.description["seen"] == {"OMP_NUM_THREADS": "1", "SECRET_OF_THE_PARENT": None, "EXTRA": "yes"}
    assert source.description["environment"]["EXTRA"] == "yes"
    assert os.environ["OMP_NUM_THREADS"] == "7"
    assert "EXTRA" not in os.environ


@pytest.mark.parametrize(
    ("fault", "error", "sentence"),
    [
        ("killed", EngineFailedError, r"got signal SIGKILL \(as when memory runs out\)"),
        ("exit", EngineFailedError, r"got exit code 9; last words: chatter on stdout"),
        ("raises", EngineFailedError, "something odd"),
        ("ours", NonFiniteError, "layer 3: expected finite values, got NaN"),
        ("shifted", EngineFailedError, "expected logits of example 1 call 0 position 0, got example 1 call 0 pos"),
        ("extra", EngineFailedError, "expected no more logits"),
    ],
)
def test_a_source_that_fails_is_one_clear_error(fault, error, sentence):
    with pytest.raises(error, match=sentence):
        run(fault)


def test_a_source_is_ended_when_its_reader_stops():
    with run_source(KIND, {"fault": "hangs"}, PLAN, threads=1) as source:
        next(iter(source))
        process = source.process_id
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_a_source_that_ignores_every_polite_signal_is_ended_all_the_same():
    with run_source(f"{FAULTY}:Deaf", {}, PLAN, threads=1) as source:
        next(iter(source))
        process = source.process_id
    assert gone(process)


@pytest.mark.parametrize(
    ("noise", "sentence"),
    [
        ("text", "worker message: expected at most .* bytes, got"),
        ("no header", "worker message: expected JSON of a header, got b'{not json'"),
        ("unknown type", "worker message: expected one of describe, block, .*gossip"),
        ("another message", "expected a message 'block', got 'answer'"),
        ("a field missing", "worker message 'block': expected call to be a count, got 'None'"),
        ("too few bytes", "expected 1x11 logits, got 10"),
        ("closing facts of another form", "expected closing facts by name, got"),
        ("half a message", "expected the engine to finish its calls, got exit code 9"),
    ],
)
def test_noise_on_the_message_pipe_is_one_clear_error(noise, sentence):
    with (
        pytest.raises(EngineFailedError, match=sentence),
        run_source(f"{FAULTY}:Noisy", {"noise": noise}, PLAN, threads=1) as source,
    ):
        list(source)


def test_all_noise_is_tried():
    (marks,) = [m for m in test_noise_on_the_message_pipe_is_one_clear_error.pytestmark if m.name == "parametrize"]
    assert {noise for noise, _ in marks.args[1]} == set(NOISE)


def test_a_source_that_hangs_with_its_messages_ended_is_not_said_to_be_killed():
    with (
        pytest.raises(EngineFailedError, match=r"got no message more, and no end for 0\.5 seconds"),
        run_source(f"{FAULTY}:Silent", {}, PLAN, threads=1) as source,
    ):
        list(source)


@pytest.mark.parametrize("name", ["Lingering", "Parent"])
def test_a_source_that_is_done_is_ended_with_its_children(name):
    with run_source(f"{FAULTY}:{name}", {}, PLAN, threads=1) as source:
        assert len(list(source)) == 3
    assert gone(source.process_id)
    assert gone(source.description.get("child", source.process_id))


def test_progress_before_the_first_logits_reaches_the_parent():
    seen = []
    with run_source(f"{FAULTY}:Preparing", {}, PLAN, threads=1, on_progress=seen.append) as source:
        for _ in source:
            assert (seen[0].unit, seen[0].done, seen[0].total, seen[0].kind) == ("layers", 1, 3, f"{FAULTY}:Preparing")
    assert ("layers", 3) in [(p.unit, p.done) for p in seen]
    assert (seen[-1].unit, seen[-1].done, seen[-1].total) == ("positions", 7, 7)


def test_a_call_larger_than_a_message_arrives_in_parts():
    plan = plan_of((range(12), (12,)))
    with run_source(f"{FAULTY}:Colossal", {}, plan, threads=1) as source:
        parts = [(block.position, block.logits.shape[0], block.logits[:, -1].copy()) for block in source]
    assert [(position, rows) for position, rows, _ in parts] == [(0, 5), (5, 5), (10, 2)]
    assert np.array_equal(np.concatenate([last for *_, last in parts]), np.arange(12))


def test_a_run_that_is_never_read_leaves_nothing():
    with run_source(KIND, {}, PLAN, threads=1):
        pass


def test_a_question_is_answered_without_a_plan():
    assert ask_source(KIND, {"a": 1}, {"b": [2]}) == {"echo": {"b": [2]}, "spec": {"a": 1}}


@pytest.mark.parametrize("kind", ["no_such_engine", "no_such_module:Engine", "support.plans:NoSuchClass"])
def test_an_engine_that_is_not_there_is_named(kind):
    with pytest.raises(EngineMissingError, match=kind.split(":")[0]), run_source(kind, {}, PLAN, threads=1):
        pass


def test_calls_that_do_not_cover_an_example_are_refused_here():
    class Bad:
        name, token_ids, calls = "bad", (1, 2, 3), (2,)

    with pytest.raises(PlanError, match=r"expected calls that cover 3 tokens, got \(2,\)"):
        run_source(KIND, {}, type("P", (), {"examples": (Bad,)}), threads=1)
