import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from receipts.errors import EngineFailedError
from support.plans import plan_of
from teacher.process.alignment import align, check_coverage, digest_blocks
from teacher.process.sources import LogitBlock

V = 5


def rows_of(example, start, stop):
    return np.arange(start, stop, dtype=np.float32)[:, None] + np.arange(V, dtype=np.float32) / 10 + example * 1000


def blocks_of(plan, pieces=(1 << 20,)):
    """A plan's blocks, each call cut again into pieces of the given sizes in turn."""
    turn = 0
    for index, example in enumerate(plan.examples):
        at = 0
        for call, length in enumerate(example.calls):
            end = at + length
            while at < end:
                stop = min(end, at + pieces[turn % len(pieces)])
                yield LogitBlock(example=index, call=call, position=at, logits=rows_of(index, at, stop))
                at, turn = stop, turn + 1


cuts = st.lists(st.integers(1, 7), min_size=1, max_size=6)


@given(left=cuts, right=cuts, pieces=cuts)
def test_any_two_cuts_of_the_same_examples_give_equal_rows(left, right, pieces):
    total = sum(left)
    other, rest = [], total
    for length in right:
        if rest > length:
            other.append(length)
            rest -= length
    other.append(rest)
    plans = [plan_of((range(total), calls), (range(3), (3,))) for calls in (left, other)]
    seen = [0, 0]
    for rows in align(blocks_of(plans[0]), blocks_of(plans[1], pieces)):
        assert np.array_equal(rows.expected, rows.actual)
        assert rows.position == seen[rows.example]
        seen[rows.example] += rows.expected.shape[0]
    assert seen == [total, 3]


def test_a_side_that_ends_early_is_named_with_its_place():
    whole, short = plan_of((range(6), (6,))), plan_of((range(4), (4,)))
    with pytest.raises(EngineFailedError, match="candidate: expected logits of example 0 position 4, got the end"):
        list(align(blocks_of(whole), blocks_of(short), names=("teacher", "candidate")))
    with pytest.raises(EngineFailedError, match="teacher: expected logits of example 0 position 4, got the end"):
        list(align(blocks_of(short), blocks_of(whole), names=("teacher", "candidate")))


@given(pieces=cuts)
def test_a_calls_digest_does_not_depend_on_its_blocks(pieces):
    plan = plan_of((range(9), (4, 5)), (range(2), (2,)))
    stream = digest_blocks(blocks_of(plan, pieces))
    list(stream)
    assert [(d.example, d.call, d.position, d.rows, d.width) for d in stream.digests] == [
        (0, 0, 0, 4, V), (0, 1, 4, 5, V), (1, 0, 0, 2, V)
    ]  # fmt: skip
    assert stream.digests[1].sha256 == hashlib.sha256(rows_of(0, 4, 9).astype("<f4").tobytes()).hexdigest()


def test_one_changed_bit_changes_one_digest():
    plan = plan_of((range(9), (4, 5)))

    def spoilt():
        for block in blocks_of(plan):
            if block.call == 1:
                block.logits[2, 3] = np.nextafter(block.logits[2, 3], np.float32(1e9))
            yield block

    plain, changed = digest_blocks(blocks_of(plan)), digest_blocks(spoilt())
    list(plain), list(changed)
    assert [a.sha256 == b.sha256 for a, b in zip(plain.digests, changed.digests, strict=True)] == [True, False]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda blocks: blocks[:-1], "expected logits of example 1 call 0 position 0, got the end of the stream"),
        (lambda blocks: blocks[1:], "expected logits of example 0 call 0 position 0, got example 0 call 1"),
        (lambda blocks: [*blocks, blocks[-1]], "expected no more logits, got example 1"),
        (lambda blocks: [blocks[0], blocks[0]], "expected logits of example 0 call 1 position 4, got"),
        (lambda blocks: [blocks[0], widened(blocks[1])], f"expected up to 5 rows of {V} logits"),
    ],
)
def test_a_stream_is_held_to_its_plan(change, sentence):
    plan = plan_of((range(9), (4, 5)), (range(2), (2,)))
    with pytest.raises(EngineFailedError, match=sentence):
        list(check_coverage(change(list(blocks_of(plan))), plan, "engine"))


def widened(block):
    logits = np.zeros((block.logits.shape[0], V + 1), np.float32)
    return LogitBlock(example=block.example, call=block.call, position=block.position, logits=logits)
