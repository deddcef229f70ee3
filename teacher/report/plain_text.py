"""Receipts as text for a document: figures with few digits, and strangers' words without control characters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from receipts.chain import RunCheck
from receipts.comparison import Where

DASH = "–"  # noqa: RUF001 (what a missing value looks like)


def printable(text: str, most: int | None = None) -> str:
    """Return a text on one line, characters that cannot be seen as escapes; with `most`, its first characters."""
    cut = text if most is None or len(text) <= most else text[:most] + "…"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)


def printable_end(text: str, most: int) -> str:
    """Return the last characters of a text, as `printable`."""
    return printable(text if len(text) <= most else "…" + text[-most:])


def nats(value: float | None) -> str:
    """Return a KLD or likelihood in nats."""
    if value is None:
        return DASH
    return f"{value:.2e}" if 0 < abs(value) < 1e-3 or abs(value) >= 1e4 else f"{value:.4f}"


def short(value: float | None) -> str:
    """Return any figure with three digits."""
    return DASH if value is None else f"{value:.3g}"


def decibels(value: float | None) -> str:
    """Return a ratio in dB."""
    if value is None:
        return DASH
    return f"{value:.1f}" if abs(value) < 1e4 else f"{value:.1e}"


def share(value: float | None) -> str:
    """Return a share as percent."""
    return DASH if value is None else f"{value:.2%}"


def limit(bound: str, value: float) -> str:
    """Return a policy's limit with its direction."""
    return f"{'≤' if bound == 'max' else '≥'} {value:.4g}"


def receipt_field(run: RunCheck, *path: str) -> Any:
    """Return a field of a receipt that the chain does not check; None where it is missing.

    Args:
        run: a checked run.
        path: name of the receipt, then keys.
    """
    value: Any = run.receipts
    for key in path:
        if not isinstance(value, Mapping) or key not in value:
            return None
        value = value[key]
    return value


def receipt_text(run: RunCheck, *path: str) -> str:
    """Return such a field as a text; a dash where it is missing or no text or number."""
    value = receipt_field(run, *path)
    return printable(str(value)) if isinstance(value, str | int | float) else DASH


def seconds(run: RunCheck) -> float | None:
    """Return the seconds that the stages of a run took together; None where host.json has none."""
    found = receipt_field(run, "host.json", "seconds")
    if not isinstance(found, Mapping):
        return None
    return float(sum(value for value in found.values() if isinstance(value, int | float)))


def place(run: RunCheck, where: Where) -> str:
    """Return a place of the plan as "example:position"."""
    examples = run.receipts["plan.json"]["examples"]
    name = None
    if 0 <= where.example < len(examples):
        name = examples[where.example].get("name")
    return f"{printable(name) if isinstance(name, str) else f'example {where.example}'}:{where.position}"
