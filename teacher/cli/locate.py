"""`teacher locate`: the layers and operations at which a candidate leaves its band."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from receipts.cache_plan import MAX_SEQUENCE_TOKENS
from receipts.errors import InputError
from teacher.cli.arguments import EXIT_CODES, add_engine, add_inputs, add_output, engine_settings, positive
from teacher.diagnose.locate import choose_examples, locate
from teacher.gguf.file import read_gguf
from teacher.gguf.match import verify_matches
from teacher.plans.plan import Plan, load_plan
from teacher.report.localisation_table import print_localisation
from teacher.report.progress import StageProgress
from teacher.sides.roster import Roster
from teacher.snapshot.folder import read_snapshot
from teacher.verification import Options


def add(commands: Any) -> None:
    """Add the command."""
    command = commands.add_parser(
        "locate", help="find the layers and operations at which a GGUF or its engine errs", epilog=EXIT_CODES
    )
    add_inputs(command)
    command.add_argument("--layer", type=int, metavar="L", help="run this layer alone, and show its operations")
    command.add_argument("--plan", type=Path, metavar="FILE", help="JSONL of texts, chats or token ids (built-in)")
    command.add_argument(
        "--example", action="append", default=[], metavar="NAME", help="an example to trace (the plan's first two)"
    )
    add_engine(command)
    add_output(command)
    command.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    snapshot = read_snapshot(arguments.snapshot, revision=arguments.revision, allow_download=arguments.download)
    config = snapshot.config
    verify_matches(read_gguf(arguments.gguf), config)
    if arguments.layer is not None and not 0 <= arguments.layer < config.num_hidden_layers:
        raise InputError(f"--layer: expected 0 to {config.num_hidden_layers - 1}, got {arguments.layer}")
    options = Options()
    plan = load_plan(
        arguments.plan, snapshot.folder, vocabulary_rows=config.vocab_size,
        max_sequence_tokens=MAX_SEQUENCE_TOKENS, call_shape=options.call_shape,
    )  # fmt: skip
    traced = choose_examples(_chosen(plan, arguments.example), None)
    lengths = [length for example in traced.examples for length in example.calls]
    with tempfile.TemporaryDirectory(prefix="source-teacher-") as work, StageProgress(quiet=arguments.quiet) as bar:
        roster = Roster(
            snapshot=snapshot.folder,
            gguf=arguments.gguf,
            plan=plan,
            work=Path(work),
            max_sequence_tokens=max(len(example.token_ids) for example in traced.examples),
            max_call_tokens=max(lengths),
            teacher_kind=options.teacher,
            reference_kind=options.reference,
            engine_kind=arguments.engine,
            engine_settings=engine_settings(arguments.set),
        )
        found = locate(
            roster, traced, config=config, threads=positive(arguments.threads, "--threads"), on_progress=bar,
            only_layer=arguments.layer,
        )  # fmt: skip
    exit_code = 4 if found.culprits or found.rounding else 0
    if arguments.json:
        print(json.dumps({**asdict(found), "exit_code": exit_code}))
    else:
        print_localisation(found, Console(width=None if sys.stdout.isatty() else 160))
    return exit_code


def _chosen(plan: Plan, names: list[str]) -> Plan:
    known = [example.name for example in plan.examples]
    for name in names:
        if name not in known:
            raise InputError(f"--example: expected one of {', '.join(known)}, got {name!r}")
    return plan.only(*(known.index(name) for name in names)) if names else plan
