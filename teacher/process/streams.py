"""Run a logit source in a process of its own and read its logits as they come.

The process gets a clean environment: one side's BLAS, thread counts or hub settings never reach another's. It is
killed and reaped when the parent stops early; a process that dies becomes an EngineFailedError with its last words.
"""

from __future__ import annotations

import collections
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from receipts.errors import EngineFailedError, PlanError
from teacher.process.alignment import check_coverage
from teacher.process.frames import decode_error, decode_json, encode_json, read_frame
from teacher.process.sources import LogitBlock, Plan, plan_form
from teacher.process.traces import Trace

# What a process needs to find its files, its user and a GPU; nothing here changes what an engine computes.
_INHERITED = (
    "PATH", "HOME", "USER", "LOGNAME", "TMPDIR", "TEMP", "TMP", "LANG", "LC_ALL", "LC_CTYPE", "TZ",
    "XDG_CACHE_HOME", "LD_LIBRARY_PATH", "SYSTEMROOT", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES",
    "NVIDIA_DRIVER_CAPABILITIES", "COVERAGE_PROCESS_START",
)  # fmt: skip
_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "USE_HUB_KERNELS": "0",
    "TOKENIZERS_PARALLELISM": "false",
}
_THREAD_SETTINGS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
_LAST_LINES = 40
_GRACE_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a source has come.

    Attributes:
        kind: the source.
        done, total: counts of `unit`.
        unit: "positions"; or what a source with work to do before its first logits counts, such as "layers".
    """

    kind: str
    done: int
    total: int
    unit: str


def engine_settings(threads: int, env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables we set for an engine: its threads, offline hubs, and what the caller adds."""
    settings = dict.fromkeys(_THREAD_SETTINGS, str(threads))
    settings |= {"OMP_DYNAMIC": "FALSE", "MKL_DYNAMIC": "FALSE", **_OFFLINE}
    # Threads that spin while they wait take that time from whoever has the turn. OpenBLAS spins for 2^26 cycles after
    # each product: 49 s where 2^18 gave 10. OpenMP's spin 300,000 times at each barrier: two engines on the same two
    # cores took minutes where 300 gave 5 s, and one alone took 1.2 s for 0.8.
    settings |= {"OPENBLAS_THREAD_TIMEOUT": "18", "GOMP_SPINCOUNT": "300"}
    return settings | dict(env or {})


