"""`teacher golden`: figures of a run, recorded and held against another."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from receipts.golden import Golden, check_run, record_run
from teacher.cli.arguments import EXIT_CODES


def add(commands: Any) -> None:
    """Add the command and its actions."""
    golden = commands.add_parser("golden", help="record a run's figures, or check a run against recorded ones")
    actions = golden.add_subparsers(required=True, metavar="ACTION")
    for name, action, text in (
        ("record", _record, "write RUN's figures and their bounds to FILE"),
        ("check", _check, "compare RUN's figures with those in FILE; exit code 4 on drift"),
    ):
        command = actions.add_parser(name, help=text, epilog=EXIT_CODES)
        command.add_argument("run_folder", metavar="RUN", type=Path)
        command.add_argument("file", metavar="FILE", type=Path)
        if name == "record":
            command.add_argument(
                "--drift", type=float, default=0.25, metavar="SHARE",
                help="how far a figure may move, as a share of it (default %(default)s)",
            )  # fmt: skip
        command.add_argument("--json", action="store_true", help="print one JSON object")
        command.set_defaults(run=action)


def _record(arguments: argparse.Namespace) -> int:
    golden = record_run(arguments.run_folder, drift=arguments.drift)
    golden.write(arguments.file)
    if arguments.json:
        print(json.dumps(golden.to_dict()))
    else:
        print(f"{arguments.file}: {len(golden.quantities)} figures of {arguments.run_folder}")
    return 0


def _check(arguments: argparse.Namespace) -> int:
    drifts = check_run(arguments.run_folder, Golden.load(arguments.file))
    if arguments.json:
        print(json.dumps({"passed": not drifts, "drifts": [drift.to_dict() for drift in drifts]}))
    elif drifts:
        print("\n".join(drift.sentence for drift in drifts))
    else:
        print(f"{arguments.run_folder}: within the bounds of {arguments.file}")
    return 4 if drifts else 0
