"""The command `teacher`: verify, audit or locate a GGUF's differences from its source, and show or record runs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from receipts.errors import HarnessError
from teacher.cli import audit, golden, locate, report, verify
from teacher.cli.arguments import EXIT_CODES


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
    parser = argparse.ArgumentParser(prog="teacher", description=__doc__, epilog=EXIT_CODES)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (verify, audit, locate, report, golden):
        command.add(commands)
    return parser
