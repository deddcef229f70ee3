"""A verification as a table that a person understands at a glance."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from receipts.comparison import Comparison, Stats
from receipts.report import Report
from receipts.verdict import Verdict

_STYLE = {"PASS": "bold green", "FAIL": "bold red", "INCONCLUSIVE": "bold yellow", "INVALID": "bold magenta"}
_MOST_FINDINGS = 12
_OUTCOME_STYLE = {"pass": "green", "fail": "red", "inconclusive": "yellow", "invalid": "magenta"}


def print_outcome(report: Report, verdict: Verdict, console: Console) -> None:
    """Print what was measured, what was checked, what explains it, and the verdict."""
    console.print(measured_table(report))
    console.print(checks_table(verdict))
    _print_causes(report, console)
    for note in report.notes:
        console.print(Text(f"note: {note}"), style="dim")
    console.print(Text.assemble((verdict.status, _STYLE[verdict.status]), "  ", verdict.reason))


def _print_causes(report: Report, console: Console) -> None:
    """Print the audit's findings and the diagnosis: where the candidate differs, and why."""
    audit, found = report.audit, report.diagnosis
    if audit is not None:
        style = "yellow" if audit.passed else "bold red"
        for sentence in audit.sentences[:_MOST_FINDINGS]:
            console.print(Text(sentence), style=style)
        left = len(audit.sentences) - _MOST_FINDINGS
        if left > 0:
            console.print(Text(f"and {left} findings more: teacher audit prints all"), style="dim")
        if not audit.sentences:
            console.print(Text(f"audit: all {len(audit.tensors)} tensors are exact or as good as their types allow"))
    if found is None:
        return
    if found.cells is not None:
        for contrast in found.cells.contrasts:
            console.print(Text(f"{contrast.name}: {contrast.sentence}"), style="" if contrast.above_floor else "dim")
    for sentence in found.sentences:
        console.print(Text(sentence), style="bold red")
    located = found.localisation
    if located is not None and not located.culprits:
        text = (
            f"layers: embedding, {len(located.layers)} layers and final norm are within their bands, each judged alone"
            f" on {located.positions} positions"
        )
        console.print(Text(text))


def measured_table(report: Report) -> Table:
    """Return one row for each pair of sides."""
    title = (
        f"{report.candidate.positions} positions of {report.candidate.examples} examples, "
        f"{report.real_vocabulary} tokens"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("expected / actual", no_wrap=True)
    for name in ("mean KLD", "p99", "max", "top-1", "max diff", "worst at"):
        table.add_column(name, justify="right", no_wrap=True)
    for comparison in (report.floor, report.reference_bf16, report.candidate, *report.spread):
        if comparison is not None:
            _add(table, comparison, report)
    return table


def _add(table: Table, found: Comparison, report: Report) -> None:
    name = f"{found.expected} / {found.actual}"
    if found.kl_nats is None:
        table.add_row(name, "no finite row", "", "", "", "", f"{found.nonfinite_rows} rows", style="bold red")
        return
    table.add_row(
        name,
        *(_nats(getattr(found.kl_nats, part)) for part in ("mean", "p99", "max")),
        f"{found.top1_agreement:.2%}",
        f"{found.max_abs_centred:.2g}",
        _place(found.kl_nats, report),
        style="bold" if found is report.candidate else "",
    )


def _nats(value: float) -> str:
    return f"{value:.2e}" if value < 1e-3 else f"{value:.4f}"


def _place(stats: Stats, report: Report) -> str:
    # Examples without one finite row are missing from a side's list; the floor's has all of them.
    names = report.floor.by_example
    complete = len(names) == report.floor.examples
    example = names[stats.max_at.example].label if complete else f"example {stats.max_at.example}"
    return f"{example}:{stats.max_at.position}"


def checks_table(verdict: Verdict) -> Table:
    """Return one row for each limit of the policy."""
    table = Table(title=f"policy {verdict.policy}", title_justify="left")
    table.add_column("quantity")
    for name in ("measured", "limit", "floor"):
        table.add_column(name, justify="right")
    table.add_column("outcome")
    for check in verdict.checks:
        sign = "<=" if check.bound == "max" else ">="
        table.add_row(
            check.quantity,
            "-" if check.value is None else f"{check.value:.4g}",
            f"{sign} {check.limit:.4g}",
            "-" if check.floor is None else f"{check.floor:.2g}",
            Text(check.outcome, style=_OUTCOME_STYLE[check.outcome]),
        )
    return table
