"""A tensor audit as a table: the tensors that are not as good as their type allows, and what explains them."""

from __future__ import annotations

from collections import Counter

from rich.console import Console
from rich.table import Table
from rich.text import Text

from receipts.findings import Audit, TensorFinding

_STYLE = {"wrong": "bold red", "worse": "yellow", "as_good": "", "exact": "dim"}


def print_audit(audit: Audit, console: Console, *, every: bool) -> None:
    """Print the findings, or every tensor; then notes and one line that says it all."""
    faults = audit.of_verdict("worse", "wrong")
    shown = audit.tensors if every else faults
    if shown:
        console.print(_table(shown))
    for key in audit.metadata:
        console.print(Text(key.sentence), style="bold red")
    for one in audit.types:
        console.print(Text(one.sentence), style="yellow" if one.kind == "above" else "bold red")
    for note in audit.notes:
        console.print(Text(f"note: {note}"), style="dim")
    counts = Counter(tensor.verdict for tensor in audit.tensors)
    listed = ", ".join(
        f"{counts[name]} {label}"
        for name, label in (
            ("exact", "exact"),
            ("as_good", "as good as their types allow"),
            ("worse", "worse"),
            ("wrong", "wrong"),
        )
        if counts[name]
    )
    for count, label in ((len(audit.metadata), "keys differ"), (len(audit.types), "types unlike the label")):
        listed += f"; {count} {label}" if count else ""
    word, style = ("PASS", "bold green") if audit.passed else ("FAIL", "bold red")
    console.print(Text.assemble((word, style), f"  {audit.file}: {len(audit.tensors)} tensors: {listed}"))


def _table(tensors: tuple[TensorFinding, ...]) -> Table:
    table = Table()
    for name in ("tensor", "type"):
        table.add_column(name, no_wrap=True)
    for name in ("SQNR dB", "reachable", "max error"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("verdict", "cause"):
        table.add_column(name)
    for tensor in tensors:
        table.add_row(
            tensor.name,
            tensor.type,
            *("-" if value is None else f"{value:.1f}" for value in (tensor.sqnr_db, tensor.reachable_sqnr_db)),
            "-" if tensor.max_abs_error is None else f"{tensor.max_abs_error:.2g}",
            Text(tensor.verdict.replace("_", " "), style=_STYLE[tensor.verdict]),
            tensor.cause or "",
        )
    return table
