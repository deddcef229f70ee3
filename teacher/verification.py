"""The main job: teacher, reference and candidate over the same calls, compared, decided and recorded.

inputs checked -> tokenizers agree -> teacher against PyTorch (the floor) -> teacher against candidate -> candidate
against itself at other call shapes -> inputs hashed again -> report -> verdict -> run folder

Every engine runs in a process of its own. Nothing is left behind by a run that fails.
"""

from __future__ import annotations

import os
import platform
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from receipts.cache_plan import MAX_SEQUENCE_TOKENS
from receipts.canonical import canonical_bytes
from receipts.chain import RunWriter
from receipts.comparison import Comparison
from receipts.digest import Digest, sha256_bytes, sha256_file
from receipts.errors import DigestMismatchError, EngineFailedError, EngineMissingError, PlanError
from receipts.report import Report
from receipts.verdict import Verdict, decide
from teacher.alignment import CallDigest
from teacher.audit.tensors import audit_file
from teacher.call_shape import CallShape
from teacher.compare.sides import compare_sides
from teacher.gguf_file import read_gguf
from teacher.gguf_match import verify_matches
from teacher.json_file import parse_object
from teacher.plan import Plan, load_plan
from teacher.policies import find_policy
from teacher.snapshot import Snapshot, hash_snapshot, read_snapshot
from teacher.streams import Progress, SourceRun, run_source
from teacher.tokenizer_parity import ParityResult, check_tokenizer


def usable_processors() -> int:
    """Return how many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


OnProgress = Callable[[str, int, int], None]
"""Told (what is being done, how much is done, how much there is)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Settings of a verification beside its inputs.

    Attributes:
        revision, allow_download: for a snapshot named by a hub id.
        call_shape: cuts the examples that bring no calls of their own.
        spread: call shapes at which the candidate is compared with its own main run.
        reference_bf16: run PyTorch in BF16 too, for scale.
        max_sequence_tokens: capacity of the cache; None takes what the longest example needs.
        threads: threads of each engine.
        engine: the candidate's engine, a name of `teacher.candidates` or `module:class`.
        engine_settings: its settings, such as {"flash_attention": "off"}; all of them are recorded. Every engine is
            given the file as `gguf`, and `max_sequence_tokens` and `max_call_tokens` of the plans it will run.
    """

    revision: str | None = None
    allow_download: bool = False
    call_shape: str = "mixed"
    spread: tuple[str, ...] = ("prefill", "decode")
    reference_bf16: bool = False
    max_sequence_tokens: int | None = None
    threads: int = field(default_factory=usable_processors)
    engine: str = "llama_cpp"
    engine_settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a verification leaves.

    Attributes:
        verdict: what the policy says.
        report: what was measured.
        folder: the run folder, None when none was asked for.
        digests: name of each hashed receipt -> SHA-256 of its bytes.
    """

    verdict: Verdict
    report: Report
    folder: Path | None
    digests: Mapping[str, str]


def verify(
    snapshot: str | Path,
    candidate: str | Path,
    plan: str | Path | None = None,
    policy: str | Path | None = None,
    *,
    out: str | Path | None = None,
    options: Options | None = None,
    on_progress: OnProgress = lambda stage, done, total: None,
) -> Verdict:
    """Say whether a GGUF still is the model its snapshot holds.

    Args:
        snapshot: a model folder or a hub id.
        candidate: a GGUF file.
        plan: a JSONL file of texts, chats or token ids; None for the built-in plan.
        policy: a policy file, or the name of one that is shipped ("q8_0"); None takes the one for the file's type.
        out: run folder to write; None writes none.
        options: everything else.
        on_progress: told how far each stage is.

    Raises:
        InputError: something given cannot be used; IntegrityError: an input changed during the run;
        NumericError: the teacher is not source precision here; EngineError: an engine is missing or failed.
    """
    return run_verification(
        snapshot, candidate, plan, policy, out=out, options=options or Options(), on_progress=on_progress
    ).verdict


def run_verification(
    snapshot: str | Path,
    candidate: str | Path,
    plan: str | Path | None,
    policy: str | Path | None,
    *,
    out: str | Path | None,
    options: Options,
    on_progress: OnProgress,
) -> Outcome:
    """Do what `verify` does and return all of it."""
    with ExitStack() as stack:
        writer = None if out is None else stack.enter_context(RunWriter(Path(out)))
        run = _Run(Path(candidate), options, on_progress, stack)
        run.check_inputs(snapshot, plan, policy)
        run.measure_floor()
        run.measure_candidate()
        run.measure_spread()
        run.verify_unchanged()
        return run.conclude(writer)


