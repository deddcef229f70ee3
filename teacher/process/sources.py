"""What a logit source is: the one interface behind teacher, reference and every candidate.

A source runs a plan and yields float32 logits, block after block, in plan order. It lives in a process of its
own (`teacher.process.worker`), so that one side's BLAS, threads and environment never reach another's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt


class Example(Protocol):
    """One token sequence and the calls it is cut into."""

    @property
    def name(self) -> str: ...  # noqa: D102 - an interface; the class says it
    @property
    def token_ids(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def calls(self) -> tuple[int, ...]: ...  # noqa: D102


class Plan(Protocol):
    """What is run, the same for every source."""

    @property
    def examples(self) -> tuple[Any, ...]: ...  # noqa: D102


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainExample:
    """One example as it travels to another process."""

    name: str
    token_ids: tuple[int, ...]
    calls: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainPlan:
    """A plan as it travels to another process."""

    examples: tuple[PlainExample, ...]


def plan_form(plan: Plan) -> dict[str, Any]:
    """Return the JSON object that `plain_plan` reads."""
    return {
        "examples": [
            {"name": example.name, "token_ids": list(example.token_ids), "calls": list(example.calls)}
            for example in plan.examples
        ]
    }


def plain_plan(form: Mapping[str, Any]) -> PlainPlan:
    """Return the plan that a JSON object {"examples": [{"name", "token_ids", "calls"}]} holds."""
    return PlainPlan(
        examples=tuple(
            PlainExample(name=item["name"], token_ids=tuple(item["token_ids"]), calls=tuple(item["calls"]))
            for item in form["examples"]
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitBlock:
    """Logits of some consecutive positions of one call.

    Attributes:
        example: index into the plan's examples.
        call: index into that example's calls.
        position: first token position of the block within the example.
        logits: [n, V] float32, C order; row i predicts the token after `position + i`.
    """

    example: int
    call: int
    position: int
    logits: npt.NDArray[np.float32]


class LogitSource(Protocol):
    """Token ids in, full-vocabulary logits out.

    A candidate is built with `threads`, `gguf`, `max_sequence_tokens` and `max_call_tokens` (of the plans it will run)
    and the settings the user gave. A source that works before its first logits may have an attribute
    `on_progress(done, total, unit)`, which is set to a function that tells the user. One that can show its residual
    stream has `trace(plan, writer, layer, kind)`: it runs the plan and gives a `teacher.process.traces.TraceWriter`
    the stream after every layer and, of the one layer of a kind ("linear_attention", "full_attention"), its
    operations by the names that `teacher.model.blocks` gives them, value heads in the file's order; None for both
    asks for none.

    Blocks arrive in order of example, call and position and cover every position exactly once. Each example
    starts from an empty cache. A source raises EngineFailedError when it cannot go on.
    """

    def describe(self) -> Mapping[str, Any]:
        """Return what a receipt needs to name this engine: version, build, settings, digests of its files."""
        ...

    def blocks(self, plan: Plan) -> Iterator[LogitBlock]:
        """Run the plan and yield its logits."""
        ...
