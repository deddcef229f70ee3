"""`teacher report`: documents of a finished run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from receipts.errors import InputError
from teacher.cli.arguments import EXIT_CODES, add_documents
from teacher.report.documents import write_documents


def add(commands: Any) -> None:
    """Add the command."""
    report = commands.add_parser("report", help="write documents of a finished RUN", epilog=EXIT_CODES)
    report.add_argument("run_folder", metavar="RUN", type=Path)
    add_documents(report)
    report.add_argument("--json", action="store_true", help="print one JSON object")
    report.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    wanted = {name: getattr(arguments, name) for name in ("html", "junit", "markdown")}
    if not any(wanted.values()):
        raise InputError("report: expected --html, --junit or --markdown with a file, got none")
    paths = write_documents(arguments.run_folder, **wanted)
    if arguments.json:
        print(json.dumps({"documents": [str(path) for path in paths]}))
    else:
        print("\n".join(str(path) for path in paths))
    return 0
