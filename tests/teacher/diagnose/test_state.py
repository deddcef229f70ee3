"""State that an engine carries where it should not: told apart by running one example again in other company."""

import math

import pytest

from receipts.comparison import Bucket
from support.run_folder import comparison
from teacher.diagnose.state import examine_state
from teacher.plans.call_shape import CallShape
from teacher.plans.plan import Example, Plan


def example(name, ids, calls=(6, 4)):
    return Example(name=name, kind="tokens", token_ids=tuple(ids), calls=calls, text=None)


PLAN = Plan(
    examples=(
        example("first", [1] * 10),
        example("other", [2] * 10),
        example("like", [1] * 9 + [3]),
    ),
    source=None,
    call_shape=CallShape.parse("prefill"),
)


def found(kls):
    return comparison(
        by_example=tuple(
            Bucket(label=name, positions=10, kl_nats_mean=kl, kl_nats_max=kl, top1_agreement=1.0)
            for name, kl in kls.items()
            if math.isfinite(kl)
        )
    )


class Scripted:
    """Stands for the sides: says what an engine of some fault would."""

    def __init__(self, kl):
        self.kl, self.runs = kl, []

    def compare(self, expected, actual):
        plan = expected[1]
        assert plan == actual[1]
        names = tuple(one.name for one in plan.examples)
        self.runs.append((names, plan.examples[-1].calls))
        return found({one.name: self.kl(names[: i + 1], one.calls) for i, one in enumerate(plan.examples)})


def examine(kl):
    sides = Scripted(kl)
    names = tuple(one.name for one in PLAN.examples)
    within = found({one.name: kl(names[: i + 1], one.calls) for i, one in enumerate(PLAN.examples)})
    return examine_state(sides, lambda *side: side, lambda *side: side, PLAN, within), sides.runs


def test_a_sound_engine_costs_two_short_runs_and_says_nothing():
    said, runs = examine(lambda names, calls: 0.01 + len(names) / 1000 + len(calls) / 1000)
    assert said == ()
    assert runs == [(("like",), (6, 4)), (("like",), (10,))]


def test_a_cache_that_is_not_reset_is_named():
    (said,), _ = examine(lambda names, calls: 0.01 if len(names) == 1 else 0.5)
    assert "'other' is off by 0.5 nats behind the examples before it and by 0.01 nats alone" in said
    assert "the engine's cache is not reset between examples" in said


def test_a_prompt_cache_is_told_from_it_by_the_company_it_needs():
    (said,), runs = examine(lambda names, calls: 0.5 if names[-1] == "like" and "first" in names else 0.01)
    assert "behind 'first', which begins with the same 9 tokens: a prompt cache hit replays a wrong state" in said
    assert [names for names, _ in runs] == [("like",), ("other", "like"), ("first", "like"), ("like",)]


def test_a_cache_that_fills_up_is_not_called_a_prompt_cache():
    (said,), _ = examine(lambda names, calls: 0.5 if len(names) > 2 else 0.01)
    assert "not reset between examples, after more than one of them" in said


def test_state_between_calls_is_seen_by_one_call():
    (said,), _ = examine(lambda names, calls: 0.01 if len(calls) == 1 else 0.5)
    assert "is off by 0.5 nats in its 2 calls and by 0.01 nats in one" in said


@pytest.mark.parametrize("kl", [0.5, math.inf])
def test_an_engine_that_is_wrong_everywhere_carries_nothing(kl):
    assert examine(lambda names, calls: kl)[0] == ()


def test_rows_that_are_not_finite_count_as_far_off():
    (said,), _ = examine(lambda names, calls: 0.01 if len(names) == 1 else math.inf)
    assert "rows that are not finite behind the examples before it" in said
