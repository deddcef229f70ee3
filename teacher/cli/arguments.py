"""What several commands take, read and checked in one place."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from receipts.errors import InputError
from teacher.verification import Options

EXIT_CODES = """exit codes: 0 passed, 2 wrong usage or input (or the sides cannot be compared), 3 not decided,
4 gate failed; 1 is a crash"""


def add_inputs(command: argparse.ArgumentParser) -> None:
    """Add snapshot, file, and how they are had."""
    command.add_argument("snapshot", metavar="SNAPSHOT", help="model folder, or hub id such as org/name")
    command.add_argument("gguf", metavar="MODEL.gguf", type=Path)
    command.add_argument("--revision", help="branch, tag or commit of a hub id")
    command.add_argument("--download", action="store_true", help="fetch what the hub's cache lacks")
    command.add_argument("--threads", type=int, default=Options().threads, help="of each engine (%(default)s)")


def add_engine(command: argparse.ArgumentParser) -> None:
    """Add the candidate's engine and its settings."""
    command.add_argument("--engine", default=Options().engine, help="the candidate's engine (%(default)s)")
    command.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE",
        help="an engine setting, such as flash_attention=off, type_k=f32 or n_ubatch=256",
    )  # fmt: skip


def add_output(command: argparse.ArgumentParser) -> None:
    """Add how results and progress are shown."""
    command.add_argument("--json", action="store_true", help="print one JSON object")
    command.add_argument("--quiet", action="store_true", help="no progress")


def add_documents(command: argparse.ArgumentParser) -> None:
    """Add the documents of a run."""
    command.add_argument("--html", type=Path, metavar="FILE", help="write a report for a browser, in one file")
    command.add_argument("--junit", type=Path, metavar="FILE", help="write JUnit XML for CI")
    command.add_argument("--markdown", type=Path, metavar="FILE", help="write a Markdown summary for CI")


def positive(value: int, name: str) -> int:
    """Return a count that is at least 1.

    Raises:
        InputError: it is not; names the option.
    """
    if value < 1:
        raise InputError(f"{name}: expected at least 1, got {value}")
    return value


def engine_settings(texts: list[str]) -> dict[str, Any]:
    """Return the settings that NAME=VALUE texts hold; numbers, true and false are read as JSON.

    Raises:
        InputError: a text has another form.
    """
    return dict(_setting(text) for text in texts)


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise InputError(f"--set: expected NAME=VALUE, got {text!r}")
    try:
        return name, json.loads(value)  # numbers and true or false
    except ValueError:
        return name, value
