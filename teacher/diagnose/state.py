"""What an engine carries where it should not, or carries wrongly: one example again, alone, and in one call.

Nothing of the engine but its logits is needed, so this holds for engines that show no layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from receipts.comparison import Comparison
from teacher.diagnose.examples import nats
from teacher.plans.call_shape import CallShape
from teacher.plans.plan import Plan
from teacher.sides.roster import Side, Sides

# The same tokens in other calls differ by the rounding of activations, which moves a mean of n positions by far less
# than its half; below a ten-thousandth of a nat no shipped policy would fail.
_FACTOR, _LEAST_NATS = 2.0, 1e-4
_SHARED_TOKENS = 8  # a prompt cache is of use, and a shared beginning no accident, from here on

Maker = Callable[[str, Plan], Side]


def examine_state(sides: Sides, expected: Maker, engine: Maker, plan: Plan, within: Comparison) -> tuple[str, ...]:
    """Return what was found out, as sentences; none when the engine starts each example afresh and carries its calls.

    Args:
        sides: where they run.
        expected: makes a side of teacher math, from a name and a plan.
        engine: makes a side of the candidate's engine.
        plan: of the run.
        within: the same two sides over the whole plan, in one process.
    """
    index = _worst(plan, within)
    example = plan.examples[index]

    def measure(name: str, tried: Plan) -> float:
        found = sides.compare(expected(f"teacher math, {name}", tried), engine(f"candidate, {name}", tried))
        return _of(found, example.name)

    sentences = []
    alone = measure("alone", plan.only(index))
    behind = _of(within, example.name)
    if index and _exceeds(behind, alone):
        sentences.append(
            f"state between examples: '{example.name}' is off by {nats(behind)} behind the examples before it and by"
            f" {nats(alone)} alone in a fresh process: {_left_behind(plan, index, alone, measure)}"
        )
    if len(example.calls) > 1:
        once = measure("in one call", plan.only(index).reshaped(CallShape.parse("prefill")))
        if _exceeds(alone, once):
            sentences.append(
                f"state between calls: '{example.name}' is off by {nats(alone)} in its {len(example.calls)} calls and"
                f" by {nats(once)} in one: what the engine carries from call to call is wrong"
            )
    return tuple(sentences)


def _left_behind(plan: Plan, index: int, alone: float, measure: Callable[[str, Plan], float]) -> str:
    """Say whether any example before it does it, or those alone that begin with the same tokens."""
    ids = plan.examples[index].token_ids
    shared = {before: _shared(ids, plan.examples[before].token_ids) for before in range(index)}
    alike = max(shared, key=lambda before: shared[before])
    others = [before for before in shared if shared[before] < _SHARED_TOKENS]
    not_reset = "the engine's cache is not reset between examples"
    if shared[alike] < _SHARED_TOKENS:
        return not_reset
    if others and _exceeds(measure("behind another", plan.only(others[0], index)), alone):
        return not_reset
    if not _exceeds(measure("behind its like", plan.only(alike, index)), alone):
        return f"{not_reset}, after more than one of them"
    return (
        f"it is so behind '{plan.examples[alike].name}', which begins with the same {shared[alike]} tokens: a prompt"
        " cache hit replays a wrong state"
    )


def _worst(plan: Plan, within: Comparison) -> int:
    """Return the example that is furthest off, of those that have one before them if there are such."""
    indices = range(1 if len(plan.examples) > 1 else 0, len(plan.examples))
    return max(indices, key=lambda index: _of(within, plan.examples[index].name))


def _of(found: Comparison, name: str) -> float:
    """Return the mean KLD of one example; infinite where none of its rows is finite."""
    return next((bucket.kl_nats_mean for bucket in found.by_example if bucket.label == name), math.inf)


def _exceeds(value: float, least: float) -> bool:
    return value > _FACTOR * least + _LEAST_NATS


def _shared(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    """Return how many tokens two sequences begin with alike."""
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
