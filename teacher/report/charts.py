"""Charts of a report as inline SVG: colour-blind safe, the same bytes for the same figures.

A value of 0 has no place on a logarithmic axis and is left out; the legend says so where all of a line is 0. What is
longer than a chart can show is cut, and the axis says so.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any, TypeVar
from xml.etree import ElementTree

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, Colormap, LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from receipts.comparison import Bucket, Comparison
from receipts.diagnosis import LayerError, Localisation
from receipts.findings import TENSOR_VERDICTS, Audit, TensorFinding
from receipts.report import Report
from teacher.report.plain_text import printable

# Okabe and Ito's palette.
_BLACK, _ORANGE, _SKY, _GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
_BLUE, _VERMILLION, _PURPLE, _GREY = "#0072B2", "#D55E00", "#CC79A7", "#E4E4E4"
_SETTINGS: Any = {
    "svg.hashsalt": "source-teacher",
    "svg.fonttype": "none",
    "text.parse_math": False,  # a tensor may be named "$x$"; ticks are plain text as well
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 3.5,
    "legend.frameon": False,
}
_WIDTH_INCHES = 10.0
_MOST_LAYERS, _MOST_ROWS, _LONGEST_LABEL = 512, 48, 28
_MARGINS_DB = (-12.0, -6.0, -3.0, -1.0, -0.5, 0.5, 1.0, 3.0, 6.0, 12.0)
_HALF_DECADES = (-29, 12)  # of the histogram; the first holds all that is below 1e-14 nats
_XLINK = "{http://www.w3.org/1999/xlink}"
T = TypeVar("T")


def layer_errors(found: Localisation) -> str:
    """Draw the errors of the residual stream after each layer, and those of each layer alone."""
    layers, cut = _first(found.layers, _MOST_LAYERS, "layers")
    with mpl.rc_context():
        figure = _figure(6.8)
        stream, alone = figure.subplots(2, 1, sharex=True)
        for axes, label in ((stream, "full-attention layer"), (alone, None)):
            _band_full_attention(axes, layers, label)
            _make_logarithmic(axes)
        for name, label, style in (
            ("reference", "PyTorch", {"color": _GREEN, "marker": "s", "linestyle": ":"}),
            ("weights", "weights of the GGUF", {"color": _BLUE, "marker": "o", "linestyle": "--"}),
            ("candidate", "candidate", {"color": _VERMILLION, "marker": "^", "linestyle": "-"}),
        ):
            _line(stream, [getattr(layer, name) for layer in layers], label, style)
        for name, label, style in (
            ("alone_weights", "weights of the GGUF", {"color": _BLUE, "marker": "o", "linestyle": "--"}),
            ("alone_engine", "engine", {"color": _VERMILLION, "marker": "^", "linestyle": "-"}),
            ("alone_reference", "PyTorch", {"color": _GREEN, "marker": "s", "linestyle": ":"}),
        ):
            _line(alone, [getattr(layer, name) for layer in layers], label, style)
        _mark_culprits(alone, found, layers)
        _fill_reachable(alone, layers)
        stream.set_ylabel("relative error of the stream,\nall earlier layers included")
        alone.set_ylabel("relative error of\nthe layer alone")
        _name_ticks(alone, [str(layer.layer) for layer in layers])
        alone.set_xlabel(f"layer{cut}")
        for axes in (stream, alone):
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=5)
        return _svg(figure, "layers", "Relative error after each layer, and of each layer alone")


def operation_errors(found: Localisation) -> str:
    """Draw the errors of each operation of the layers that were looked into, as three strips."""
    numbers, cut = _first(sorted({error.layer for error in found.operations}), _MOST_LAYERS, "layers")
    names, _ = _first(list(dict.fromkeys(error.operation for error in found.operations)), _MOST_ROWS, "operations")
    column = {number: index for index, number in enumerate(numbers)}
    row = {name: index for index, name in enumerate(names)}
    shown = [error for error in found.operations if error.layer in column and error.operation in row]
    parts = ("reachable", "weights", "engine")
    values = [_drawable(getattr(error, part)) for error in shown for part in parts]
    edges = _decades([value for value in values if value is not None])
    with mpl.rc_context():
        figure = _figure(1.3 + 0.23 * len(names))
        panels = figure.subplots(1, len(parts), sharey=True)
        norm = BoundaryNorm(edges, 256)
        colours = mpl.colormaps["cividis"]
        for axes, part in zip(panels, parts, strict=True):
            cells = [[math.nan] * len(numbers) for _ in names]
            for error in shown:
                value = _drawable(getattr(error, part))
                cells[row[error.operation]][column[error.layer]] = math.nan if value is None else value
            _mesh(axes, cells, colours, norm)
            _name_ticks(axes, [str(number) for number in numbers], offset=0.5, most=9)
            at = [
                (column[one.layer] + 0.5, row[one.operation] + 0.5)
                for one in found.culprits
                if one.part == part and one.layer in column and one.operation in row
            ]
            if at:
                axes.scatter(*zip(*at, strict=True), marker="o", s=70, c="white", linewidths=0, zorder=3)
                axes.scatter(*zip(*at, strict=True), marker="x", s=36, c=_BLACK, linewidths=1.8, zorder=4)
            axes.set_title({"weights": "weights of the GGUF", "reachable": "reachable by the types"}.get(part, part))
            axes.set_xlabel(f"layer{cut}")
        panels[0].set_yticks([index + 0.5 for index in range(len(names))], [_label(name) for name in names])
        bar = figure.colorbar(ScalarMappable(norm, colours), ax=panels, pad=0.01, fraction=0.05)
        bar.set_ticks(edges, labels=[f"{edge:.0e}" for edge in edges])
        bar.set_label("relative error")
        return _svg(figure, "operations", "Relative error of each operation within a layer")


def tensor_margins(audit: Audit) -> str:
    """Draw how far each tensor is from the SQNR its type can reach, by layer and kind."""
    inside = [(tensor.layer, tensor) for tensor in audit.tensors if tensor.layer is not None]
    inside.sort(key=lambda pair: TENSOR_VERDICTS.index(pair[1].verdict))  # of two in one cell the worst stays
    numbers, cut = _first(sorted({layer for layer, _ in inside}), _MOST_LAYERS, "layers")
    names = dict.fromkeys(tensor.kind for tensor in audit.tensors if tensor.layer is not None)
    kinds, _ = _first(list(names), _MOST_ROWS, "kinds")
    column = {number: index for index, number in enumerate(numbers)}
    row = {kind: index for index, kind in enumerate(kinds)}
    found = {
        (row[tensor.kind], column[layer]): tensor for layer, tensor in inside if tensor.kind in row and layer in column
    }
    present = [[0.0 if (i, j) in found else math.nan for j in range(len(numbers))] for i in range(len(kinds))]
    margins = [[_margin_db(found.get((i, j))) for j in range(len(numbers))] for i in range(len(kinds))]
    with mpl.rc_context():
        figure = _figure(1.5 + 0.24 * len(kinds))
        axes = figure.subplots()
        norm = BoundaryNorm(_MARGINS_DB, 256, extend="both")
        colours = LinearSegmentedColormap.from_list("margin", ["#7A3400", _VERMILLION, "#FFF3B0", _BLUE, "#003455"])
        _mesh(axes, present, LinearSegmentedColormap.from_list("present", [_GREY, _GREY]), BoundaryNorm([-1, 1], 256))
        _mesh(axes, margins, colours, norm)
        for verdict, marker, colour, size in (
            ("exact", ".", "#555555", 9.0),
            ("worse", "v", _BLACK, 20.0),
            ("wrong", "x", _BLACK, 26.0),
        ):
            at = [(j + 0.5, i + 0.5) for (i, j), tensor in found.items() if tensor.verdict == verdict]
            axes.scatter(
                [x for x, _ in at], [y for _, y in at], s=size, c=colour, marker=marker, linewidths=1.6, zorder=3,
                label=f"{verdict} ({len(at)})",
            )  # fmt: skip
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, handletextpad=0.1)
        _name_ticks(axes, [str(number) for number in numbers], offset=0.5)
        axes.set_yticks([index + 0.5 for index in range(len(kinds))], [_label(kind) for kind in kinds])
        axes.set_xlabel(f"layer{cut}")
        bar = figure.colorbar(ScalarMappable(norm, colours), ax=axes, pad=0.01, fraction=0.05, extend="both")
        bar.set_ticks(_MARGINS_DB, labels=[f"{edge:+g}" for edge in _MARGINS_DB])
        bar.set_label("SQNR minus reachable, dB")
        return _svg(figure, "tensors", "SQNR of each tensor beside what its type can reach")


def kld_by_position(report: Report) -> str:
    """Draw mean and largest KLD of candidate and floor over position."""
    buckets, cut = _first(report.candidate.by_position, _MOST_ROWS, "buckets")
    floor = {bucket.label: bucket for bucket in report.floor.by_position}
    with mpl.rc_context():
        figure = _figure(3.6)
        axes = figure.subplots()
        _make_logarithmic(axes)
        beside: list[Bucket | None] = [floor.get(bucket.label) for bucket in buckets]
        for found, name, colour, marker in (
            (buckets, "candidate", _VERMILLION, "^"),
            (beside, "floor", _GREEN, "s"),
        ):
            for part, word, line in (("kl_nats_max", "max", ":"), ("kl_nats_mean", "mean", "-")):
                values = [None if bucket is None else getattr(bucket, part) for bucket in found]
                _line(axes, values, f"{name}, {word}", {"color": colour, "marker": marker, "linestyle": line})
        axes.set_ylabel("KLD, nats")
        axes.set_xlabel(f"token position{cut}")
        _name_ticks(axes, [_label(bucket.label) for bucket in buckets], most=14)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4)
        return _svg(figure, "positions", "KLD over token position")


def kld_distribution(report: Report) -> str:
    """Draw the share of positions in each half-decade of KLD, for every side that has one."""
    cells = None if report.diagnosis is None else report.diagnosis.cells
    sides: list[tuple[Comparison, str, dict[str, Any]]] = [
        (report.floor, "floor", {"color": _GREEN, "linestyle": ":"}),
        (report.candidate, "candidate", {"color": _VERMILLION, "linestyle": "-", "linewidth": 2.2}),
    ]
    if cells is not None:
        sides.append((cells.weights, "weights of the GGUF", {"color": _BLUE, "linestyle": "--"}))
        sides.append((cells.engine, "engine", {"color": _PURPLE, "linestyle": "-."}))
    found = [(_half_decades(side), label, style) for side, label, style in sides]
    used = [index for counts, _, _ in found for index in counts] or [0]
    indices = range(min(used), max(used) + 1)
    with mpl.rc_context():
        figure = _figure(3.6)
        axes = figure.subplots()
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(LogFormatter())
        axes.grid(axis="y", color=_GREY, linewidth=0.6)
        for counts, label, style in found:
            total = sum(counts.values())
            shares = [counts.get(index, 0) / total if total else 0.0 for index in indices]
            edges = [10 ** (index / 2) for index in (*indices, indices[-1] + 1)]
            axes.stairs(shares, edges, label=label if total else f"{label}: no finite row", **style)
        axes.set_ylabel("share of positions")
        smallest = "; the first step holds all below 1e-14" if indices[0] == _HALF_DECADES[0] else ""
        axes.set_xlabel(f"KLD, nats, in half-decades{smallest}")
        axes.set_ylim(bottom=0)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4)
        return _svg(figure, "distribution", "Distribution of the KLD")


def _figure(height_inches: float) -> Figure:
    """Return an empty figure in our settings; call it within `rc_context`, which ends them."""
    mpl.rcdefaults()  # whatever a user's matplotlibrc says
    mpl.rcParams.update(_SETTINGS)
    return Figure(figsize=(_WIDTH_INCHES, height_inches), layout="constrained")


def _first(items: Sequence[T], most: int, noun: str) -> tuple[Sequence[T], str]:
    """Return the first items, and what an axis says of the others."""
    return items[:most], "" if len(items) <= most else f" (the first {most} of {len(items)} {noun})"


def _make_logarithmic(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(LogFormatter())
    axes.yaxis.set_minor_formatter(LogFormatter())
    axes.grid(axis="y", color=_GREY, linewidth=0.6)


def _drawable(value: float | None) -> float | None:
    """Return a value for a logarithmic axis; None for what has no place on it."""
    return None if value is None or value <= 0 else min(max(value, 1e-30), 1e30)


def _line(axes: Axes, values: Sequence[float | None], label: str, style: dict[str, Any]) -> None:
    drawable = [_drawable(value) for value in values]
    if all(value is None for value in values):
        label += ": not measured"
    elif all(value is None for value in drawable):
        label += ": 0 everywhere"
    axes.plot([math.nan if value is None else value for value in drawable], label=label, **style)


def _name_ticks(axes: Axes, names: Sequence[str], *, offset: float = 0.0, most: int = 33) -> None:
    """Name the places of an axis of categories, all of them or every n-th."""
    step = max(1, math.ceil(len(names) / most))
    if step > 1:
        step = next((nice for nice in (2, 4, 8, 16, 32, 64) if nice >= step), step)
    places = range(0, len(names), step)
    axes.set_xticks([place + offset for place in places], [names[place] for place in places])


def _label(text: str) -> str:
    return printable(text, _LONGEST_LABEL)


def _band_full_attention(axes: Axes, layers: Sequence[LayerError], label: str | None) -> None:
    for index, layer in enumerate(layers):
        if layer.kind == "full_attention":
            axes.axvspan(index - 0.5, index + 0.5, color=_GREY, alpha=0.6, linewidth=0, zorder=0, label=label)
            label = None


def _fill_reachable(axes: Axes, layers: Sequence[LayerError]) -> None:
    """Fill what the types themselves lose, from the bottom of a logarithmic axis."""
    values = [_drawable(layer.alone_reachable) for layer in layers]
    known = [value for value in values if value is not None]
    if not known:
        return
    bottom = min(axes.get_ylim()[0], min(known) / 2)
    axes.fill_between(
        range(len(layers)), bottom, [bottom if value is None else value for value in values],
        step="mid", color=_SKY, alpha=0.35, linewidth=0, zorder=1, label="reachable by the types",
    )  # fmt: skip
    axes.set_ylim(bottom=bottom)


def _mark_culprits(axes: Axes, found: Localisation, layers: Sequence[LayerError]) -> None:
    index = {layer.layer: i for i, layer in enumerate(layers)}
    at = [(index[one.layer], _drawable(one.error)) for one in found.culprits if one.layer in index]
    if at:
        axes.scatter(
            [x for x, _ in at], [math.nan if y is None else y for _, y in at], marker="o", s=90, facecolors="none",
            edgecolors=_BLACK, linewidths=1.5, zorder=4, label="out of its band",
        )  # fmt: skip


def _mesh(axes: Axes, cells: list[list[float]], colours: Colormap, norm: BoundaryNorm) -> None:
    """Draw cells [rows][columns], the first row on top; NaN is left white."""
    if cells and cells[0]:
        axes.pcolormesh(cells, cmap=colours, norm=norm, edgecolors="white", linewidth=0.6)
        axes.set_ylim(len(cells), 0)
    axes.tick_params(length=0)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)


def _decades(values: Sequence[float]) -> list[float]:
    """Return at least two powers of ten around values above 0, at most 13."""
    low = math.floor(math.log10(min(values, default=1e-3)))
    high = max(math.ceil(math.log10(max(values, default=1.0))), low + 1)
    step = math.ceil((high - low) / 12)
    return [10.0**power for power in range(low, high + step, step)]


def _margin_db(tensor: TensorFinding | None) -> float:
    if tensor is None or tensor.sqnr_db is None or tensor.reachable_sqnr_db is None:
        return math.nan
    return tensor.sqnr_db - tensor.reachable_sqnr_db


def _half_decades(side: Comparison) -> dict[int, int]:
    """Return index of a half-decade -> positions."""
    low, high = _HALF_DECADES
    counts: dict[int, int] = {}
    for edge, count in side.kl_histogram:
        index = low if edge <= 0 else min(max(round(2 * math.log10(edge)), low + 1), high)
        counts[index] = counts.get(index, 0) + count
    return counts


def _svg(figure: Figure, name: str, title: str) -> str:
    """Return a figure as an element for a page that holds others: its ids carry a prefix, its size is the page's."""
    data = io.BytesIO()
    figure.savefig(data, format="svg", metadata={"Date": None})
    root = ElementTree.fromstring(data.getvalue())  # our own bytes; labels are printable, so this is XML
    for child in list(root):
        if child.tag.endswith("}metadata"):
            root.remove(child)
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.endswith("}style"):  # it would hold for the whole page
                parent.remove(child)
    for element in root.iter():
        element.tag = element.tag.partition("}")[2]  # HTML knows SVG by its name
        if f"{_XLINK}href" in element.attrib:
            element.set("href", element.attrib.pop(f"{_XLINK}href"))
        for key, value in element.attrib.items():
            if key == "id":
                element.set(key, f"{name}-{value}")
            elif key == "href" and value.startswith("#"):
                element.set(key, f"#{name}-{value[1:]}")
            else:
                element.set(key, value.replace("url(#", f"url(#{name}-"))
    for size in ("width", "height", "version"):
        root.attrib.pop(size, None)
    root.set("style", "stroke-linejoin:round;stroke-linecap:butt")
    root.set("role", "img")
    caption = ElementTree.Element("title")
    caption.text = title
    root.insert(0, caption)
    return ElementTree.tostring(root, encoding="unicode")
