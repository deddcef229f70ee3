"""Run two logit sources side by side and compare them; remember what each said of itself, its digests and its cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from receipts.comparison import Comparison
from receipts.errors import EngineFailedError
from teacher.compare.sides import compare_sides
from teacher.compare.worst import WorstRows
from teacher.plans.plan import Plan
from teacher.process.alignment import CallDigest
from teacher.process.streams import Progress, SourceRun, run_source

OnProgress = Callable[[str, int, int], None]
"""Told (what is being done, how much is done, how much there is)."""


@dataclass(frozen=True, slots=True)
class Side:
    """A logit source that has not been started.

    Attributes:
        name: what reports call it; every run under one name must give the same logits.
        kind: of `teacher.process.worker.SOURCES`, or `module:class`.
        spec: its settings.
        plan: what it runs.
    """

    name: str
    kind: str
    spec: Mapping[str, Any]
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """Who takes part in a verification; makes the sides.

    Attributes:
        snapshot: folder of the snapshot.
        gguf: the file under audit.
        plan: what a side runs unless it is told otherwise.
        work: folder for what sides keep.
        max_sequence_tokens, max_call_tokens: of everything that will run, so that one setting serves all.
        teacher_kind, reference_kind, engine_kind: of `teacher.process.worker.SOURCES`, or `module:class`.
        engine_settings: of the candidate's engine.
    """

    snapshot: Path
    gguf: Path
    plan: Plan
    work: Path
    max_sequence_tokens: int
    max_call_tokens: int
    teacher_kind: str
    reference_kind: str
    engine_kind: str
    engine_settings: Mapping[str, Any]

    def teacher(self, name: str = "teacher", *, plan: Plan | None = None, gguf: Path | None = None) -> Side:
        """Return the teacher, or its math on a GGUF's weights; each name keeps its own hidden states."""
        spec = {
            "snapshot": str(self.snapshot),
            "max_sequence_tokens": self.max_sequence_tokens,
            "hidden": str(self.work / f"{name}.f32"),
        }
        return Side(name, self.teacher_kind, spec if gguf is None else {**spec, "gguf": str(gguf)}, plan or self.plan)

    def reference(self, name: str = "pytorch-f32", *, dtype: str = "float32", plan: Plan | None = None) -> Side:
        """Return PyTorch on the snapshot."""
        return Side(name, self.reference_kind, {"snapshot": str(self.snapshot), "dtype": dtype}, plan or self.plan)

    def arbiter(self, name: str, *, plan: Plan) -> Side:
        """Return the F64 definition on the snapshot."""
        return Side(name, "arbiter", {"snapshot": str(self.snapshot)}, plan)

    def engine(self, name: str = "candidate", *, plan: Plan | None = None, gguf: Path | None = None) -> Side:
        """Return the candidate's engine on a GGUF."""
        spec = {
            "gguf": str(gguf or self.gguf),
            "max_sequence_tokens": self.max_sequence_tokens,
            "max_call_tokens": self.max_call_tokens,
        }
        return Side(name, self.engine_kind, {**spec, **self.engine_settings}, plan or self.plan)


class Sides:
    """The engines of one verification.

    Attributes:
        descriptions: what each side says of itself, by its name.
        digests: of the logits of each of its calls.
        seconds: of each comparison.
        peak_bytes: of each side's process.
    """

    def __init__(self, *, threads: int, real_vocabulary: int, on_progress: OnProgress) -> None:
        self._threads, self._real_vocabulary, self._on_progress = threads, real_vocabulary, on_progress
        self.descriptions: dict[str, dict[str, Any]] = {}
        self.digests: dict[str, tuple[CallDigest, ...]] = {}
        self.seconds: dict[str, float] = {}
        self.peak_bytes: dict[str, int] = {}

    def compare(self, expected: Side, actual: Side, *, worst: WorstRows | None = None) -> Comparison:
        """Run two sides at once and compare them.

        Raises:
            EngineFailedError: a side failed, or gave other logits than the last time it ran.
        """
        stage = f"{expected.name} against {actual.name}"
        began = time.monotonic()
        with self._start(expected, stage) as left, self._start(actual, stage) as right:
            comparison, digests = compare_sides(
                left,
                right,
                expected.plan,
                real_vocabulary=self._real_vocabulary,
                names=(expected.name, actual.name),
                on_positions=lambda done: self._on_progress(stage, done, expected.plan.positions),
                worst=worst,
            )
        self.seconds[stage] = time.monotonic() - began
        for side, run, found in ((expected, left, digests[0]), (actual, right, digests[1])):
            self._keep(side, run, found)
        return comparison

    def _start(self, side: Side, stage: str) -> SourceRun:
        def report(progress: Progress) -> None:
            if progress.unit != "positions":  # positions are counted as they are compared
                self._on_progress(f"{stage}: {progress.unit}", progress.done, progress.total)

        return run_source(side.kind, side.spec, side.plan, threads=self._threads, on_progress=report)

    def _keep(self, side: Side, run: SourceRun, digests: tuple[CallDigest, ...]) -> None:
        before = self.digests.setdefault(side.name, digests)
        self.descriptions.setdefault(side.name, run.description)
        self.peak_bytes[side.name] = max(self.peak_bytes.get(side.name, 0), run.closing.get("peak_memory_bytes", 0))
        for first, again in zip(before, digests, strict=True):
            if first.sha256 != again.sha256:
                example = side.plan.examples[first.example].name
                raise EngineFailedError(
                    f"{side.name}: expected the same logits for the same calls, got sha256 {first.sha256} and then"
                    f" {again.sha256} in call {first.call} of example '{example}'"
                )
