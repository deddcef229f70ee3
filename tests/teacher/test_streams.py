"""Sources that misbehave, each in a process of its own."""

import os
import tempfile
from pathlib import Path

import pytest
from support.plans import plan_of
from support.sources import WIDTH

from receipts.errors import EngineFailedError, EngineMissingError, NonFiniteError, PlanError
from teacher.streams import ask_source, run_source

PLAN = plan_of(((1, 2, 3, 4, 5), (3, 2)), ((6, 7), (2,)))


KIND = "support.sources:Source"


def run(fault="", **changes):
    with run_source(KIND, {"fault": fault}, PLAN, threads=1, **changes) as source:
        return list(source), source


@pytest.fixture(autouse=True)
def nothing_left():
    before = set(Path(tempfile.gettempdir()).glob("source-teacher-*"))
    yield
    assert set(Path(tempfile.gettempdir()).glob("source-teacher-*")) == before


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


@pytest.mark.parametrize(
    ("fault", "error", "sentence"),
    [
        ("killed", EngineFailedError, r"got signal SIGKILL \(as when memory runs out\)"),
        ("exit", EngineFailedError, r"got exit code 9; last words: chatter on stdout"),
        ("raises", EngineFailedError, "something odd"),
        ("ours", NonFiniteError, "layer 3: expected finite values, got NaN"),
        ("shifted", EngineFailedError, "expected logits of example 1 call 0 position 0, got example 1 call 0 position 1"),
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