class _Run:
    """The stages of one verification, in order; each adds what later ones need."""

    def __init__(self, gguf: Path, options: Options, on_progress: OnProgress, stack: ExitStack) -> None:
        self._gguf, self._options, self._on_progress = gguf, options, on_progress
        self._started = datetime.now(UTC)
        self._seconds: dict[str, float] = {}
        self._peak_bytes: dict[str, int] = {}
        self._descriptions: dict[str, dict[str, Any]] = {}
        self._digests: dict[str, tuple[CallDigest, ...]] = {}
        self._work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="source-teacher-")))
        self._spread: list[Comparison] = []
        self._bf16: Comparison | None = None

    def check_inputs(self, snapshot: str | Path, plan: str | Path | None, policy: str | Path | None) -> None:
        """Read and check everything that is given, the cheap before the slow."""
        options = self._options
        shapes = [CallShape.parse(shape) for shape in options.spread]
        # Headers first: a wrong folder or file is refused before gigabytes are hashed.
        checked = read_snapshot(snapshot, revision=options.revision, allow_download=options.allow_download)
        gguf = read_gguf(self._gguf)
        self._notes = [*checked.warnings, *verify_matches(gguf, checked.config)]
        self._policy, self._policy_bytes = find_policy(policy, gguf)
        self._plan = load_plan(
            None if plan is None else Path(plan),
            checked.folder,
            vocabulary_rows=checked.config.vocab_size,
            max_sequence_tokens=options.max_sequence_tokens or MAX_SEQUENCE_TOKENS,
            call_shape=options.call_shape,
        )
        self._capacity = options.max_sequence_tokens or max(len(e.token_ids) for e in self._plan.examples)
        self._spread_shapes = [shape for shape in shapes if self._plan.reshaped(shape) != self._plan]
        self._parity = self._check_tokenizers(checked.folder)
        self._verify_real_tokens()
        total = sum(path.stat().st_size for path in checked.folder.iterdir() if path.is_file())
        self._snapshot = hash_snapshot(checked, self._counter("hash the snapshot", total))
        self._gguf_digest, self._gguf_bytes = self._hash_gguf("hash the GGUF")
        self._notes += self._audit_tensors(checked)

    def _audit_tensors(self, checked: Snapshot) -> list[str]:
        """Return what the tensor audit finds wrong, so that a verdict that fails comes with its cause."""
        total = sum(entry.stop - entry.start for entry in checked.tensors.values())
        try:
            audit = audit_file(
                checked, self._gguf, threads=self._options.threads, on_bytes=self._counter("audit tensors", total)
            )
        except EngineMissingError as error:  # another engine may run where llama.cpp's quantizers are not installed
            return [f"the tensor audit did not run: {error}"]
        found = [finding.sentence for finding in audit.of_verdict("wrong", "worse")]
        return found or [f"tensor audit: all {len(audit.tensors)} tensors are exact or as good as their types allow"]

    def _check_tokenizers(self, folder: Path) -> ParityResult:
        self._on_progress("compare tokenizers", 0, 1)
        parity = check_tokenizer(folder, self._gguf)
        self._on_progress("compare tokenizers", 1, 1)
        if parity.parity.status == "differs" and self._policy.tokenizer_require == "match":
            raise PlanError(
                f"{self._gguf.name}: expected the snapshot's tokenizer, got another: {parity.parity.first_difference}"
            )
        self._notes += parity.notes
        return parity

    def _verify_real_tokens(self) -> None:
        for example in self._plan.examples:
            worst = max(example.token_ids)
            if worst >= self._parity.real_vocabulary:
                raise PlanError(
                    f"example '{example.name}': expected ids of real tokens, below {self._parity.real_vocabulary}, got"
                    f" {worst}, a padded row"
                )

    def measure_floor(self) -> None:
        """Run the teacher through its layers, and PyTorch beside it."""
        self._floor = self._compare("teacher", self._teacher(), "pytorch-f32", self._reference("float32"))
        if self._options.reference_bf16:
            self._bf16 = self._compare("teacher", self._teacher(), "pytorch-bf16", self._reference("bfloat16"))

    def measure_candidate(self) -> None:
        """Compare the candidate with the teacher, whose logits come from its kept hidden states."""
        self._candidate = self._compare("teacher", self._teacher(), "candidate", self._engine(self._plan))

    def measure_spread(self) -> None:
        """Compare the candidate at other call shapes with itself, and its main run with its repetition."""
        for shape in self._spread_shapes:
            other = self._plan.reshaped(shape)
            name = f"candidate {shape}"
            self._spread.append(self._compare("candidate", self._engine(self._plan), name, self._engine(other)))

    def verify_unchanged(self) -> None:
        """Hash every input again.

        Raises:
            IntegrityError: one changed during the run; names it.
        """
        total = sum(entry.size_bytes for entry in self._snapshot.manifest.entries)
        self._snapshot.rehash(self._counter("hash the snapshot again", total))
        digest, _ = self._hash_gguf("hash the GGUF again")
        if digest != self._gguf_digest:
            raise DigestMismatchError(
                f"{self._gguf.name}: expected sha256 {self._gguf_digest.hex} as at the start, got {digest.hex}"
            )

    def conclude(self, writer: RunWriter | None) -> Outcome:
        """Write receipts, each naming the digests of those it used, then report and verdict."""
        receipts: dict[str, Any] = {}
        digests: dict[str, str] = {}

        def add(name: str, value: Mapping[str, Any]) -> None:
            receipts[name] = value
            digests[name] = sha256_bytes(canonical_bytes(value)).hex
            if writer is not None:
                writer.add(name, value)

        teacher = self._read_teacher_record()
        add("plan.json", self._plan.to_record())
        add("snapshot.json", self._snapshot.record())
        add("candidate.json", self._candidate_record())
        add("reference.json", self._reference_record())
        add("cache.json", self._cache_record(teacher))
        add("calls.json", self._calls_record(teacher, digests))
        report = Report(
            vocabulary_rows=self._snapshot.config.vocab_size,
            real_vocabulary=self._parity.real_vocabulary,
            floor=self._floor,
            reference_bf16=self._bf16,
            candidate=self._candidate,
            spread=tuple(self._spread),
            tokenizer=self._parity.parity,
            notes=tuple(self._notes),
            uses=dict(digests),
        )
        add("report.json", report.to_dict())
        digests["policy.toml"] = self._policy.sha256
        verdict = decide(
            report, self._policy, report_sha256=digests["report.json"], policy_sha256=digests["policy.toml"]
        )
        if writer is None:
            digests["verdict.json"] = sha256_bytes(canonical_bytes(verdict.to_dict())).hex
            return Outcome(verdict=verdict, report=report, folder=None, digests=digests)
        writer.add_bytes("policy.toml", self._policy_bytes)
        add("verdict.json", verdict.to_dict())
        writer.add("host.json", self._host_record())
        return Outcome(verdict=verdict, report=report, folder=writer.finish(), digests=digests)

    def _teacher(self) -> _Side:
        spec = {
            "snapshot": str(self._snapshot.folder),
            "max_sequence_tokens": self._capacity,
            "hidden": str(self._work / "hidden.f32"),
        }
        return _Side("teacher", spec, self._plan)

    def _reference(self, dtype: str) -> _Side:
        return _Side("transformers", {"snapshot": str(self._snapshot.folder), "dtype": dtype}, self._plan)

    def _engine(self, plan: Plan) -> _Side:
        # One setting for all call shapes, so that the shape alone is what differs between them.
        plans = (self._plan, *(self._plan.reshaped(shape) for shape in self._spread_shapes))
        spec = {
            "gguf": str(self._gguf),
            "max_sequence_tokens": self._capacity,
            "max_call_tokens": max(max(example.calls) for one in plans for example in one.examples),
        }
        return _Side(self._options.engine, {**spec, **self._options.engine_settings}, plan)

    def _compare(self, expected_name: str, expected: _Side, actual_name: str, actual: _Side) -> Comparison:
        """Run two sides at once and compare them; keep what they say of themselves and their digests."""
        stage = f"{expected_name} against {actual_name}"
        began = time.monotonic()
        with self._start(expected, stage) as left, self._start(actual, stage) as right:
            comparison, digests = compare_sides(
                left,
                right,
                expected.plan,
                real_vocabulary=self._parity.real_vocabulary,
                names=(expected_name, actual_name),
                on_positions=lambda done: self._on_progress(stage, done, expected.plan.positions),
            )
        self._seconds[stage] = time.monotonic() - began
        for name, run, found in ((expected_name, left, digests[0]), (actual_name, right, digests[1])):
            self._keep(name, run, found)
        return comparison

    def _start(self, side: _Side, stage: str) -> SourceRun:
        def report(progress: Progress) -> None:
            if progress.unit != "positions":  # positions are counted as they are compared
                self._on_progress(f"{stage}: {progress.unit}", progress.done, progress.total)

        return run_source(side.kind, side.spec, side.plan, threads=self._options.threads, on_progress=report)

    def _keep(self, name: str, run: SourceRun, digests: tuple[CallDigest, ...]) -> None:
        before = self._digests.setdefault(name, digests)
        self._descriptions.setdefault(name, run.description)
        self._peak_bytes[name] = max(self._peak_bytes.get(name, 0), run.closing.get("peak_memory_bytes", 0))
        for first, again in zip(before, digests, strict=True):
            if first.sha256 != again.sha256:
                example = self._plan.examples[first.example].name
                raise EngineFailedError(
                    f"{name}: expected the same logits for the same calls, got sha256 {first.sha256} and then"
                    f" {again.sha256} in call {first.call} of example '{example}'"
                )

    def _hash_gguf(self, stage: str) -> tuple[Digest, int]:
        return sha256_file(self._gguf, self._counter(stage, self._gguf.stat().st_size))

    def _counter(self, stage: str, total: int) -> Callable[[int], None]:
        done = 0

        def count(size: int) -> None:
            nonlocal done
            done += size
            self._on_progress(stage, done, max(total, done))

        return count

    def _read_teacher_record(self) -> dict[str, Any]:
        name = "hidden.f32.json"
        return parse_object((self._work / name).read_bytes(), name)

    def _candidate_record(self) -> dict[str, Any]:
        return {
            "schema": "source-teacher/candidate/v1",
            "file": {"name": self._gguf.name, "size_bytes": self._gguf_bytes, "sha256": self._gguf_digest.hex},
            "engine": self._options.engine,
            "description": self._descriptions["candidate"],
        }

    def _reference_record(self) -> dict[str, Any]:
        bf16 = self._descriptions.get("pytorch-bf16")
        return {
            "schema": "source-teacher/reference/v1",
            "float32": self._descriptions["pytorch-f32"],
            "bfloat16": bf16,
        }

    def _cache_record(self, teacher: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "schema": "source-teacher/cache/v1",
            "receipt": teacher["cache_receipt"],
        }

    def _calls_record(self, teacher: Mapping[str, Any], digests: Mapping[str, str]) -> dict[str, Any]:
        sides = (self._digests["teacher"], self._digests["pytorch-f32"], self._digests["candidate"])
        calls = [
            {
                "example": expected.example,
                "call": expected.call,
                "position": expected.position,
                "rows": expected.rows,
                "width": expected.width,
                "teacher_sha256": expected.sha256,
                "reference_sha256": reference.sha256,
                "candidate_sha256": actual.sha256,
                "graph_policy_sha256": teacher["graph_policy_sha256"],
            }
            for expected, reference, actual in zip(*sides, strict=True)
        ]
        return {
            "schema": "source-teacher/calls/v1",
            "uses": {name: digests[name] for name in ("plan.json", "cache.json")},
            "teacher": self._descriptions["teacher"],
            "graph_policy": teacher["graph_policy"],
            "hidden_sha256": teacher["hidden_sha256"],
            "calls": calls,
        }

    def _host_record(self) -> dict[str, Any]:
        return {
            "schema": "source-teacher/host/v1",
            "started": self._started.isoformat(timespec="seconds"),
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "host": platform.node(),
            "system": platform.platform(),
            "python": platform.python_version(),
            "seconds": {name: round(value, 2) for name, value in self._seconds.items()},
            "peak_memory_bytes": self._peak_bytes,
        }


@dataclass(frozen=True, slots=True)
class _Side:
    """A logit source that has not been started."""

    kind: str
    spec: Mapping[str, Any]
    plan: Plan
