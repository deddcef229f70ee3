"""The command `teacher`: verify or audit a GGUF against its source, show runs, and hold them against recorded ones."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from receipts.errors import HarnessError, InputError
from receipts.golden import Golden, check_run, record_run
from teacher.audit.tensors import audit_file
from teacher.policies import shipped_policies
from teacher.report.audit_table import print_audit
from teacher.report.documents import verify_places, write_documents
from teacher.report.progress import StageProgress
from teacher.report.terminal import print_outcome
from teacher.snapshot import read_snapshot
from teacher.verification import Options, Outcome, run_verification

_EXIT_CODES = """exit codes: 0 passed, 2 wrong usage or input (or the sides cannot be compared), 3 not decided,
4 gate failed; 1 is a crash"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except HarnessError as error:
        if arguments.json:
            print(json.dumps({"error": {"type": type(error).__name__, "message": str(error)}, "exit_code": 2}))
        print(f"teacher: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("teacher: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="teacher", description=__doc__, epilog=_EXIT_CODES)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_verify(commands)
    audit = commands.add_parser(
        "audit", help="compare every tensor of a GGUF with its source, without running it", epilog=_EXIT_CODES
    )
    audit.add_argument("snapshot", metavar="SNAPSHOT", help="model folder, or hub id such as org/name")
    audit.add_argument("gguf", metavar="MODEL.gguf", type=Path)
    audit.add_argument("--revision", help="branch, tag or commit of a hub id")
    audit.add_argument("--download", action="store_true", help="fetch what the hub's cache lacks")
    audit.add_argument("--threads", type=int, default=Options().threads, help="(%(default)s)")
    audit.add_argument("--all", action="store_true", help="print every tensor, not the worst alone")
    audit.add_argument("--json", action="store_true", help="print one JSON object")
    audit.add_argument("--quiet", action="store_true", help="no progress")
    audit.set_defaults(run=_run_audit)
    report = commands.add_parser("report", help="write documents of a finished RUN", epilog=_EXIT_CODES)
    report.add_argument("run_folder", metavar="RUN", type=Path)
    _add_documents(report)
    report.add_argument("--json", action="store_true", help="print one JSON object")
    report.set_defaults(run=_run_report)
    golden = commands.add_parser("golden", help="record a run's figures, or check a run against recorded ones")
    actions = golden.add_subparsers(required=True, metavar="ACTION")
    for name, action, text in (
        ("record", _run_golden_record, "write RUN's figures and their bounds to FILE"),
        ("check", _run_golden_check, "compare RUN's figures with those in FILE; exit code 4 on drift"),
    ):
        command = actions.add_parser(name, help=text, epilog=_EXIT_CODES)
        command.add_argument("run_folder", metavar="RUN", type=Path)
        command.add_argument("file", metavar="FILE", type=Path)
        if name == "record":
            command.add_argument(
                "--drift", type=float, default=0.25, metavar="SHARE",
                help="how far a figure may move, as a share of it (default %(default)s)",
            )  # fmt: skip
        command.add_argument("--json", action="store_true", help="print one JSON object")
        command.set_defaults(run=action)
    return parser


def _add_verify(commands: Any) -> None:
    defaults = Options()
    verify = commands.add_parser(
        "verify", help="say whether a GGUF still is the model its snapshot holds", epilog=_EXIT_CODES
    )
    verify.add_argument("snapshot", metavar="SNAPSHOT", help="model folder, or hub id such as org/name")
    verify.add_argument("gguf", metavar="MODEL.gguf", type=Path)
    verify.add_argument("--plan", type=Path, metavar="FILE", help="JSONL of texts, chats or token ids (built-in)")
    names = ", ".join(sorted(shipped_policies()))
    verify.add_argument("--policy", metavar="FILE", help=f"policy file, or one of {names} (by file type)")
    verify.add_argument("--out", type=Path, metavar="RUN", help="run folder to write (runs/NAME)")
    verify.add_argument("--revision", help="branch, tag or commit of a hub id")
    verify.add_argument("--download", action="store_true", help="fetch what the hub's cache lacks")
    verify.add_argument(
        "--calls", default=defaults.call_shape, metavar="SHAPE",
        help="mixed[:N], prefill, chunks:N or decode[:P]; cuts examples without calls of their own (%(default)s)",
    )  # fmt: skip
    verify.add_argument(
        "--spread", default=",".join(defaults.spread), metavar="SHAPES",
        help="call shapes at which the candidate is compared with itself, or none (%(default)s)",
    )  # fmt: skip
    verify.add_argument("--reference-bf16", action="store_true", help="run PyTorch in BF16 too, for scale")
    verify.add_argument("--max-tokens", type=int, metavar="N", help="capacity of the cache (the longest example)")
    verify.add_argument("--threads", type=int, default=defaults.threads, help="of each engine (%(default)s)")
    verify.add_argument("--engine", default=defaults.engine, help="the candidate's engine (%(default)s)")
    verify.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE",
        help="an engine setting, such as flash_attention=off, type_k=f32 or n_ubatch=256",
    )  # fmt: skip
    verify.add_argument(
        "--unquantized", type=Path, metavar="FILE.gguf",
        help="a GGUF of the source's own values (BF16 or F32), run too: what conversion and engine alone lose",
    )  # fmt: skip
    verify.add_argument(
        "--no-diagnosis", action="store_true", help="decide only: no four cells and no localisation"
    )
    _add_documents(verify)
    verify.add_argument("--json", action="store_true", help="print one JSON object")
    verify.add_argument("--quiet", action="store_true", help="no progress")
    verify.set_defaults(run=_run_verify)


