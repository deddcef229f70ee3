"""Which example a diagnosis looks at, how much of it, and how its distance is said."""

from __future__ import annotations

import math

from receipts.comparison import Comparison
from teacher.plans.plan import Plan


def worst_example(plan: Plan, found: Comparison) -> int | None:
    """Return the index of the example at which two sides differ most; None where no row of any is finite."""
    if found.first_nonfinite is not None:
        return found.first_nonfinite.example
    worst = max(found.by_example, key=lambda bucket: bucket.kl_nats_mean, default=None)
    return None if worst is None else [example.name for example in plan.examples].index(worst.label)


def first_calls(calls: tuple[int, ...], room: int) -> tuple[int, ...]:
    """Return the calls of the first `room` tokens, the last one cut where the room ends."""
    kept: list[int] = []
    for length in calls:
        if room > 0:
            kept.append(min(length, room))
            room -= length
    return tuple(kept)


def nats(value: float) -> str:
    """Return a mean KLD for a person."""
    return f"{value:.2g} nats" if math.isfinite(value) else "rows that are not finite"