def child_environment(threads: int, env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return a worker's whole environment: a few inherited names, Python's path, and `engine_settings`."""
    inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    # The child must import what the parent imports, wherever the parent was started.
    paths = dict.fromkeys([str(Path(__file__).resolve().parents[2]), *(entry for entry in sys.path if entry)])
    own = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONHASHSEED": "0", "PYTHONFAULTHANDLER": "1"}
    return inherited | own | engine_settings(threads, env)


class SourceRun:
    """A source at work: a context manager and an iterator of LogitBlock, to be read once.

    Attributes:
        description: what the source says of itself, with the engine settings of its environment; set on entering.
        closing: what it says at the end (`peak_memory_bytes`); empty until the stream has ended.
    """

    def __init__(
        self,
        job: Mapping[str, Any],
        *,
        env: Mapping[str, str] | None,
        plan: Plan | None = None,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> None:
        self.description: dict[str, Any] = {}
        self.closing: dict[str, Any] = {}
        self._job, self._env, self._plan, self._on_progress = dict(job), env, plan, on_progress
        self._kind = str(job["kind"])
        self._lines: collections.deque[str] = collections.deque(maxlen=_LAST_LINES)
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: BinaryIO | None = None
        self._reader: threading.Thread | None = None
        self._folder = ""

    def __enter__(self) -> SourceRun:
        try:
            self._start()
            if self._plan is not None:
                _, payload = self._expect("describe")
                self.description = self._facts(payload, "a description")
                self.description["environment"] = engine_settings(self._job["threads"], self._env)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def __iter__(self) -> Iterator[LogitBlock]:
        assert self._plan is not None, "a question has no logits"
        return check_coverage(self._blocks(), self._plan, self._kind)

    def answer(self) -> Any:
        """Return the answer to the job's question."""
        _, payload = self._expect("answer")
        return decode_json(payload, "an answer")

    @property
    def process_id(self) -> int:
        """Number of the worker process."""
        assert self._process is not None, "not entered"
        return self._process.pid

    def _start(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="source-teacher-")
        read_end, write_end = os.pipe()
        self._pipe = os.fdopen(read_end, "rb")
        try:
            job = Path(self._folder) / "job.json"
            job.write_bytes(encode_json({**self._job, "messages_fd": write_end}))
            self._process = subprocess.Popen(
                [sys.executable, "-m", "teacher.process.worker", str(job)],
                stdin=subprocess.PIPE,  # asks for blocks, see _blocks
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(write_end,),
                env=child_environment(self._job["threads"], self._env),
                start_new_session=True,  # an interrupt reaches the parent alone, which then ends the worker
            )
        finally:
            os.close(write_end)  # else the end of the worker would not end the stream
        self._reader = threading.Thread(target=self._keep_lines, daemon=True)
        self._reader.start()

    def _keep_lines(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            text = line.decode("utf-8", errors="replace").rstrip()
            if text:
                self._lines.append(text)

    def _next(self) -> tuple[dict[str, Any], bytearray]:
        """Return the next message that is no progress; raise what the worker raised, or how it died."""
        assert self._pipe is not None, "not entered"
        while True:
            frame = read_frame(self._pipe)
            if frame is None:
                raise self._death()
            header, payload = frame
            if header["type"] == "error":
                raise decode_error(header, payload)
            if header["type"] != "progress":
                return header, payload
            if self._on_progress is not None:
                self._on_progress(
                    Progress(kind=self._kind, done=header["done"], total=header["total"], unit=header["unit"])
                )

    def _expect(self, wanted: str) -> tuple[dict[str, Any], bytearray]:
        header, payload = self._next()
        if header["type"] != wanted:
            raise EngineFailedError(f"{self._kind}: expected a message {wanted!r}, got {header['type']!r}")
        return header, payload

    def _facts(self, payload: bytearray, what: str) -> dict[str, Any]:
        value = decode_json(payload, what)
        if not isinstance(value, dict):
            raise EngineFailedError(f"{self._kind}: expected {what} by name, got {str(value)[:80]}")
        return value

    def _blocks(self) -> Iterator[LogitBlock]:
        """Ask for one block after another: of two sides only the one that is waited for computes.

        Side by side they would fight for the processors with spinning threads, which measured four times slower.
        """
        more = False
        while True:
            if not more:
                self._ask()
            header, payload = self._next()
            if header["type"] == "done":
                self.closing = self._facts(payload, "closing facts")
                return
            if header["type"] != "block":
                raise EngineFailedError(f"{self._kind}: expected a message 'block', got {header['type']!r}")
            more = header["more"]
            logits = np.frombuffer(payload, dtype="<f4")
            rows, width = header["rows"], header["width"]
            if logits.size != rows * width:
                raise EngineFailedError(f"{self._kind}: expected {rows}x{width} logits, got {logits.size}")
            yield LogitBlock(
                example=header["example"],
                call=header["call"],
                position=header["position"],
                logits=logits.reshape(rows, width).astype(np.float32, copy=False),
            )

    def _ask(self) -> None:
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended; what it left in its own pipe says why
            self._process.stdin.write(b".")
            self._process.stdin.flush()

    def _death(self) -> EngineFailedError:
        """Return the error of a worker whose messages ended before it was done."""
        code, left = self._end()
        last = list(self._lines)
        how = f"exit code {code}"
        if not left:
            how = f"no message more, and no end for {_GRACE_SECONDS:g} seconds"
        elif code < 0:
            how = f"signal {_signal_name(-code)}"
            if -code == signal.SIGKILL:
                how += " (as when memory runs out)"
        # A crash leaves Python's dump of all threads, whose first line alone says something.
        said = [line for line in last if line.startswith("Fatal Python error")] or last[-1:]
        words = f"; last words: {said[0]}" if said else ""
        return EngineFailedError(
            f"{self._kind}: expected the engine to finish its calls, got {how}{words}",
            engine=self._kind,
            exit_code=code if code >= 0 else None,
            signal=_signal_name(-code) if code < 0 else None,
            last_lines=last,
        )

    def _end(self, grace: float | None = None) -> tuple[int, bool]:
        """Give the worker some seconds to leave, kill what is left of it and of its children, and reap it.

        Returns:
            Its exit code, and whether it left by itself.
        """
        assert self._process is not None
        left = False
        if self._reader is not None:
            self._reader.join(_GRACE_SECONDS if grace is None else grace)
            left = not self._reader.is_alive()  # nobody holds its stdout any more
        # Not reaped yet, so the number is still its own; it leads a group, see _start.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        if self._reader is not None:
            self._reader.join(_GRACE_SECONDS)
        return code, left

    def _stop(self) -> None:
        """End the worker if it still runs, reap it, and leave nothing behind."""
        process = self._process
        if process is not None:
            if process.returncode is None:
                self._end(grace=_GRACE_SECONDS if self.closing else 0)  # done: let it leave by itself
            # A reader that still waits, for a child that left the group, holds stdout; closing it would wait too.
            reading = self._reader is not None and self._reader.is_alive()
            for stream in (process.stdin, None if reading else process.stdout):
                if stream is not None:
                    with contextlib.suppress(BrokenPipeError):
                        stream.close()
        if self._pipe is not None:
            self._pipe.close()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def run_source(
    kind: str,
    spec: Mapping[str, Any],
    plan: Plan,
    *,
    threads: int,
    env: Mapping[str, str] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> SourceRun:
    """Start a source on a plan, in a process of its own; enter the result, then iterate it.

    Args:
        kind: "transformers", "llama_cpp", any name in `teacher.candidates`, or `module:class`.
        spec: the source's own settings, as JSON has them.
        plan: examples with `name`, `token_ids` and `calls`.
        threads: threads of the engine and of every BLAS it may load.
        env: variables the engine is to see beside `engine_settings`.
        on_progress: called in this process as positions are done.

    Raises:
        PlanError: the plan is empty, or an example's calls do not cover its tokens.
        HarnessError: whatever the source raised, as its own class; EngineFailedError when its process died.
    """
    return SourceRun(_job(kind, spec, plan, threads), env=env, plan=plan, on_progress=on_progress)


def _job(kind: str, spec: Mapping[str, Any], plan: Plan, threads: int) -> dict[str, Any]:
    """Return a job for the worker, its plan checked."""
    for number, example in enumerate(plan.examples):
        lengths = tuple(example.calls)
        if not lengths or min(lengths) < 1 or sum(lengths) != len(example.token_ids):
            raise PlanError(
                f"example {number}: expected calls that cover {len(example.token_ids)} tokens, got {lengths}",
                example=number,
            )
    if not plan.examples:
        raise PlanError("plan: expected at least one example, got none")
    return {"kind": kind, "spec": dict(spec), "threads": threads, "plan": plan_form(plan)}


def trace_source(
    kind: str,
    spec: Mapping[str, Any],
    plan: Plan,
    folder: Path,
    *,
    threads: int,
    layers: int,
    width: int,
    layer: int | None = None,
    layer_kind: str | None = None,
) -> Trace | None:
    """Run a plan and keep the source's residual stream; return None when the source shows nothing but logits.

    Args:
        kind, spec, plan, threads: as `run_source`.
        folder: an empty folder for the trace.
        layers, width: decoder layers, and D.
        layer, layer_kind: the layer whose operations are kept too, and what it is.

    Raises:
        PlanError, HarnessError: as `run_source`.
    """
    trace = {"folder": str(folder), "layers": layers, "width": width, "layer": layer, "kind": layer_kind}
    with SourceRun({**_job(kind, spec, plan, threads), "trace": trace}, env=None) as run:
        facts = run.answer()
    return None if facts is None else Trace(folder, facts)


def ask_source(
    kind: str,
    spec: Mapping[str, Any],
    question: Mapping[str, Any],
    *,
    threads: int = 1,
    env: Mapping[str, str] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> Any:
    """Return what a source's class answers to a question, asked in a process of its own.

    The class has a static method `answer(question, spec, on_progress)`; the last is told (done, total, unit).
    """
    job = {"kind": kind, "spec": dict(spec), "threads": threads, "question": dict(question)}
    with SourceRun(job, env=env, on_progress=on_progress) as run:
        return run.answer()
