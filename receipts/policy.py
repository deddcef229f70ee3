"""What a run is held to: limits on measured quantities, fixed before the run in a TOML file whose digest is kept."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Context, Decimal
from pathlib import Path
from typing import Any

from receipts.canonical import MAX_INTEGER
from receipts.comparison import Comparison, Stats
from receipts.digest import sha256_bytes
from receipts.errors import PolicyError
from receipts.findings import Audit
from receipts.report import Report

SCHEMA = "source-teacher/policy/v1"
_STATISTICS = ("mean", "median", "p90", "p95", "p99", "p999", "max")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One bound on one quantity.

    Attributes:
        quantity: name of it, such as "candidate.kl_nats.mean".
        bound: "max" or "min".
        limit: the bound's value.
        reason: why this value.
    """

    quantity: str
    bound: str
    limit: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Limits, and what the evidence must be able to bear before they are applied.

    Attributes:
        name: what it is called.
        reason: what it is for.
        floor_max_share: the floor of a quantity may be at most this share of its limit.
        floor_max_kl_nats_mean: largest mean KLD between teacher and PyTorch.
        min_positions, min_examples: smallest sample.
        standard_errors: a mean closer to its limit than this many standard errors decides nothing.
        tokenizer_require: "match" or "any".
        limits: bounds, in the order of the file.
        sha256: SHA-256 of the file's bytes, in hex.
    """

    name: str
    reason: str
    floor_max_share: float
    floor_max_kl_nats_mean: float
    min_positions: int
    min_examples: int
    standard_errors: float
    tokenizer_require: str
    limits: tuple[Limit, ...]
    sha256: str

    @staticmethod
    def load(path: Path) -> Policy:
        """Read a policy file; see `parse`."""
        try:
            return Policy.parse(path.read_bytes(), path.name)
        except OSError as error:
            raise PolicyError(f"{path}: expected a policy file, got '{error.strerror}'") from error

    @staticmethod
    def parse(data: bytes, subject: str = "policy") -> Policy:
        """Read the bytes of a policy file.

        Raises:
            PolicyError: it is no TOML, or a key is missing, unknown or of a wrong kind; names the key.
        """
        try:
            form = tomllib.loads(data.decode("utf-8"))
        except (ValueError, RecursionError) as error:  # besides bad TOML: a number or a nesting without end
            raise PolicyError(f"{subject}: expected TOML, got '{error}'") from error
        top = _Table(form, subject, {"schema", "name", "reason", "floor", "sample", "tokenizer", "limit"})
        if top.text("schema") != SCHEMA:
            raise PolicyError(f"{subject}: expected schema {SCHEMA}, got {form['schema']!r}")
        floor = top.table("floor", {"max_share", "max_kl_nats_mean", "reason"})
        sample = top.table("sample", {"min_positions", "min_examples", "standard_errors", "reason"})
        tokenizer = top.table("tokenizer", {"require", "reason"})
        for table in (floor, sample, tokenizer):
            table.text("reason")
        require = tokenizer.text("require")
        if require not in ("match", "any"):
            raise PolicyError(f"{subject} tokenizer.require: expected match or any, got {require!r}")
        limits = form.get("limit")
        if not isinstance(limits, list) or not limits:
            raise PolicyError(f"{subject}: expected at least one [[limit]], got none")
        return Policy(
            name=top.text("name"),
            reason=top.text("reason"),
            floor_max_share=floor.number("max_share"),
            floor_max_kl_nats_mean=floor.number("max_kl_nats_mean"),
            min_positions=sample.count("min_positions"),
            min_examples=sample.count("min_examples"),
            standard_errors=sample.number("standard_errors"),
            tokenizer_require=require,
            limits=_limits(limits, subject),
            sha256=sha256_bytes(data).hex,
        )


class _Table:
    """One TOML table with the keys it may have; each getter names what is wrong."""

    def __init__(self, form: Any, place: str, keys: set[str]) -> None:
        if not isinstance(form, dict):
            raise PolicyError(f"{place}: expected a table, got {type(form).__name__}")
        unknown = sorted(set(form) - keys)
        if unknown:
            raise PolicyError(f"{place}: expected keys among {sorted(keys)}, got {unknown[0]!r}")
        self._form, self._place = form, place

    def table(self, key: str, keys: set[str]) -> _Table:
        return _Table(self._get(key), f"{self._place} {key}", keys)

    def text(self, key: str) -> str:
        value = self._get(key)
        if not isinstance(value, str) or not value.strip():
            raise PolicyError(f"{self._place} {key}: expected a text, got {value!r}")
        return value

    def number(self, key: str) -> float:
        value = self._get(key)
        if type(value) not in (int, float) or not 0 <= value < MAX_INTEGER:
            raise PolicyError(f"{self._place} {key}: expected a number of at least 0, got {value!r}")
        return float(value)

    def count(self, key: str) -> int:
        value = self._get(key)
        if type(value) is not int or not 1 <= value < MAX_INTEGER:
            raise PolicyError(f"{self._place} {key}: expected a whole number of at least 1, got {value!r}")
        return value

    def _get(self, key: str) -> Any:
        if key not in self._form:
            raise PolicyError(f"{self._place}: expected the key {key!r}, got none")
        return self._form[key]


def _limits(forms: list[Any], subject: str) -> tuple[Limit, ...]:
    found: dict[tuple[str, str], Limit] = {}
    for number, form in enumerate(forms, 1):
        place = f"{subject} limit {number}"
        table = _Table(form, place, {"quantity", "max", "min", "reason"})
        bounds = [bound for bound in ("max", "min") if bound in form]
        if len(bounds) != 1:
            raise PolicyError(f"{place}: expected one of max and min, got {bounds or 'neither'}")
        quantity = table.text("quantity")
        if quantity_reader(quantity) is None:
            raise PolicyError(f"{place}: expected a quantity of the report, got {quantity!r}")
        if (quantity, bounds[0]) in found:
            raise PolicyError(f"{place}: expected each bound once, got a second {bounds[0]} of {quantity}")
        found[quantity, bounds[0]] = Limit(
            quantity=quantity, bound=bounds[0], limit=table.number(bounds[0]), reason=table.text("reason")
        )
    return tuple(found.values())


Reader = Callable[[Comparison], float | None]


def _statistic(field: str, name: str) -> Reader:
    def read(comparison: Comparison) -> float | None:
        stats: Stats | None = getattr(comparison, field)
        return None if stats is None else float(getattr(stats, name))

    return read


def _perplexity_ratio(comparison: Comparison) -> float | None:
    expected, actual = comparison.observed_nll_expected, comparison.observed_nll_actual
    if expected is None or actual is None:
        return None
    # The verdict is compared byte for byte on other machines: their exp differs in the last bit, Decimal's does not.
    difference = min(max(actual - expected, -36.0), 36.0)  # beyond 2**53 a ratio has no canonical bytes, nor a use
    return float(Decimal(difference).exp(Context(prec=30)))


def _padding(field: str) -> Reader:
    return lambda c: 0.0 if c.padded is None else float(getattr(c.padded, field))


def _top(k: int) -> Reader:
    return lambda c: dict(c.topk_agreement).get(k)


_READERS: Mapping[str, Reader] = {
    **{
        f"{field}.{name}": _statistic(field, name)
        for field in ("kl_nats", "reverse_kl_nats", "expected_top_rank")
        for name in _STATISTICS
    },
    "top1_agreement": lambda c: c.top1_agreement if c.kl_nats is not None else None,
    "nmse_centred": lambda c: c.nmse_centred if c.kl_nats is not None else None,
    "max_abs_centred": lambda c: c.max_abs_centred if c.kl_nats is not None else None,
    "nonfinite_rows": lambda c: float(c.nonfinite_rows),
    "constant_rows": lambda c: float(c.constant_rows),
    "perplexity_ratio": _perplexity_ratio,
    "padded.max_abs_difference": _padding("max_abs_difference"),
    "padded.expected_argmax_in_padding": _padding("expected_argmax_in_padding"),
    "padded.actual_argmax_in_padding": _padding("actual_argmax_in_padding"),
}


def _audit_count(count: Callable[[Audit], tuple[Any, ...]]) -> Callable[[Report], float | None]:
    return lambda report: None if report.audit is None else float(len(count(report.audit)))


_AUDIT_READERS: Mapping[str, Callable[[Report], float | None]] = {
    "audit.wrong_tensors": _audit_count(lambda audit: audit.of_verdict("wrong")),
    "audit.worse_tensors": _audit_count(lambda audit: audit.of_verdict("worse")),
    "audit.math_keys": _audit_count(lambda audit: audit.keys_of("math")),
    "audit.usage_keys": _audit_count(lambda audit: audit.keys_of("usage")),
    "audit.types_below": _audit_count(lambda audit: audit.types_of("below")),
    "audit.types_above": _audit_count(lambda audit: audit.types_of("above")),
}


def _cell(name: str, reader: Reader) -> Callable[[Report], float | None]:
    def read(report: Report) -> float | None:
        cells = None if report.diagnosis is None else report.diagnosis.cells
        comparison = None if cells is None else getattr(cells, name)
        return None if comparison is None else reader(comparison)

    return read


def quantity_reader(quantity: str) -> Callable[[Report], float | None] | None:
    """Return what reads a quantity from a report, or None when there is no such quantity.

    The names are "candidate.", "floor." or "spread." and a field of a comparison ("kl_nats.mean", "top1_agreement",
    "topk_agreement.5", "nmse_centred", ...), or "perplexity_ratio" for exp of the difference of the observed tokens'
    mean negative log-likelihoods. Of several spreads the largest value counts; "spread.kl_nats.max_mean" says so.
    "weights.", "engine." and "conversion." are the same fields of the four cells. Counts of the audit's findings are
    "audit.wrong_tensors", "audit.worse_tensors", "audit.math_keys", "audit.usage_keys", "audit.types_below" and
    "audit.types_above".
    """
    if quantity in _AUDIT_READERS:
        return _AUDIT_READERS[quantity]
    side, _, name = quantity.partition(".")
    if quantity == "spread.kl_nats.max_mean":
        name = "kl_nats.mean"
    found = re.fullmatch(r"topk_agreement\.([1-9][0-9]{0,3})", name)
    reader = _top(int(found.group(1))) if found else _READERS.get(name)
    if reader is None:
        return None
    if side in ("weights", "engine", "conversion"):
        return _cell(side, reader)
    if side == "candidate":
        return lambda report: reader(report.candidate)
    if side == "floor":
        return lambda report: reader(report.floor)
    if side == "spread":
        return lambda report: max((v for c in report.spread if (v := reader(c)) is not None), default=None)
    return None
