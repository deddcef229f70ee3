"""The process one logit source lives in: `python -m teacher.process.worker JOB.json`.

The job names the source, its settings and a plan to run, a plan to trace or a question to answer. Messages go to the
inherited pipe whose number the job holds (see `teacher.process.frames`); whatever the engine prints goes to stderr.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from receipts.errors import EngineMissingError, HarnessError
from teacher.candidates import CANDIDATES
from teacher.process.frames import encode_error, encode_json, rows_per_frame, write_frame
from teacher.process.sources import PlainPlan, plain_plan
from teacher.process.traces import TraceWriter

SOURCES: dict[str, str] = {
    "teacher": "teacher.sides.teacher_source:TeacherSource",
    "transformers": "teacher.sides.reference:TransformersReference",
    "arbiter": "teacher.sides.arbiter_source:ArbiterSource",
    **CANDIDATES,
}
"""Name of a source -> `module:class`. A kind written `module:class` is taken as it stands."""

_PROGRESS_SECONDS = 0.2


def load_class(kind: str) -> Any:
    """Return the source class of a kind.

    Raises:
        EngineMissingError: the kind is unknown, or its module cannot be imported; names what was missing.
    """
    target = SOURCES.get(kind, kind)
    module, colon, name = target.partition(":")
    if not colon:
        known = ", ".join(sorted(SOURCES))
        raise EngineMissingError(f"engine {kind!r}: expected one of {known} or MODULE:CLASS", engine=kind)
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise EngineMissingError(f"engine {kind!r}: expected {target} to import, got {error}", engine=kind) from error


def run(job: dict[str, Any], pipe: BinaryIO) -> None:
    """Build the job's source, then run or trace its plan or answer its question, writing messages to the pipe."""
    source_class = load_class(job["kind"])
    if "question" in job:
        answer = source_class.answer(job["question"], job["spec"], _reporter(pipe))
        write_frame(pipe, {"type": "answer"}, encode_json(answer))
        write_frame(pipe, {"type": "done"}, encode_json({}))
        return
    source = source_class(threads=job["threads"], **job["spec"])
    if "trace" in job:
        write_frame(pipe, {"type": "answer"}, encode_json(_trace(source, plain_plan(job["plan"]), **job["trace"])))
        write_frame(pipe, {"type": "done"}, encode_json({}))
        return
    write_frame(pipe, {"type": "describe"}, encode_json(source.describe()))
    _stream(source, plain_plan(job["plan"]), pipe)
    write_frame(pipe, {"type": "done"}, encode_json({"peak_memory_bytes": _peak_memory_bytes()}))


def _trace(
    source: Any, plan: PlainPlan, *, folder: str, layers: int, width: int, layer: int | None, kind: str | None
) -> dict[str, Any] | None:
    """Fill a trace and return its facts; None when the source shows nothing but logits."""
    if not hasattr(source, "trace"):
        return None
    writer = TraceWriter(Path(folder), layers=layers, width=width, plan=plan)
    source.trace(plan, writer, layer, kind)
    return writer.finish()


def _stream(source: Any, plan: PlainPlan, pipe: BinaryIO) -> None:
    total = sum(len(example.token_ids) for example in plan.examples)
    report = _reporter(pipe)
    if hasattr(source, "on_progress"):  # it has work to do before its first logits, and tells of it
        source.on_progress = report
    done, blocks = 0, source.blocks(plan)
    while _asked() and (block := next(blocks, None)) is not None:
        rows, width = block.logits.shape
        step = rows_per_frame(width)
        for first in range(0, rows, step):
            part = np.asarray(block.logits[first : first + step], dtype="<f4")
            header = {
                "type": "block",
                "example": block.example,
                "call": block.call,
                "position": block.position + first,
                "rows": part.shape[0],
                "width": width,
                "more": first + step < rows,
            }
            write_frame(pipe, header, part)
        done += rows
        report(done, total, "positions")


def _reporter(pipe: BinaryIO) -> Callable[[int, int, str], None]:
    """Return a function that tells the parent of progress, a few times a second."""
    reported = 0.0

    def report(done: int, total: int, unit: str) -> None:
        nonlocal reported
        if time.monotonic() - reported > _PROGRESS_SECONDS or done == total:
            reported = time.monotonic()
            write_frame(pipe, {"type": "progress", "done": done, "total": total, "unit": unit})

    return report


def _asked() -> bool:
    """Wait until the parent asks for the next block; it asks by one byte, and its end is the end."""
    if not sys.stdin.buffer.read(1):
        raise BrokenPipeError
    return True


def _peak_memory_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux kibibytes


def main(argv: list[str] | None = None) -> int:
    """Run the job file named on the command line; an error is a message, and exit code 2."""
    (path,) = sys.argv[1:] if argv is None else argv
    job = json.loads(Path(path).read_text(encoding="utf-8"))
    os.set_inheritable(job["messages_fd"], False)  # an engine's own children must not hold the pipe open
    try:
        with os.fdopen(job["messages_fd"], "wb") as pipe:
            return _report(job, pipe)
    except BrokenPipeError:
        return 2  # the parent has gone; nobody is left to tell


def _report(job: dict[str, Any], pipe: BinaryIO) -> int:
    try:
        run(job, pipe)
    except BrokenPipeError:
        raise
    except HarnessError as error:
        write_frame(pipe, *encode_error(error))
        return 2
    except Exception as error:  # an engine may raise anything; the parent must hear of it
        traceback.print_exc()
        write_frame(pipe, *encode_error(error))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
