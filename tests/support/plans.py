"""Plans of random ids, and teacher logits over them."""

from collections.abc import Sequence

import numpy as np

from teacher.plans.call_shape import CallShape
from teacher.plans.plan import Example, Plan


def random_ids(count: int, below: int, seed: int = 0) -> tuple[int, ...]:
    """Ids of real tokens."""
    return tuple(int(i) for i in np.random.default_rng(seed).integers(0, below, count))


def plan_of(*examples: tuple[Sequence[int], Sequence[int]]) -> Plan:
    """A plan of (ids, calls) pairs."""
    return Plan(
        examples=tuple(
            Example(name=f"e{i}", kind="tokens", token_ids=tuple(ids), calls=tuple(calls), text=None)
            for i, (ids, calls) in enumerate(examples)
        ),
        source=None,
        call_shape=CallShape.parse("prefill"),
    )


def replayed_logits(snapshot, plan: Plan, capacity: int) -> list[np.ndarray]:
    """The teacher's logits of each example, [T, V] float32."""
    from teacher.backend.device import mx
    from teacher.model.head import OutputHead
    from teacher.run.replay import call_spans, replay
    from teacher.snapshot.weights import WeightSource

    found = replay(snapshot, plan, max_sequence_tokens=capacity)
    head = OutputHead(WeightSource(snapshot), snapshot.config)
    return [
        np.concatenate([rows for a, b in call_spans(e.calls) for rows in head.logits(mx.array(hidden[a:b]))])
        for e, hidden in zip(plan.examples, found.hidden, strict=True)
    ]


def centred_difference(expected: np.ndarray, actual: np.ndarray) -> np.ndarray:
    """Largest difference of centred logits in each row."""
    wide = [np.asarray(x, np.float64) for x in (expected, actual)]
    left, right = (x - x.mean(-1, keepdims=True) for x in wide)
    return np.abs(left - right).max(-1)


def kl_nats(expected: np.ndarray, actual: np.ndarray) -> np.ndarray:
    """KL(expected || actual) of each row, in F64."""
    logs = []
    for side in (expected, actual):
        x = np.array(side, np.float64)  # a copy, changed in place
        x -= x.max(-1, keepdims=True)
        logs.append(x - np.log(np.exp(x).sum(-1, keepdims=True)))
    return (np.exp(logs[0]) * (logs[0] - logs[1])).sum(-1)
