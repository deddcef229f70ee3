"""The main job: teacher, reference and candidate over the same calls, compared, explained, decided and recorded.

inputs checked -> tokenizers agree -> GGUF audited -> teacher against PyTorch (the floor) -> teacher against candidate
-> candidate against itself at other call shapes -> diagnosis -> inputs hashed again -> report -> verdict -> run folder

Every engine runs in a process of its own. Nothing is left behind by a run that fails.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from receipts.cache_plan import MAX_SEQUENCE_TOKENS
from receipts.canonical import canonical_bytes
from receipts.chain import RunWriter
from receipts.comparison import Comparison, TokenShare, Where, WorstPosition
from receipts.diagnosis import Diagnosis
from receipts.digest import Digest, sha256_bytes, sha256_file
from receipts.errors import DigestMismatchError, EngineMissingError, PlanError
from receipts.findings import Audit
from receipts.report import Report
from receipts.verdict import Verdict, decide
from teacher.audit.metadata import audit_metadata
from teacher.audit.tensors import audit_file
from teacher.compare.worst import WorstRow, WorstRows
from teacher.diagnose.diagnosis import Diagnoser, Measured
from teacher.gguf.file import GgufFile, read_gguf
from teacher.gguf.match import verify_matches
from teacher.gguf.tokenizer_parity import ParityResult, check_tokenizer
from teacher.json_file import parse_object
from teacher.plans.call_shape import CallShape
from teacher.plans.plan import Plan, load_plan
from teacher.policies import find_policy
from teacher.run_records import cache_record, calls_record, candidate_record, host_record, reference_record
from teacher.sides.roster import OnProgress, Roster, Sides
from teacher.snapshot.folder import Snapshot, hash_snapshot, read_snapshot
from teacher.snapshot.tokenizer import SnapshotTokenizer

_WORST_POSITIONS, _CONTEXT_TOKENS = 10, 48


def usable_processors() -> int:
    """Return how many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


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
        diagnose: measure the four cells, and what else says why a candidate differs.
        unquantized: a GGUF of the source's own values, for the cell of the engine on source weights.
        teacher, reference: names of other implementations of the two, or `module:class`.
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
    diagnose: bool = True
    unquantized: Path | None = None
    teacher: str = "teacher"
    reference: str = "transformers"


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
        run.diagnose()
        run.verify_unchanged()
        return run.conclude(writer)


