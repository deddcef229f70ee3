"""Who is off when teacher and PyTorch disagree: both against the F64 definition, on a short text."""

from __future__ import annotations

import math

from receipts.comparison import Comparison
from receipts.diagnosis import Arbitration
from teacher.diagnose.examples import first_calls, nats, worst_example
from teacher.plans.plan import Example, Plan
from teacher.sides.roster import Roster, Sides

_TOKENS = 64  # the definition goes token by token, in F64


def disagrees(floor: Comparison, limit: float) -> bool:
    """Say whether teacher and PyTorch differ by more than the policy's floor."""
    return _mean(floor) > limit


def arbitrate(sides: Sides, roster: Roster, floor: Comparison, limit: float) -> Arbitration:
    """Run teacher, PyTorch and the definition on the beginning of the example at which the first two differ most.

    Args:
        sides, roster: where and what runs.
        floor: teacher against PyTorch over the whole plan.
        limit: mean KLD in nats up to which two of them agree.
    """
    plan = _beginning(roster.plan, floor)
    teacher = roster.teacher("teacher, arbitrated", plan=plan)
    reference = roster.reference("pytorch, arbitrated", plan=plan)
    arbiter = roster.arbiter("definition", plan=plan)
    against = [sides.compare(arbiter, side) for side in (teacher, reference)]
    between = sides.compare(teacher, reference)
    return Arbitration(
        positions=plan.positions,
        teacher_kl_nats=_known(against[0]),
        reference_kl_nats=_known(against[1]),
        between_kl_nats=_known(between),
        sentence=_sentence(plan, _mean(against[0]), _mean(against[1]), _mean(between), limit),
    )


def _sentence(plan: Plan, teacher: float, reference: float, between: float, limit: float) -> str:
    place = f"on the first {plan.positions} tokens of '{plan.examples[0].name}'"
    off = {"the teacher": teacher, "PyTorch": reference}
    wrong = [name for name, kl in off.items() if kl > limit]
    if not wrong and between <= limit:
        return f"three-way check: teacher, PyTorch and the F64 definition agree {place}, so they part further on"
    if len(wrong) != 1:
        shown = " and ".join(f"{name} by {nats(kl)}" for name, kl in off.items())
        return f"three-way check: no two of teacher, PyTorch and the F64 definition agree {place}: {shown}"
    right = next(name for name in off if name not in wrong)
    return (
        f"three-way check: {right} and the F64 definition agree {place} ({nats(off[right])}), {wrong[0]} is off by"
        f" {nats(off[wrong[0]])}"
    )


def _beginning(plan: Plan, floor: Comparison) -> Plan:
    """Return the first tokens of the example at which the floor is highest, with its calls."""
    example = plan.examples[worst_example(plan, floor) or 0]
    calls = first_calls(example.calls, _TOKENS)
    cut = Example(
        name=example.name, kind=example.kind, token_ids=example.token_ids[: sum(calls)], calls=calls, text=None
    )
    return Plan(examples=(cut,), source=None, call_shape=plan.call_shape)


def _known(found: Comparison) -> float | None:
    return None if found.kl_nats is None else found.kl_nats.mean


def _mean(found: Comparison) -> float:
    return math.inf if found.kl_nats is None or found.first_nonfinite is not None else found.kl_nats.mean
