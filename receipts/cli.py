"""The command `receipts`: check, show or decide again a run, with Python alone."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from receipts.chain import RunCheck, parse_receipt, verify_run
from receipts.comparison import Comparison
from receipts.digest import sha256_bytes
from receipts.errors import HarnessError, InputError, ReceiptFormatError
from receipts.policy import Policy
from receipts.report import Report
from receipts.verdict import Verdict, decide

_EXIT_CODES = "exit codes: 0 whole (decide: passed), 2 not whole or wrong input, 3 not decided, 4 gate failed"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(prog="receipts", description=__doc__, epilog=_EXIT_CODES)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, action, text in (
        ("verify", _run_verify, "check every digest of RUN and decide again"),
        ("show", _run_show, "check RUN and print what it holds"),
    ):
        command = commands.add_parser(name, help=text, epilog=_EXIT_CODES)
        command.add_argument("run_folder", metavar="RUN", type=Path)
        command.set_defaults(run=action)
    again = commands.add_parser("decide", help="hold REPORT against POLICY", epilog=_EXIT_CODES)
    again.add_argument("report", metavar="REPORT.json", type=Path)
    again.add_argument("policy", metavar="POLICY.toml", type=Path)
    again.set_defaults(run=_run_decide)
    for command in commands.choices.values():
        command.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except HarnessError as error:
        if arguments.json:
            print(json.dumps({"error": {"type": type(error).__name__, "message": str(error)}, "exit_code": 2}))
        print(_printable(f"receipts: {error}"), file=sys.stderr)
        return 2


def _run_verify(arguments: argparse.Namespace) -> int:
    run = verify_run(arguments.run_folder)
    if arguments.json:
        print(json.dumps({"whole": True, "run_sha256": run.run_sha256, "verdict": run.verdict.status}))
    else:
        print(f"{arguments.run_folder}: whole, {len(run.digests)} files, run sha256 {run.run_sha256}")
        print(_printable(f"verdict: {run.verdict.status}, {run.verdict.reason}"))
    return 0


def _run_show(arguments: argparse.Namespace) -> int:
    run = verify_run(arguments.run_folder)
    if arguments.json:
        form = {"run_sha256": run.run_sha256, "digests": dict(run.digests), "receipts": dict(run.receipts)}
        print(json.dumps(form))
    else:
        try:
            lines = _show(run)
        except (KeyError, TypeError) as error:  # the chain holds; these are fields that nothing is decided by
            raise ReceiptFormatError(f"{arguments.run_folder}: expected what `show` prints, got no {error}") from error
        print("\n".join(map(_printable, lines)))
    return 0


def _run_decide(arguments: argparse.Namespace) -> int:
    try:
        data = arguments.report.read_bytes()
    except OSError as error:
        raise InputError(f"{arguments.report}: expected a report, got '{error.strerror}'") from error
    form = parse_receipt(data, arguments.report.name)
    policy = Policy.load(arguments.policy)
    verdict = decide(Report.from_dict(form), policy, report_sha256=sha256_bytes(data).hex, policy_sha256=policy.sha256)
    lines = [json.dumps(verdict.to_dict())] if arguments.json else map(_printable, _verdict_lines(verdict))
    print("\n".join(lines))
    return verdict.exit_code


def _printable(line: str) -> str:
    """Return a line without characters that move a terminal's cursor: a stranger wrote what it quotes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def _show(run: RunCheck) -> list[str]:
    snapshot, candidate = run.receipts["snapshot.json"], run.receipts["candidate.json"]
    host, report = run.receipts["host.json"], run.report
    origin: dict[str, Any] = snapshot["origin"]
    commit = f" at commit {origin['commit']}" if origin["commit"] else ""
    lines = [
        f"snapshot   {origin['name']}{commit}, root sha256 {snapshot['manifest']['root_sha256']}",
        f"candidate  {candidate['file']['name']}, sha256 {candidate['file']['sha256']}, engine {candidate['engine']}",
        f"plan       {report.candidate.positions} positions of {report.candidate.examples} examples",
        f"ran        {host['started']} to {host['finished']} on {host['system']}",
        "",
        f"{'expected against actual':44}{'mean KLD':>12}{'p99':>12}{'max':>12}{'top-1':>9}{'max diff':>11}",
    ]
    sides = [report.floor, report.reference_bf16, report.candidate, *report.spread]
    lines += [_comparison_line(side) for side in sides if side is not None]
    lines += ["", *_causes(report), *(f"note: {note}" for note in report.notes), *_verdict_lines(run.verdict), ""]
    lines += [f"{digest}  {name}" for name, digest in sorted(run.digests.items())]
    return lines


def _causes(report: Report) -> Iterator[str]:
    """Yield what the audit and the diagnosis found."""
    if report.audit is not None:
        yield from report.audit.sentences
    if report.diagnosis is not None:
        cells = report.diagnosis.cells
        yield from (f"{one.name}: {one.sentence}" for one in (() if cells is None else cells.contrasts))
        yield from report.diagnosis.sentences


def _comparison_line(found: Comparison) -> str:
    name = f"{found.expected} against {found.actual}"
    if found.kl_nats is None:
        return f"{name:44}{'no finite row':>12}"
    stats = found.kl_nats
    figures = "".join(f"{value:12.3e}" for value in (stats.mean, stats.p99, stats.max))
    return f"{name:44}{figures}{found.top1_agreement:9.2%}{found.max_abs_centred:11.2e}"


def _verdict_lines(verdict: Verdict) -> list[str]:
    lines = [f"{check.outcome:13}{check.sentence}" for check in verdict.checks]
    return [*lines, f"{verdict.status}: {verdict.reason} (policy {verdict.policy})"]


if __name__ == "__main__":
    sys.exit(main())