def _add_documents(command: argparse.ArgumentParser) -> None:
    command.add_argument("--html", type=Path, metavar="FILE", help="write a report for a browser, in one file")
    command.add_argument("--junit", type=Path, metavar="FILE", help="write JUnit XML for CI")
    command.add_argument("--markdown", type=Path, metavar="FILE", help="write a Markdown summary for CI")


def _run_verify(arguments: argparse.Namespace) -> int:
    options = Options(
        revision=arguments.revision,
        allow_download=arguments.download,
        call_shape=arguments.calls,
        spread=() if arguments.spread in ("", "none") else tuple(arguments.spread.split(",")),
        reference_bf16=arguments.reference_bf16,
        max_sequence_tokens=arguments.max_tokens,
        threads=_positive(arguments.threads, "--threads"),
        engine=arguments.engine,
        engine_settings=dict(_setting(text) for text in arguments.set),
        diagnose=not arguments.no_diagnosis,
        unquantized=arguments.unquantized,
    )
    run_folder = arguments.out or _free_folder(arguments.gguf.stem)
    documents = {name: getattr(arguments, name) for name in ("html", "junit", "markdown")}
    verify_places(run_folder, [path for path in documents.values() if path is not None])
    with StageProgress(quiet=arguments.quiet) as progress:
        outcome = run_verification(
            arguments.snapshot,
            arguments.gguf,
            arguments.plan,
            arguments.policy,
            out=run_folder,
            options=options,
            on_progress=progress,
        )
    write_documents(run_folder, **documents)
    if arguments.json:
        print(json.dumps(_plain(outcome), indent=2))
    else:
        console = Console(width=None if sys.stdout.isatty() else 120)
        print_outcome(outcome.report, outcome.verdict, console)
        console.print(f"run folder: {outcome.folder}  (receipts verify {outcome.folder})", markup=False, soft_wrap=True)
    return outcome.verdict.exit_code


def _run_audit(arguments: argparse.Namespace) -> int:
    snapshot = read_snapshot(
        arguments.snapshot, revision=arguments.revision, allow_download=arguments.download
    )
    total = sum(entry.stop - entry.start for entry in snapshot.tensors.values())
    done = 0
    with StageProgress(quiet=arguments.quiet) as progress:

        def count(size: int) -> None:
            nonlocal done
            done += size
            progress("audit tensors", done, total)

        audit = audit_file(
            snapshot, arguments.gguf, threads=_positive(arguments.threads, "--threads"), on_bytes=count
        )
    exit_code = 0 if audit.passed else 4
    if arguments.json:
        print(json.dumps({**audit.to_dict(), "exit_code": exit_code}))
    else:
        print_audit(audit, Console(width=None if sys.stdout.isatty() else 160), every=arguments.all)
    return exit_code


def _run_report(arguments: argparse.Namespace) -> int:
    wanted = {name: getattr(arguments, name) for name in ("html", "junit", "markdown")}
    if not any(wanted.values()):
        raise InputError("report: expected --html, --junit or --markdown with a file, got none")
    paths = write_documents(arguments.run_folder, **wanted)
    if arguments.json:
        print(json.dumps({"documents": [str(path) for path in paths]}))
    else:
        print("\n".join(str(path) for path in paths))
    return 0


def _plain(outcome: Outcome) -> dict[str, Any]:
    return {
        "verdict": outcome.verdict.to_dict(),
        "exit_code": outcome.verdict.exit_code,
        "run": str(outcome.folder),
        "digests": dict(outcome.digests),
        "report": outcome.report.to_dict(),
    }


def _free_folder(name: str) -> Path:
    """Return runs/NAME, or the first of runs/NAME-2, runs/NAME-3, ... that is free."""
    folder, number = Path("runs") / name, 2
    while folder.exists():
        folder, number = Path("runs") / f"{name}-{number}", number + 1
    return folder


def _positive(value: int, name: str) -> int:
    if value < 1:
        raise InputError(f"{name}: expected at least 1, got {value}")
    return value


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise InputError(f"--set: expected NAME=VALUE, got {text!r}")
    try:
        return name, json.loads(value)  # numbers and true or false
    except ValueError:
        return name, value


def _run_golden_record(arguments: argparse.Namespace) -> int:
    golden = record_run(arguments.run_folder, drift=arguments.drift)
    golden.write(arguments.file)
    if arguments.json:
        print(json.dumps(golden.to_dict()))
    else:
        print(f"{arguments.file}: {len(golden.quantities)} figures of {arguments.run_folder}")
    return 0


def _run_golden_check(arguments: argparse.Namespace) -> int:
    drifts = check_run(arguments.run_folder, Golden.load(arguments.file))
    if arguments.json:
        print(json.dumps({"passed": not drifts, "drifts": [drift.to_dict() for drift in drifts]}))
    elif drifts:
        print("\n".join(drift.sentence for drift in drifts))
    else:
        print(f"{arguments.run_folder}: within the bounds of {arguments.file}")
    return 4 if drifts else 0
