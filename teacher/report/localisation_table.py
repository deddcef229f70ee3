"""A localisation as tables that a person understands at a glance."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from receipts.diagnosis import Localisation


def print_localisation(found: Localisation, console: Console) -> None:
    """Print errors of ends and layers, of the operations that were looked into, and what is out of its band."""
    console.print(_layers(found))
    if found.operations:
        console.print(_operations(found))
    for sentence in (*found.rounding, *(culprit.sentence for culprit in found.culprits)):
        console.print(Text(sentence), style="bold red")
    place = f"{found.positions} positions of {', '.join(found.examples)}"
    if found.culprits or found.rounding:
        console.print(Text.assemble(("FAIL", "bold red"), f"  {len(found.culprits)} places out of band on {place}"))
    else:
        console.print(Text.assemble(("PASS", "bold green"), f"  everything is within its band on {place}"))


def _layers(found: Localisation) -> Table:
    table = Table(title="relative errors, each layer alone; and of the stream after it", title_justify="left")
    table.add_column("layer", no_wrap=True)
    for name in (
        "weights", "their types reach", "engine", "first calls", "later calls", "pytorch", "stream: weights",
        "stream: candidate", "stream: pytorch",
    ):  # fmt: skip
        table.add_column(name, justify="right")
    wrong = {(culprit.layer, culprit.operation) for culprit in found.culprits}
    layers = {layer for layer, _ in wrong if layer is not None}
    ends = {end.place: end for end in found.ends}

    def add_end(place: str) -> None:
        end = ends.get(place)
        if end is not None:
            errors = (end.weights, end.reachable, end.engine, None, None, end.reference, None, None, None)
            table.add_row(place, *map(_shown, errors), style="bold red" if (None, place) in wrong else "")

    add_end("embedding")
    for one in found.layers:
        errors = (
            one.alone_weights, one.alone_reachable, one.alone_engine, one.alone_engine_first_calls,
            one.alone_engine_later_calls, one.alone_reference, one.weights, one.candidate, one.reference,
        )  # fmt: skip
        name = f"{one.layer} {one.kind.replace('_', ' ')}"
        table.add_row(name, *map(_shown, errors), style="bold red" if one.layer in layers else "")
    add_end("final norm")
    return table


def _operations(found: Localisation) -> Table:
    table = Table(title="operations, in the order they are computed", title_justify="left")
    table.add_column("operation", no_wrap=True)
    for name in ("weights", "their types reach", "engine", "pytorch"):
        table.add_column(name, justify="right")
    first = {(culprit.layer, culprit.operation) for culprit in found.culprits}
    for one in found.operations:
        errors = (one.weights, one.reachable, one.engine, one.reference)
        style = "bold red" if (one.layer, one.operation) in first else ""
        table.add_row(f"{one.layer} {one.operation}", *map(_shown, errors), style=style)
    return table


def _shown(error: float | None) -> str:
    return "-" if error is None else f"{error:.2g}"
