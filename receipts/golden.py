"""Figures of a recorded run and how far each may move: the regression gate.

A golden file names its inputs by digest and gives every figure an interval. A run over the same inputs is held
against it in order, so that the first figure that moved is the first that is named.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from receipts.chain import RunCheck, verify_run
from receipts.errors import InputError, OutputError, ReceiptFormatError
from receipts.files import write_atomic
from receipts.plain import from_plain
from receipts.policy import quantity_reader

SCHEMA = "source-teacher/golden/v1"
# The floor is F32 rounding in two orders of summation: another processor's kernels may round ten times worse and
# still be right, and may not be wrong by more. Its figures have no lower bound.
_FLOOR_GROWTH = 10.0
_FLOOR = ("floor.kl_nats.mean", "floor.max_abs_centred")
_FIGURES = (
    "candidate.kl_nats.mean", "candidate.kl_nats.median", "candidate.kl_nats.p99", "candidate.reverse_kl_nats.mean",
    "candidate.nmse_centred", "candidate.perplexity_ratio", "spread.kl_nats.mean",
)  # fmt: skip
_SHARES = ("candidate.top1_agreement", "candidate.topk_agreement.5", "candidate.topk_agreement.10")
_EXACT = ("candidate.nonfinite_rows", "candidate.constant_rows")


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenQuantity:
    """One figure.

    Attributes:
        quantity: its name, as in a policy.
        value: as recorded.
        low, high: the interval it may lie in.
    """

    quantity: str
    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """A figure that has left its interval.

    Attributes:
        quantity: its name.
        value: as measured now; None when it is not there any more.
        recorded, low, high: as in the golden file.
        sentence: the same for a person.
    """

    quantity: str
    value: float | None
    recorded: float
    low: float
    high: float
    sentence: str

    def to_dict(self) -> dict[str, Any]:
        """Return the drift as plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Golden:
    """A recorded run.

    Attributes:
        inputs: what was run, by digest: "snapshot_root_sha256", "candidate_sha256", "plan_sha256".
        verdict: status the policy gave.
        reason: how the intervals were chosen.
        quantities: figures in the order in which they are checked.
    """

    inputs: dict[str, str]
    verdict: str
    reason: str
    quantities: tuple[GoldenQuantity, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the record as plain values, with its schema."""
        return {"schema": SCHEMA, **asdict(self)}

    @staticmethod
    def from_dict(form: Mapping[str, Any]) -> Golden:
        """Read a record back.

        Raises:
            ReceiptFormatError: a field is missing, unknown or of another type; names it.
        """
        body = dict(form)
        if body.pop("schema", None) != SCHEMA:
            raise ReceiptFormatError(f"golden: expected schema {SCHEMA}, got {form.get('schema')!r}")
        return from_plain(Golden, body, "golden")

    @staticmethod
    def load(path: Path) -> Golden:
        """Read a golden file.

        Raises:
            InputError: it is missing, no JSON, or not a golden file.
        """
        try:
            form = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(f"{path}: expected a golden file, got '{error.strerror}'") from error
        except ValueError as error:
            raise InputError(f"{path}: expected JSON, got '{error}'") from error
        if not isinstance(form, dict):
            raise InputError(f"{path}: expected a golden file, got {type(form).__name__}")
        return Golden.from_dict(form)

    def write(self, path: Path) -> None:
        """Write the record, one figure a line for reviewers; a file that exists is not written over."""
        if path.exists():
            raise OutputError(f"{path}: expected no such file yet, got one; remove it to record anew")
        write_atomic(path, (json.dumps(self.to_dict(), indent=2) + "\n").encode())


def record_run(folder: Path, *, drift: float) -> Golden:
    """Record the figures of a run folder, which is verified first.

    Args:
        folder: the run.
        drift: how far a figure may move, as a share of it.

    Raises:
        InputError: drift is not above 0 and below 1; and what `verify_run` raises.
    """
    if not 0 < drift < 1:
        raise InputError(f"drift: expected a share above 0 and below 1, got {drift}")
    run = verify_run(folder)
    found = []
    for name in (*_FLOOR, *_EXACT, *_FIGURES, *_SHARES):
        value = _read(run, name)
        if value is not None:
            low, high = _interval(name, value, drift)
            found.append(GoldenQuantity(quantity=name, value=value, low=low, high=high))
    return Golden(
        inputs=_inputs(run),
        verdict=run.verdict.status,
        reason=(
            f"figures may move by {drift:g} of their value, and agreement by that share of the disagreement (at least"
            f" 0.005), as other kernels of the same engine round otherwise; the floor may grow {_FLOOR_GROWTH:g}-fold"
        ),
        quantities=tuple(found),
    )


def check_run(folder: Path, golden: Golden) -> tuple[Drift, ...]:
    """Return the figures that left their intervals, in the order of the record; the run is verified first.

    Raises:
        InputError: the run was made of other inputs; names the first that differs.
    """
    run = verify_run(folder)
    inputs = _inputs(run)
    for name, expected in golden.inputs.items():
        if inputs.get(name) != expected:
            raise InputError(f"{folder} {name}: expected {expected} as recorded, got {inputs.get(name)}")
    drifts = []
    for figure in golden.quantities:
        value = _read(run, figure.quantity)
        if value is None or not figure.low <= value <= figure.high:
            got = "nothing" if value is None else f"{value:.6g}"
            drifts.append(
                Drift(
                    quantity=figure.quantity,
                    value=value,
                    recorded=figure.value,
                    low=figure.low,
                    high=figure.high,
                    sentence=(
                        f"{figure.quantity}: expected {figure.low:.6g} to {figure.high:.6g} (recorded"
                        f" {figure.value:.6g}), got {got}"
                    ),
                )
            )
    return tuple(drifts)


def _read(run: RunCheck, quantity: str) -> float | None:
    reader = quantity_reader(quantity)
    if reader is None:
        raise ReceiptFormatError(f"golden: expected a quantity of the report, got {quantity!r}")
    return reader(run.report)


def _interval(name: str, value: float, drift: float) -> tuple[float, float]:
    if name in _FLOOR:
        return 0.0, value * _FLOOR_GROWTH
    if name in _EXACT:
        return value, value
    if name in _SHARES:
        room = max(drift * (1 - value), 0.005)
        return max(value - room, 0.0), min(value + room, 1.0)
    if name == "candidate.perplexity_ratio":
        room = drift * max(abs(value - 1), 0.002)
        return value - room, value + room
    return value * (1 - drift), value * (1 + drift)


def _inputs(run: RunCheck) -> dict[str, str]:
    return {
        "snapshot_root_sha256": run.receipts["snapshot.json"]["manifest"]["root_sha256"],
        "candidate_sha256": run.receipts["candidate.json"]["file"]["sha256"],
        "plan_sha256": run.digests["plan.json"],
    }
