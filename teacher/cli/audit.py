"""`teacher audit`: every tensor and key of a file against its source, without running it."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from rich.console import Console

from teacher.audit.tensors import audit_file
from teacher.cli.arguments import EXIT_CODES, add_inputs, add_output, positive
from teacher.report.audit_table import print_audit
from teacher.report.progress import StageProgress
from teacher.snapshot.folder import read_snapshot


def add(commands: Any) -> None:
    """Add the command."""
    audit = commands.add_parser(
        "audit", help="compare every tensor of a GGUF with its source, without running it", epilog=EXIT_CODES
    )
    add_inputs(audit)
    audit.add_argument("--all", action="store_true", help="print every tensor, not the worst alone")
    add_output(audit)
    audit.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    snapshot = read_snapshot(arguments.snapshot, revision=arguments.revision, allow_download=arguments.download)
    total = sum(entry.stop - entry.start for entry in snapshot.tensors.values())
    done = 0
    with StageProgress(quiet=arguments.quiet) as progress:

        def count(size: int) -> None:
            nonlocal done
            done += size
            progress("audit tensors", done, total)

        audit = audit_file(snapshot, arguments.gguf, threads=positive(arguments.threads, "--threads"), on_bytes=count)
    exit_code = 0 if audit.passed else 4
    if arguments.json:
        print(json.dumps({**audit.to_dict(), "exit_code": exit_code}))
    else:
        print_audit(audit, Console(width=None if sys.stdout.isatty() else 160), every=arguments.all)
    return exit_code