class _Run:
    """The stages of one verification, in order; each adds what later ones need."""

    def __init__(self, gguf: Path, options: Options, on_progress: OnProgress, stack: ExitStack) -> None:
        self._gguf, self._options, self._on_progress = gguf, options, on_progress
        self._started = datetime.now(UTC)
        self._work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="source-teacher-")))
        self._spread: list[Comparison] = []
        self._bf16: Comparison | None = None
        self._diagnosis: Diagnosis | None = None

    def check_inputs(self, snapshot: str | Path, plan: str | Path | None, policy: str | Path | None) -> None:
        """Read and check everything that is given, the cheap before the slow."""
        options = self._options
        shapes = [CallShape.parse(shape) for shape in options.spread]
        # Headers first: a wrong folder or file is refused before gigabytes are hashed.
        checked = read_snapshot(snapshot, revision=options.revision, allow_download=options.allow_download)
        gguf = read_gguf(self._gguf)
        self._notes = [*checked.warnings, *verify_matches(gguf, checked.config)]
        if options.unquantized is not None:
            verify_matches(read_gguf(options.unquantized), checked.config)
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
        self._parity = self._check_tokenizers(checked, gguf)
        self._verify_real_tokens()
        self._sides = Sides(
            threads=options.threads, real_vocabulary=self._parity.real_vocabulary, on_progress=self._on_progress
        )
        self._roster = self._make_roster(checked)
        self._worst = WorstRows(_WORST_POSITIONS, self._parity.real_vocabulary)
        total = sum(path.stat().st_size for path in checked.folder.iterdir() if path.is_file())
        self._snapshot = hash_snapshot(checked, self._counter("hash the snapshot", total))
        self._files = {"file": self._gguf}
        if options.unquantized is not None:
            self._files["unquantized"] = options.unquantized
        self._hashed = {role: self._hash(path, f"hash {path.name}") for role, path in self._files.items()}
        self._audit = self._audit_file(checked)

    def _audit_file(self, checked: Snapshot) -> Audit | None:
        """Hold every tensor, key and type of the file against the snapshot, so that a verdict comes with its cause."""
        total = sum(entry.stop - entry.start for entry in checked.tensors.values())
        try:
            return audit_file(
                checked, self._gguf, threads=self._options.threads, on_bytes=self._counter("audit tensors", total)
            )
        except EngineMissingError as error:  # another engine may run where llama.cpp's quantizers are not installed
            self._notes.append(f"the audit did not run: {error}")
            return None

    def _check_tokenizers(self, checked: Snapshot, gguf: GgufFile) -> ParityResult:
        self._on_progress("compare tokenizers", 0, 1)
        parity = check_tokenizer(checked.folder, self._gguf)
        self._on_progress("compare tokenizers", 1, 1)
        if parity.parity.status == "differs" and self._policy.tokenizer_require == "match":
            keys = [
                finding.sentence
                for finding in audit_metadata(gguf, checked.folder, checked.config)
                if finding.key.startswith("tokenizer.")
            ]
            raise PlanError(
                "; ".join(
                    [
                        f"{self._gguf.name}: expected the snapshot's tokenizer, got another:"
                        f" {parity.parity.first_difference}",
                        *keys,
                    ]
                )
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
        teacher, roster = self._roster.teacher(), self._roster
        self._floor = self._sides.compare(teacher, roster.reference())
        if self._options.reference_bf16:
            self._bf16 = self._sides.compare(teacher, roster.reference("pytorch-bf16", dtype="bfloat16"))

    def measure_candidate(self) -> None:
        """Compare the candidate with the teacher, whose logits come from its kept hidden states."""
        self._candidate = self._sides.compare(self._roster.teacher(), self._roster.engine(), worst=self._worst)

    def measure_spread(self) -> None:
        """Compare the candidate at other call shapes with itself, and its main run with its repetition."""
        for shape in self._spread_shapes:
            other = self._roster.engine(f"candidate {shape}", plan=self._plan.reshaped(shape))
            self._spread.append(self._sides.compare(self._roster.engine(), other))

    def diagnose(self) -> None:
        """Find out why the candidate differs."""
        if not self._options.diagnose:
            return
        diagnoser = Diagnoser(
            Measured(
                config=self._snapshot.config,
                sides=self._sides,
                roster=self._roster,
                unquantized=self._options.unquantized,
                floor=self._floor,
                total=self._candidate,
                floor_limit=self._policy.floor_max_kl_nats_mean,
                threads=self._options.threads,
                on_progress=self._on_progress,
            )
        )
        self._diagnosis = diagnoser.diagnose()
        self._notes += diagnoser.notes

    def verify_unchanged(self) -> None:
        """Hash every input again.

        Raises:
            IntegrityError: one changed during the run; names it.
        """
        total = sum(entry.size_bytes for entry in self._snapshot.manifest.entries)
        self._snapshot.rehash(self._counter("hash the snapshot again", total))
        for role, path in self._files.items():
            before, (digest, _) = self._hashed[role][0], self._hash(path, f"hash {path.name} again")
            if digest != before:
                raise DigestMismatchError(
                    f"{path.name}: expected sha256 {before.hex} as at the start, got {digest.hex}"
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
        files = {
            role: {"name": path.name, "size_bytes": self._hashed[role][1], "sha256": self._hashed[role][0].hex}
            for role, path in self._files.items()
        }
        add("plan.json", self._plan.to_record())
        add("snapshot.json", self._snapshot.record())
        add("candidate.json", candidate_record(files, self._options.engine, self._sides))
        add("reference.json", reference_record(self._sides))
        add("cache.json", cache_record(teacher))
        add("calls.json", calls_record(self._sides, teacher, digests))
        report = Report(
            vocabulary_rows=self._snapshot.config.vocab_size,
            real_vocabulary=self._parity.real_vocabulary,
            floor=self._floor,
            reference_bf16=self._bf16,
            candidate=self._candidate,
            spread=tuple(self._spread),
            tokenizer=self._parity.parity,
            audit=self._audit,
            diagnosis=self._diagnosis,
            worst=self._worst_positions(),
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
        writer.add("host.json", host_record(self._sides, self._started))
        return Outcome(verdict=verdict, report=report, folder=writer.finish(), digests=digests)

    def _worst_positions(self) -> tuple[WorstPosition, ...]:
        tokenizer = SnapshotTokenizer(self._snapshot.folder)
        return tuple(_decoded(row, self._plan, tokenizer) for row in self._worst.sorted())

    def _make_roster(self, checked: Snapshot) -> Roster:
        # One setting for all call shapes, so that the shape alone is what differs between them.
        shapes = [*self._spread_shapes, *([CallShape.parse("prefill")] if self._options.diagnose else [])]
        plans = (self._plan, *(self._plan.reshaped(shape) for shape in shapes))
        return Roster(
            snapshot=checked.folder,
            gguf=self._gguf,
            plan=self._plan,
            work=self._work,
            max_sequence_tokens=self._capacity,
            max_call_tokens=max(max(example.calls) for plan in plans for example in plan.examples),
            teacher_kind=self._options.teacher,
            reference_kind=self._options.reference,
            engine_kind=self._options.engine,
            engine_settings=self._options.engine_settings,
        )

    def _hash(self, path: Path, stage: str) -> tuple[Digest, int]:
        return sha256_file(path, self._counter(stage, path.stat().st_size))

    def _counter(self, stage: str, total: int) -> Callable[[int], None]:
        done = 0

        def count(size: int) -> None:
            nonlocal done
            done += size
            self._on_progress(stage, done, max(total, done))

        return count

    def _read_teacher_record(self) -> dict[str, Any]:
        name = "teacher.f32.json"
        return parse_object((self._work / name).read_bytes(), name)


def _decoded(row: WorstRow, plan: Plan, tokenizer: SnapshotTokenizer) -> WorstPosition:
    ids = plan.examples[row.example].token_ids
    after = ids[row.position + 1 : row.position + 2]

    def top(shares: tuple[tuple[int, float], ...]) -> tuple[TokenShare, ...]:
        return tuple(
            TokenShare(token_id=token, text=tokenizer.decode([token]), probability=share) for token, share in shares
        )

    return WorstPosition(
        where=Where(example=row.example, position=row.position),
        kl_nats=row.kl_nats,
        context=tokenizer.decode(ids[max(0, row.position + 1 - _CONTEXT_TOKENS) : row.position + 1]),
        following=tokenizer.decode(after) if after else None,
        expected_top=top(row.expected_top),
        actual_top=top(row.actual_top),
    )
