"""A run folder: written whole or not at all, and checked end to end, offline.

    plan.json  snapshot.json  candidate.json  reference.json  cache.json
        calls.json        uses plan and cache
            report.json   uses all of the above
                verdict.json   uses the report and policy.toml, and can be decided again from them
    host.json             timestamps and machine; nothing uses it
    SHA256SUMS            one line for every other file, as `sha256sum --check` reads it

Every JSON file is canonical (RFC 8785). The SHA-256 of verdict.json names the whole run but for host.json.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from receipts.cache_plan import CacheReceipt, verify_plan, verify_receipt
from receipts.canonical import canonical_bytes, parse_canonical
from receipts.digest import sha256_bytes, sha256_file
from receipts.errors import (
    DigestMismatchError,
    HarnessError,
    IntegrityError,
    MissingFileError,
    OutputError,
    ReceiptFormatError,
    UnexpectedFileError,
)
from receipts.files import write_atomic
from receipts.manifest import SnapshotManifest
from receipts.plain import from_plain
from receipts.policy import Policy
from receipts.report import Report
from receipts.verdict import Verdict, decide

SUMS = "SHA256SUMS"
MEASURED = ("plan.json", "snapshot.json", "candidate.json", "reference.json", "cache.json", "calls.json")
USES: Mapping[str, tuple[str, ...]] = {
    "plan.json": (),
    "snapshot.json": (),
    "candidate.json": (),
    "reference.json": (),
    "cache.json": (),
    "calls.json": ("plan.json", "cache.json"),
    "report.json": MEASURED,
    "verdict.json": ("report.json", "policy.toml"),
    "host.json": (),
}
"""Each JSON receipt -> the files whose digests it names."""
FILES = (*USES, "policy.toml")
_LINE = re.compile(r"([0-9a-f]{64})  ([^\n]+)")
_HEX = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRecord:
    """One call of calls.json.

    Attributes:
        example, call: indices into the plan's examples, and into the calls of that example.
        position: first token position of the call within the example.
        rows, width: positions of the call, and logits of each.
        teacher_sha256, reference_sha256, candidate_sha256: digests of the float32 logits of each side, in hex.
        graph_policy_sha256: digest of the settings the teacher computed it under, in hex.
    """

    example: int
    call: int
    position: int
    rows: int
    width: int
    teacher_sha256: str
    reference_sha256: str
    candidate_sha256: str
    graph_policy_sha256: str


class RunWriter:
    """Writes a run folder beside its place and renames it when it is whole; a context manager.

    Args:
        target: the folder to make; it must not exist.

    Raises:
        OutputError: the target exists, or its parent cannot be written to; before anything else is done.
    """

    def __init__(self, target: Path) -> None:
        if target.exists() or target.is_symlink():
            raise OutputError(f"{target}: expected no such folder yet, got one; a run is never written over")
        self._target = target
        self._made: list[Path] = []
        try:
            for parent in reversed(target.absolute().parents):
                if not parent.exists():
                    parent.mkdir()
                    self._made.append(parent)
            self._staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
        except OSError as error:
            self._remove_parents()
            raise OutputError(
                f"{target}: expected a place that can be written, got '{error.strerror}' at {error.filename}"
            ) from error

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._staging.exists():  # not finished
            shutil.rmtree(self._staging, ignore_errors=True)
            self._remove_parents()

    def add(self, name: str, value: Any) -> str:
        """Write a receipt; return the SHA-256 of its bytes, in hex."""
        return self.add_bytes(name, canonical_bytes(value))

    def add_bytes(self, name: str, data: bytes) -> str:
        """Write a file as it is; return its SHA-256, in hex."""
        assert name in FILES, name
        write_atomic(self._staging / name, data)
        return sha256_bytes(data).hex

    def finish(self) -> Path:
        """Write SHA256SUMS, check the whole folder, and put it in its place."""
        written = [path for path in self._staging.iterdir() if path.name != SUMS]
        digests = {path.name: sha256_file(path)[0].hex for path in written}
        write_atomic(self._staging / SUMS, _sums(digests))
        verify_run(self._staging)
        self._staging.chmod(0o755)
        try:
            self._staging.rename(self._target)
        except OSError as error:
            raise OutputError(f"{self._target}: expected a free place, got '{error.strerror}'") from error
        return self._target

    def _remove_parents(self) -> None:
        for parent in reversed(self._made):
            try:
                parent.rmdir()
            except OSError:
                return  # somebody else has put something there


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCheck:
    """What a run folder was found to hold.

    Attributes:
        report, verdict: read back, the verdict decided again.
        digests: file -> SHA-256, in hex.
        run_sha256: SHA-256 of verdict.json, which names all that was measured.
        receipts: every JSON receipt as plain values.
    """

    report: Report
    verdict: Verdict
    digests: Mapping[str, str]
    run_sha256: str
    receipts: Mapping[str, Any]


def verify_run(folder: Path) -> RunCheck:
    """Check a run folder end to end and decide again.

    Raises:
        MissingFileError, UnexpectedFileError: the folder holds other files than a run does.
        IntegrityError, ReceiptFormatError, CanonicalError: names the file that is not what it was.
    """
    data = _read_files(folder)
    sums = data.pop(SUMS)
    digests = {name: sha256_bytes(content).hex for name, content in data.items()}
    _verify_sums(sums, data, digests)
    receipts = {name: _parse(name, data[name]) for name in USES}
    for name, used in USES.items():
        recorded = receipts[name].get("uses", {})
        if not isinstance(recorded, dict) or set(recorded) != set(used):
            raise ReceiptFormatError(f"{name}: expected to use {sorted(used)}, got {recorded!r:.120}")
        for other in used:
            if recorded[other] != digests[other]:
                raise DigestMismatchError(
                    f"{other}: expected sha256 {recorded[other]} as {name} recorded it, got {digests[other]}"
                )
    report = _within("report.json", lambda: Report.from_dict(receipts["report.json"]))
    verdict = _within("verdict.json", lambda: Verdict.from_dict(receipts["verdict.json"]))
    if canonical_bytes(_decide(data, digests).to_dict()) != data["verdict.json"]:
        raise IntegrityError("verdict.json: expected what report.json and policy.toml give, got another verdict")
    _within("snapshot.json", lambda: SnapshotManifest.from_dict(receipts["snapshot.json"]["manifest"]))
    _within("cache.json", lambda: _verify_cache(receipts["cache.json"]))
    planned = _within("plan.json", lambda: _planned_calls(receipts["plan.json"]))
    _within("calls.json", lambda: _verify_calls(planned, receipts["calls.json"], report.vocabulary_rows))
    positions = sum(rows for _, _, _, rows in planned)
    for comparison in (report.floor, report.candidate):
        if comparison.positions != positions:
            raise IntegrityError(
                f"report.json: expected the {positions} positions of plan.json, got {comparison.positions} of"
                f" {comparison.actual}"
            )
    return RunCheck(
        report=report,
        verdict=verdict,
        digests={**digests, SUMS: sha256_bytes(sums).hex},
        run_sha256=digests["verdict.json"],
        receipts=receipts,
    )


def parse_receipt(data: bytes, name: str) -> dict[str, Any]:
    """Read the canonical bytes of a receipt.

    Raises:
        CanonicalError, ReceiptFormatError: the bytes are not canonical, or no receipt; names it.
    """
    value = parse_canonical(data, name)
    if not isinstance(value, dict):
        raise ReceiptFormatError(f"{name}: expected a receipt, got {type(value).__name__}")
    return value


def _read_files(folder: Path) -> dict[str, bytes]:
    """Return the bytes of each file, every one read once."""
    try:
        _verify_names(folder)
        return {name: (folder / name).read_bytes() for name in (*FILES, SUMS)}
    except OSError as error:
        raise IntegrityError(f"{error.filename}: expected a readable file, got '{error.strerror}'") from error


def _verify_names(folder: Path) -> None:
    if not folder.is_dir():
        raise MissingFileError(f"{folder}: expected a run folder, got none")
    present = {path.name for path in folder.iterdir()}
    expected = {*FILES, SUMS}
    for name in sorted(expected - present):
        raise MissingFileError(f"{name}: expected the file in {folder}, got none")
    for name in sorted(present - expected):
        raise UnexpectedFileError(f"{name}: expected only the files of a run in {folder}, got one more")
    for name in sorted(expected):
        if not (folder / name).is_file() or (folder / name).is_symlink():
            raise UnexpectedFileError(f"{name}: expected a file in {folder}, got a folder or a link")


def _sums(digests: Mapping[str, str]) -> bytes:
    return "".join(f"{digests[name]}  {name}\n" for name in sorted(digests)).encode()


def _verify_sums(sums: bytes, data: Mapping[str, bytes], digests: Mapping[str, str]) -> None:
    """Hold every file against SHA256SUMS, and say which side of a difference was changed."""
    lines = [_LINE.fullmatch(line) for line in sums.decode("utf-8", errors="replace").split("\n")[:-1]]
    recorded = {line.group(2): line.group(1) for line in lines if line is not None}
    if set(recorded) != set(digests) or _sums(recorded) != sums:
        raise ReceiptFormatError(f"{SUMS}: expected one line for each of {len(digests)} files, in order, got others")
    for name in sorted(digests):
        if recorded[name] != digests[name]:
            culprit = SUMS if _is_vouched(name, data, digests) else name
            raise DigestMismatchError(
                f"{culprit}: expected {name} to have sha256 {recorded[name]} by {SUMS}, got {digests[name]}"
            )


def _is_vouched(name: str, data: Mapping[str, bytes], digests: Mapping[str, str]) -> bool:
    """Say whether another receipt names exactly these bytes, so that it is the sum that was changed."""
    try:
        if name == "verdict.json":
            return canonical_bytes(_decide(data, digests).to_dict()) == data[name]
        users = [user for user, used in USES.items() if name in used]
        return any(_parse(user, data[user])["uses"].get(name) == digests[name] for user in users)
    except HarnessError:
        return False


def _decide(data: Mapping[str, bytes], digests: Mapping[str, str]) -> Verdict:
    report = _within("report.json", lambda: Report.from_dict(_parse("report.json", data["report.json"])))
    policy = _within("policy.toml", lambda: Policy.parse(data["policy.toml"], "policy.toml"))
    return decide(report, policy, report_sha256=digests["report.json"], policy_sha256=digests["policy.toml"])


def _parse(name: str, data: bytes) -> dict[str, Any]:
    value = parse_receipt(data, name)
    version = "v2" if name == "report.json" else "v1"
    schema = f"source-teacher/{name.removesuffix('.json')}/{version}"
    if value.get("schema") != schema:
        raise ReceiptFormatError(f"{name}: expected schema {schema}, got another")
    return value


def _within(name: str, action: Any) -> Any:
    """Run a check of one file; what it finds is said of that file."""
    try:
        return action()
    except HarnessError as error:
        if str(error).startswith(name):
            raise
        raise type(error)(f"{name}: {error}", **error.facts) from error
    except (KeyError, TypeError, AttributeError) as error:
        raise ReceiptFormatError(f"{name}: expected its fields, got '{error!r}'") from error


def _verify_cache(form: Mapping[str, Any]) -> None:
    receipt = CacheReceipt.from_dict(form["receipt"])
    verify_plan(receipt.plan)
    verify_receipt(receipt)


def _planned_calls(plan: Mapping[str, Any]) -> list[tuple[int, int, int, int]]:
    """Return (example, call, position, rows) of every call of the plan."""
    found = []
    for index, example in enumerate(plan["examples"]):
        tokens, calls = example["token_ids"], example["calls"]
        whole = all(type(value) is int for value in (*tokens, *calls))
        if not whole or min(tokens, default=-1) < 0 or min(calls, default=0) < 1 or sum(calls) != len(tokens):
            raise ReceiptFormatError(
                f"example {index}: expected token ids, and calls of at least one token that sum to their number"
            )
        position = 0
        for call, rows in enumerate(calls):
            found.append((index, call, position, rows))
            position += rows
    if not found:
        raise ReceiptFormatError("plan.json: expected at least one example, got none")
    return found


def _verify_calls(planned: list[tuple[int, int, int, int]], form: Mapping[str, Any], width: int) -> None:
    policy = sha256_bytes(canonical_bytes(form["graph_policy"])).hex
    if len(form["calls"]) != len(planned):
        raise IntegrityError(f"calls.json: expected {len(planned)} calls of plan.json, got {len(form['calls'])}")
    for want, plain in zip(planned, form["calls"], strict=True):
        place = f"calls.json: example {want[0]} call {want[1]}"
        record = from_plain(CallRecord, plain, place)
        got = (record.example, record.call, record.position, record.rows)
        if got != want:
            raise IntegrityError(f"{place}: expected position {want[2]} and {want[3]} rows, got {got}")
        if record.width != width:
            raise IntegrityError(f"{place}: expected rows of {width} logits as in report.json, got {record.width}")
        for name in ("teacher_sha256", "reference_sha256", "candidate_sha256"):
            value = getattr(record, name)
            if not _HEX.fullmatch(value):
                raise ReceiptFormatError(f"{place}: expected {name} to be 64 hex digits, got {value!r:.80}")
        if record.graph_policy_sha256 != policy:
            raise DigestMismatchError(
                f"{place}: expected graph policy sha256 {policy}, got {record.graph_policy_sha256!r:.80}"
            )
