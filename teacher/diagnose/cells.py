"""The four cells: teacher math or engine, source weights or the GGUF's, and the contrasts between them.

                       source weights                 the GGUF's weights
    teacher math       teacher                        teacher math on the GGUF
    engine             engine on an unquantized GGUF  candidate

KLD is no distance: contrasts need not add up, so what they leave over is shown as the interaction and not divided.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from receipts.comparison import Comparison
from receipts.diagnosis import Cells, Contrast
from teacher.sides.roster import Side, Sides

_STANDARD_ERRORS = 2.0  # holds 95 % of normal errors, as the shipped policies have it


def measure_cells(
    sides: Sides,
    teacher: Side,
    on_gguf: Side,
    candidate: Side,
    unquantized: Side | None,
    *,
    floor: Comparison,
    total: Comparison,
) -> Cells:
    """Run the cells that are not measured yet.

    Args:
        sides: where they run.
        teacher, on_gguf, candidate, unquantized: the cells; the last one only where such a file was given.
        floor: teacher against PyTorch.
        total: teacher against candidate.

    Raises:
        NonFiniteError: the GGUF's weights lead to NaN or infinity; names layer and example.
    """
    weights = sides.compare(teacher, on_gguf)
    engine = sides.compare(on_gguf, candidate)
    conversion = None if unquantized is None else sides.compare(teacher, unquantized)
    return Cells(
        weights=weights,
        engine=engine,
        conversion=conversion,
        contrasts=tuple(contrasts(floor, weights, engine, conversion, total)),
    )


def contrasts(
    floor: Comparison, weights: Comparison, engine: Comparison, conversion: Comparison | None, total: Comparison
) -> Iterator[Contrast]:
    """Yield the contrasts with their sentences: floor, weights, engine, conversion, total, interaction."""
    least = 0.0 if floor.kl_nats is None else floor.kl_nats.mean
    yield _contrast("floor", "two correct implementations differ by {}", floor, None)
    yield _contrast("weights", "the file's weights lose {}, in teacher math", weights, least)
    yield _contrast("engine", "the engine adds {}, on the file's weights", engine, least)
    if conversion is not None:
        yield _contrast("conversion", "conversion and engine lose {}, on unquantized weights", conversion, least)
    yield _contrast("total", "the candidate loses {} in all", total, least)
    parts = [total.kl_nats, weights.kl_nats, engine.kl_nats]
    if all(part is not None for part in parts):
        means = [part.mean for part in parts if part is not None]
        errors = [part.stderr for part in parts if part is not None]
        error = None if None in errors else math.sqrt(math.fsum(e * e for e in errors if e is not None))
        yield _interaction(means[0] - means[1] - means[2], error, least)


def _contrast(name: str, words: str, found: Comparison, floor: float | None) -> Contrast:
    if found.kl_nats is None:
        sentence = words.format("an unknown amount, as no row is finite")
        return Contrast(name=name, kl_nats_mean=None, stderr=None, above_floor=False, sentence=sentence)
    mean, error = found.kl_nats.mean, found.kl_nats.stderr
    above = floor is not None and mean - _STANDARD_ERRORS * (error or 0.0) > floor
    claim = "" if above or floor is None else "; that is within the floor and its error, so nothing is claimed"
    return Contrast(
        name=name, kl_nats_mean=mean, stderr=error, above_floor=above, sentence=words.format(_nats(mean, error)) + claim
    )


def _interaction(left: float, error: float | None, floor: float) -> Contrast:
    above = abs(left) - _STANDARD_ERRORS * (error or 0.0) > floor
    words = "total less weights less engine leaves" if above else "total less weights less engine leaves no more than"
    return Contrast(
        name="interaction",
        kl_nats_mean=left,
        stderr=error,
        above_floor=above,
        sentence=f"{words} {_nats(left, error)}" + ("" if above else ", within its error"),
    )


def _nats(mean: float, error: float | None) -> str:
    return f"{mean:.3g} nats" + ("" if error is None else f" (standard error {error:.1g})")
