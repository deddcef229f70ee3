"""The three-way check: who of teacher, PyTorch and the F64 definition agrees, and the definition as a source."""

import math

import pytest

from receipts.comparison import Where
from support.plans import random_ids
from support.run_folder import comparison
from teacher.diagnose.arbitrate import _sentence, arbitrate, disagrees
from teacher.plans.call_shape import CallShape
from teacher.plans.plan import Example, Plan
from teacher.sides.roster import Roster, Sides

LIMIT = 1e-6
PLAN = Plan(
    examples=(
        Example(name="short", kind="tokens", token_ids=(1, 2, 3), calls=(3,), text=None),
        Example(name="long", kind="tokens", token_ids=tuple(random_ids(80, 400)), calls=(60, 1, 19), text=None),
    ),
    source=None,
    call_shape=CallShape.parse("prefill"),
)


def test_it_is_called_for_above_the_policys_floor_alone():
    assert not disagrees(comparison(1e-11), LIMIT)
    assert disagrees(comparison(1e-5), LIMIT)
    assert disagrees(comparison(kl_nats=None), LIMIT)
    assert disagrees(comparison(1e-11, first_nonfinite=Where(example=0, position=1)), LIMIT)


@pytest.mark.parametrize(
    ("teacher", "reference", "between", "part"),
    [
        (1e-12, 0.2, 0.2, "the teacher and the F64 definition agree on the first 83 tokens of 'short' (1e-12 nats),"
                          " PyTorch is off by 0.2 nats"),
        (0.2, 1e-12, 0.2, "PyTorch and the F64 definition agree on the first 83 tokens of 'short' (1e-12 nats), the"
                          " teacher is off by 0.2 nats"),
        (0.2, 0.3, 0.1, "no two of teacher, PyTorch and the F64 definition agree"),
        (1e-12, 1e-12, 1e-12, "agree on the first 83 tokens of 'short', so they part further on"),
        (1e-12, math.inf, math.inf, "PyTorch is off by rows that are not finite"),
    ],
)  # fmt: skip
def test_the_pair_that_agrees_is_named(teacher, reference, between, part):
    assert part in _sentence(PLAN, teacher, reference, between, LIMIT)


@pytest.mark.slow
def test_on_a_sound_model_all_three_agree(tiny, tmp_path):
    roster = Roster(
        snapshot=tiny, gguf=tmp_path / "none", plan=PLAN, work=tmp_path, max_sequence_tokens=80, max_call_tokens=60,
        teacher_kind="teacher", reference_kind="transformers", engine_kind="llama_cpp", engine_settings={},
    )  # fmt: skip
    sides = Sides(threads=1, real_vocabulary=400, on_progress=lambda *_: None)
    floor = sides.compare(roster.teacher(), roster.reference())
    # F32 against F64 and F32 against F32: the bound of tests/parity, in nats.
    found = arbitrate(sides, roster, floor, 4e-7)
    worst = max(floor.by_example, key=lambda bucket: bucket.kl_nats_mean).label
    assert found.positions == {"short": 3, "long": 64}[worst]
    assert 0 < found.teacher_kl_nats < 4e-7
    assert 0 < found.reference_kl_nats < 4e-7
    assert "teacher, PyTorch and the F64 definition agree" in found.sentence
