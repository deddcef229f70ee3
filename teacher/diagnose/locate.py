"""Layer localisation: trace every side on a few examples, judge each layer alone, and look into those out of band."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from receipts.comparison import Comparison
from receipts.diagnosis import Culprit, EndError, LayerError, Localisation, OperationError
from receipts.errors import InputError
from receipts.plain import from_plain
from teacher.diagnose.bands import REFERENCE_BAND, file_engine_band, find_culprits
from teacher.diagnose.examples import first_calls, worst_example
from teacher.plans.plan import Plan
from teacher.process.sources import PlainExample, PlainPlan, plan_form
from teacher.process.streams import Progress, ask_source, trace_source
from teacher.process.traces import Trace
from teacher.sides.roster import OnProgress, Roster
from teacher.snapshot.config import ModelConfig

_MOST_TOKENS = 512  # of all examples that are traced
_LOOKED_INTO = 2  # layers out of band of each part whose operations are compared


def choose_examples(plan: Plan, candidate: Comparison | None) -> PlainPlan:
    """Return the examples to trace: the first, and the one at which the candidate is worst, each cut to half the room.

    Args:
        plan: of the run.
        candidate: teacher against candidate; None takes the first two examples.
    """
    second = 1 if candidate is None else worst_example(plan, candidate)
    indices = [index for index in dict.fromkeys((0, second)) if index is not None and index < len(plan.examples)]
    room = _MOST_TOKENS // len(indices)
    return PlainPlan(examples=tuple(_cut(plan.examples[index], room) for index in indices))


def locate(
    roster: Roster,
    plan: PlainPlan,
    *,
    config: ModelConfig,
    threads: int,
    on_progress: OnProgress,
    only_layer: int | None = None,
) -> Localisation:
    """Compare residual streams layer by layer.

    Args:
        roster: who takes part; its `work` holds the traces, which grow with layers times tokens.
        plan: what is traced.
        config: of the snapshot.
        threads: of each engine.
        on_progress: told what is being done.
        only_layer: run this layer alone in teacher math, on the stream that PyTorch has before it, and show its
            operations whether or not it is out of its band; ends and the other layers are left out.

    Raises:
        EngineError: a side failed; EngineMissingError: no llama.cpp package is installed.
        InputError: one layer is asked for, and neither PyTorch nor the engine shows its stream.
    """
    return _Localiser(roster, plan, config, threads, on_progress).locate(only_layer)


class _Localiser:
    """The steps of `locate`."""

    def __init__(
        self, roster: Roster, plan: PlainPlan, config: ModelConfig, threads: int, on_progress: OnProgress
    ) -> None:
        self._roster, self._plan, self._config = roster, plan, config
        self._threads, self._on_progress = threads, on_progress
        self._sides = {"candidate": roster.engine(), "reference": roster.reference()}
        self._teacher = roster.teacher()

    def locate(self, only_layer: int | None) -> Localisation:
        traces = {name: self._trace(name, only_layer) for name in self._sides}
        question = {
            "plan": plan_form(self._plan), "gguf": str(self._roster.gguf), "folder": str(self._new_folder("teacher")),
            "max_sequence_tokens": self._roster.max_sequence_tokens, **traces,
        }  # fmt: skip
        if only_layer is not None and not any(traces.values()):
            raise InputError(f"layer {only_layer}: expected PyTorch or the engine to show its stream, got neither")
        answer = self._ask({"locate": question, "layer": only_layer})
        ends = tuple(from_plain(EndError, form, "end") for form in answer["ends"])
        layers = tuple(from_plain(LayerError, form, "layer") for form in answer["layers"])
        operations = [from_plain(OperationError, form, "operation") for form in answer["operations"]]
        bands = {
            "engine": None if traces["candidate"] is None else file_engine_band(self._roster.gguf),
            "reference": None if traces["reference"] is None else REFERENCE_BAND,
        }
        rounding: tuple[str, ...] = ()
        if only_layer is None:
            teacher = {"folder": question["folder"], "facts": answer["teacher"]}
            rounding = tuple(_rounding({**traces, "teacher": teacher}))
            operations = self._look_into(find_culprits(ends, layers, (), **bands), question, traces, answer["teacher"])
        return Localisation(
            examples=tuple(example.name for example in self._plan.examples),
            positions=sum(len(example.token_ids) for example in self._plan.examples),
            ends=ends,
            layers=layers,
            operations=tuple(operations),
            culprits=find_culprits(ends, layers, operations, **bands),
            rounding=rounding,
        )

    def _look_into(
        self,
        culprits: Sequence[Culprit],
        question: Mapping[str, Any],
        traces: Mapping[str, Any],
        teacher: Mapping[str, Any],
    ) -> list[OperationError]:
        """Trace the operations of the first layers out of band of each part."""
        found: list[OperationError] = []
        for layer, names in _layers_of(culprits).items():
            inner = {
                name: self._trace(name, layer) if name in names and traces[name] is not None else None
                for name in self._sides
            }
            form = self._ask({"operations": {**question, **inner, "layer": layer, "facts": teacher}})
            found += [from_plain(OperationError, one, "operation") for one in form]
        return found

    def _trace(self, name: str, layer: int | None) -> dict[str, Any] | None:
        """Return folder and facts of a new trace, or None when the side shows nothing but logits."""
        side = self._sides[name]
        stage = f"trace {side.name}" if layer is None else f"trace {side.name}, layer {layer}"
        self._on_progress(stage, 0, 1)
        folder = self._new_folder(name if layer is None else f"{name}-{layer}")
        trace = trace_source(
            side.kind, side.spec, self._plan, folder, threads=self._threads, layers=self._config.num_hidden_layers,
            width=self._config.hidden_size, layer=layer,
            layer_kind=None if layer is None else self._config.layer_types[layer],
        )  # fmt: skip
        self._on_progress(stage, 1, 1)
        return None if trace is None else {"folder": str(folder), "facts": trace.facts}

    def _new_folder(self, name: str) -> Path:
        folder = self._roster.work / f"trace-{name}"
        folder.mkdir()
        return folder

    def _ask(self, question: Mapping[str, Any]) -> Any:
        def report(progress: Progress) -> None:
            self._on_progress(f"locate: {progress.unit}", progress.done, progress.total)

        kind, spec = self._teacher.kind, self._teacher.spec
        return ask_source(kind, spec, question, threads=self._threads, on_progress=report)


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


def _layers_of(culprits: Sequence[Culprit]) -> dict[int, set[str]]:
    """Return layer -> sides to trace there, for the first layers out of band of each part."""
    traced = {"weights": set(), "engine": {"candidate"}, "reference": {"reference"}}
    wanted: dict[int, set[str]] = {}
    for part, names in traced.items():
        layers = [one.layer for one in culprits if one.part == part and one.layer is not None]
        for layer in layers[:_LOOKED_INTO]:
            wanted.setdefault(layer, set()).update(names)
    return dict(sorted(wanted.items()))


def _cut(example: Any, room: int) -> PlainExample:
    """Return the first tokens of an example, its last call cut where the room ends."""
    calls = first_calls(example.calls, room)
    return PlainExample(name=example.name, token_ids=tuple(example.token_ids[: sum(calls)]), calls=calls)
