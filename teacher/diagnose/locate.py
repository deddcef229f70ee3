"""Layer localisation: trace every side on a few examples, judge each layer alone, and look into those out of band."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from receipts.comparison import Comparison
from receipts.diagnosis import EndError, LayerError, Localisation, OperationError
from receipts.plain import from_plain
from teacher.config import ModelConfig
from teacher.diagnose.bands import REFERENCE_BAND, file_engine_band, find_culprits
from teacher.plan import Plan
from teacher.run_sides import OnProgress, Side
from teacher.sources import PlainExample, PlainPlan
from teacher.streams import Progress, ask_source, trace_source
from teacher.traces import Trace

_MOST_TOKENS = 512  # of all examples that are traced
_LOOKED_INTO = 2  # layers out of band of each part whose operations are compared


@dataclass(frozen=True, slots=True, kw_only=True)
class Locating:
    """What a localisation needs.

    Attributes:
        config: of the snapshot.
        gguf: the file.
        teacher: kind and settings of the teacher ("snapshot").
        candidate, reference: what is traced beside it.
        folder: for traces; it grows with layers times tokens.
        threads: of each engine.
        max_sequence_tokens: capacity of the cache.
    """

    config: ModelConfig
    gguf: Path
    teacher: Side
    candidate: Side
    reference: Side
    folder: Path
    threads: int
    max_sequence_tokens: int
    on_progress: OnProgress


def choose_examples(plan: Plan, candidate: Comparison | None) -> PlainPlan:
    """Return the examples to trace: the first, and the one at which the candidate is worst, each cut to half the room.

    Args:
        plan: of the run.
        candidate: teacher against candidate; None takes the first two examples.
    """
    chosen = [0, 1] if candidate is None else [0, *_worst_example(plan, candidate)]
    indices = [index for index in dict.fromkeys(chosen) if index < len(plan.examples)]
    room = _MOST_TOKENS // len(indices)
    return PlainPlan(examples=tuple(_cut(plan.examples[index], room) for index in indices))


def locate(
    task: Locating, plan: PlainPlan, *, only_layer: int | None = None
) -> Localisation:
    """Compare residual streams layer by layer.

    Args:
        task: the sides and where they work.
        plan: what is traced.
        only_layer: look into this layer's operations, whether or not it is out of its band.

    Raises:
        EngineError: a side failed; EngineMissingError: no llama.cpp package is installed.
    """
    sides = {"candidate": task.candidate, "reference": task.reference}
    traces: dict[str, Mapping[str, Any] | None] = {}
    for name, side in sides.items():
        task.on_progress(f"trace {side.name}", 0, 1)
        traces[name] = _trace(task, side, plan, task.folder / f"trace-{name}", None)
        task.on_progress(f"trace {side.name}", 1, 1)
    folder = task.folder / "trace-teacher"
    folder.mkdir()
    question = {
        "plan": _form(plan), "gguf": str(task.gguf), "max_sequence_tokens": task.max_sequence_tokens,
        "folder": str(folder), **traces,
    }  # fmt: skip
    answer = _ask(task, {"locate": question})
    ends = tuple(from_plain(EndError, form, "end") for form in answer["ends"])
    layers = tuple(from_plain(LayerError, form, "layer") for form in answer["layers"])
    band = None if traces["candidate"] is None else file_engine_band(task.gguf)
    shown = {"engine": band, "reference": None if traces["reference"] is None else REFERENCE_BAND}
    culprits = find_culprits(ends, layers, (), **shown)
    operations: list[OperationError] = []
    wanted = _layers_of(culprits) if only_layer is None else {only_layer: set(sides)}
    for layer, names in wanted.items():
        inner = dict(question)
        for name, side in sides.items():
            inner[name] = None
            if name in names and traces[name] is not None:
                inner[name] = _trace(task, side, plan, task.folder / f"trace-{name}-{layer}", layer)
        form = _ask(task, {"operations": {**inner, "layer": layer, "facts": answer["teacher"]}})
        operations += [from_plain(OperationError, one, "operation") for one in form]
    return Localisation(
        examples=tuple(example.name for example in plan.examples),
        positions=sum(len(example.token_ids) for example in plan.examples),
        ends=ends,
        layers=layers,
        operations=tuple(operations),
        culprits=find_culprits(ends, layers, operations, **shown),
        rounding=tuple(_rounding({**traces, "teacher": {"folder": str(folder), "facts": answer["teacher"]}})),
    )


def _rounding(traces: Mapping[str, Mapping[str, Any] | None]) -> Iterator[str]:
    """Yield a sentence for each side whose stream is rounded to a narrower type."""
    names = {"teacher": "the teacher", "reference": "PyTorch", "candidate": "the engine"}
    for name, form in traces.items():
        kind = None if form is None else Trace(Path(form["folder"]), form["facts"]).narrowest()
        if kind is not None:
            yield (
                f"{names[name]}: its residual stream holds {kind} values alone after every layer, where float32 is"
                " expected"
            )


def _layers_of(culprits: Sequence[Any]) -> dict[int, set[str]]:
    """Return layer -> sides to trace there, for the first layers out of band of each part."""
    traced = {"weights": set(), "engine": {"candidate"}, "reference": {"reference"}}
    wanted: dict[int, set[str]] = {}
    for part, names in traced.items():
        layers = [one.layer for one in culprits if one.part == part and one.layer is not None]
        for layer in layers[:_LOOKED_INTO]:
            wanted.setdefault(layer, set()).update(names)
    return dict(sorted(wanted.items()))


def _trace(
    task: Locating, side: Side, plan: PlainPlan, folder: Path, layer: int | None
) -> dict[str, Any] | None:
    """Return folder and facts of a new trace, or None when the side shows nothing but logits."""
    trace = trace_source(
        side.kind, side.spec, plan, folder, threads=task.threads, layers=task.config.num_hidden_layers,
        width=task.config.hidden_size, layer=layer,
        layer_kind=None if layer is None else task.config.layer_types[layer],
    )  # fmt: skip
    return None if trace is None else {"folder": str(folder), "facts": trace.facts}


def _ask(task: Locating, question: Mapping[str, Any]) -> Any:
    def report(progress: Progress) -> None:
        task.on_progress(f"locate: {progress.unit}", progress.done, progress.total)

    return ask_source(task.teacher.kind, task.teacher.spec, question, threads=task.threads, on_progress=report)


def _worst_example(plan: Plan, candidate: Comparison) -> list[int]:
    if candidate.first_nonfinite is not None:
        return [candidate.first_nonfinite.example]
    names = [example.name for example in plan.examples]
    worst = max(candidate.by_example, key=lambda bucket: bucket.kl_nats_mean, default=None)
    return [] if worst is None else [names.index(worst.label)]


def _cut(example: Any, room: int) -> PlainExample:
    """Return the first tokens of an example, its last call cut where the room ends."""
    calls: list[int] = []
    for length in example.calls:
        left = room - sum(calls)
        if left <= 0:
            break
        calls.append(min(length, left))
    return PlainExample(name=example.name, token_ids=tuple(example.token_ids[: sum(calls)]), calls=tuple(calls))


def _form(plan: PlainPlan) -> dict[str, Any]:
    return {
        "examples": [
            {"name": example.name, "token_ids": list(example.token_ids), "calls": list(example.calls)}
            for example in plan.examples
        ]
    }
