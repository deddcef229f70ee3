"""`teacher verify`: the main job."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from teacher.cli.arguments import (
    EXIT_CODES,
    add_documents,
    add_engine,
    add_inputs,
    add_output,
    engine_settings,
    positive,
)
from teacher.policies import shipped_policies
from teacher.report.documents import verify_places, write_documents
from teacher.report.progress import StageProgress
from teacher.report.terminal import print_outcome
from teacher.verification import Options, Outcome, run_verification


def add(commands: Any) -> None:
    """Add the command."""
    defaults = Options()
    verify = commands.add_parser(
        "verify", help="say whether a GGUF still is the model its snapshot holds", epilog=EXIT_CODES
    )
    add_inputs(verify)
    verify.add_argument("--plan", type=Path, metavar="FILE", help="JSONL of texts, chats or token ids (built-in)")
    names = ", ".join(sorted(shipped_policies()))
    verify.add_argument("--policy", metavar="FILE", help=f"policy file, or one of {names} (by file type)")
    verify.add_argument("--out", type=Path, metavar="RUN", help="run folder to write (runs/NAME)")
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
    add_engine(verify)
    verify.add_argument(
        "--unquantized", type=Path, metavar="FILE.gguf",
        help="a GGUF of the source's own values (BF16 or F32), run too: what conversion and engine alone lose",
    )  # fmt: skip
    verify.add_argument("--no-diagnosis", action="store_true", help="decide only: no four cells and no localisation")
    add_documents(verify)
    add_output(verify)
    verify.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    options = Options(
        revision=arguments.revision,
        allow_download=arguments.download,
        call_shape=arguments.calls,
        spread=() if arguments.spread in ("", "none") else tuple(arguments.spread.split(",")),
        reference_bf16=arguments.reference_bf16,
        max_sequence_tokens=arguments.max_tokens,
        threads=positive(arguments.threads, "--threads"),
        engine=arguments.engine,
        engine_settings=engine_settings(arguments.set),
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
