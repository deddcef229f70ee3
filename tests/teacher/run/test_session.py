import numpy as np
import pytest

from receipts.cache_plan import verify_receipt
from receipts.errors import DigestMismatchError, IntegrityError, PlanError, SessionError
from support.plans import plan_of, random_ids, replayed_logits
from teacher.backend.device import current_device
from teacher.model.cache import FullSlot, LinearSlot, prepare_cache
from teacher.run import session as session_module
from teacher.run.session import Session
from teacher.snapshot.folder import open_snapshot

IDS = random_ids(40, 90)


@pytest.fixture(scope="module")
def opened(tiny):
    return open_snapshot(tiny)


def start(snapshot, capacity=48):
    return Session(snapshot, prepare_cache(snapshot.config, current_device(), capacity))


@pytest.fixture
def session(opened):
    return start(opened)


def test_the_cache_is_allocated_as_planned_and_receipted(opened):
    prepared = prepare_cache(opened.config, current_device(), 48)
    verify_receipt(prepared.receipt)
    assert prepared.receipt.actual_payload_bytes == prepared.receipt.plan.total_payload_bytes
    assert prepared.receipt.device_identity == current_device().identity


def test_a_cache_has_one_owner(opened):
    prepared = prepare_cache(opened.config, current_device(), 48)
    Session(opened, prepared)
    with pytest.raises(SessionError, match="expected no owner"):
        Session(opened, prepared)


def test_only_the_session_can_make_an_authorization(opened):
    from teacher.model.cache import CacheAuthorization

    with pytest.raises(SessionError):
        prepare_cache(opened.config, current_device(), 48).into_session(CacheAuthorization(object()))


def test_only_the_last_row_gets_logits_unless_all_are_asked_for(session, opened):
    one = session.run_call(IDS[:10])
    session.reset_example()
    every = session.run_call(IDS[:10], all_rows=True)
    assert one.logits.shape == (1, opened.config.vocab_size)
    assert every.logits.shape == (10, opened.config.vocab_size)
    assert np.allclose(one.logits[0], every.logits[-1], atol=1e-4)
    assert one.hidden.shape == (10, opened.config.hidden_size)


def test_a_call_without_the_head_still_advances(session):
    assert session.run_call(IDS[:10], evaluate_output_head=False) is None
    assert session.next_position == 10
    after = session.run_call(IDS[10:12], all_rows=True)
    session.reset_example()
    session.run_call(IDS[:10])
    assert np.array_equal(session.run_call(IDS[10:12], all_rows=True).logits, after.logits)


def test_reset_returns_to_a_fresh_state_bit_for_bit(session):
    first = session.run_call(IDS[:20], all_rows=True).logits
    session.run_call(IDS[20:30])
    session.reset_example()
    assert session.next_position == 0
    assert np.array_equal(session.run_call(IDS[:20], all_rows=True).logits, first)


def test_session_and_replay_agree_bit_for_bit_at_equal_calls(opened):
    calls = ((7, 1, 1, 31), (40,))
    plan = plan_of((IDS, calls[0]), (IDS, calls[1]))
    expected = replayed_logits(opened, plan, 48)
    session = start(opened)
    for rows, lengths in zip(expected, calls, strict=True):
        session.reset_example()
        at, found = 0, []
        for length in lengths:
            found.append(session.run_call(IDS[at : at + length], all_rows=True).logits)
            at += length
        assert np.array_equal(np.concatenate(found), rows)


@pytest.mark.parametrize(
    ("ids", "sentence"),
    [
        ((), "at least one token, got none"),
        ((5, 1000), r"token at position 1: expected an id below \d+, got 1000"),
        ((-1,), "expected an id below"),
        (tuple(range(49)), r"expected at most 48 tokens \(cache of 48\), got 49"),
    ],
)
def test_a_call_that_cannot_run_is_refused_and_changes_nothing(session, ids, sentence):
    with pytest.raises(PlanError, match=sentence):
        session.run_call(ids)
    assert not session.poisoned
    assert session.next_position == 0
    session.run_call(IDS[:2])


def test_a_call_that_fails_poisons_the_session_for_good(session, monkeypatch):
    session.run_call(IDS[:4])

    def fail(*arguments):
        assert session.poisoned, "poisoned while a call runs"
        raise RuntimeError("the device went away")

    drained = []
    monkeypatch.setattr(session_module, "apply_layer", fail)
    monkeypatch.setattr(session_module, "drain", lambda: drained.append(True))
    with pytest.raises(RuntimeError, match="went away"):
        session.run_call(IDS[4:6])
    assert drained == [True]
    monkeypatch.undo()
    for action in (lambda: session.run_call(IDS[4:6]), session.reset_example, session.drain_for_completion):
        with pytest.raises(SessionError, match="poisoned"):
            action()


def test_a_drain_that_fails_too_is_said_with_the_first_failure(session, monkeypatch):
    def fail(*arguments):
        raise RuntimeError("first")

    def stuck():
        raise OSError("second")

    monkeypatch.setattr(session_module, "apply_layer", fail)
    monkeypatch.setattr(session_module, "drain", stuck)
    with pytest.raises(SessionError, match=r"'first'.*'second'"):
        session.run_call(IDS[:2])
    assert session.poisoned


def test_a_caller_that_failed_elsewhere_can_poison(session):
    session.drain_after_failure()
    with pytest.raises(SessionError, match="poisoned"):
        session.run_call(IDS[:2])


def test_a_cache_that_was_tampered_with_is_caught_before_the_call(session):
    slot = next(slot for slot in session._slots if isinstance(slot, FullSlot))
    slot.length += 1
    with pytest.raises(IntegrityError, match="expected 0 tokens before the call, got 1"):
        session.run_call(IDS[:2])


def test_a_buffer_of_another_shape_is_caught_before_the_call(session):
    slot = next(slot for slot in session._slots if isinstance(slot, LinearSlot))
    slot.recurrent = slot.recurrent[..., :1, :]
    with pytest.raises(IntegrityError, match=r"cache buffer .*recurrent: expected"):
        session.run_call(IDS[:2])


def test_a_layer_that_did_not_write_its_state_is_caught_after_the_call(session, monkeypatch):
    monkeypatch.setattr(LinearSlot, "write", lambda self, history, state: None)
    with pytest.raises(IntegrityError, match="expected its state to be written once, got no write"):
        session.run_call(IDS[:2])
    assert session.poisoned


def test_a_cache_that_is_not_fresh_is_refused(opened):
    from teacher.backend.device import mx

    prepared = prepare_cache(opened.config, current_device(), 48)
    slot = next(slot for slot in prepared._slots if isinstance(slot, LinearSlot))
    slot.recurrent = mx.ones_like(slot.recurrent)
    with pytest.raises(IntegrityError, match="expected fresh state, got state left by earlier tokens"):
        Session(opened, prepared)


def test_finishing_hashes_the_files_again(snapshot):
    opened = open_snapshot(snapshot)
    session = start(opened)
    session.run_call(IDS[:2])
    assert session.finish() is opened
    with pytest.raises(SessionError, match="finished"):
        session.run_call(IDS[2:4])
    other = start(opened)
    (snapshot / "config.json").write_text((snapshot / "config.json").read_text() + " ")
    with pytest.raises(DigestMismatchError, match=r"config\.json"):
        other.finish()


def test_the_graph_policy_goes_with_every_call(session, monkeypatch):
    first = session.run_call(IDS[:2])
    monkeypatch.setattr("teacher.model.gated_delta.CHUNK_TOKENS", 32)
    second = session.run_call(IDS[2:4])
    assert first.graph_policy_sha256 != second.graph_policy_sha256
