"""Which layer and which operation is out of its band: how large an error may be, and why."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from receipts.diagnosis import Culprit, EndError, LayerError, OperationError
from teacher.gguf.file import read_gguf

# An importance matrix or another search may leave up to 2 dB more plain error than the type's own quantizer (the audit
# allows 3 of its own kind); twice the error is the first that it does not explain.
_WEIGHTS_FACTOR = 2.0
# Weights that are the source's to the last bit but for exp(A_log), whose libraries differ by two ulps, carried through
# one layer: 2^-22 and the delta rule's amplification, measured 2e-7 to 3e-6; 1e-4 stands clear of both.
_WEIGHTS_LEAST = 1e-4
# Two F32 implementations of one layer measure 2e-7 to 3e-6 of its update; sums of 5120 products may err by 1e-5.
REFERENCE_BAND = 1e-4
# The engine's own rounding, by the coarsest of its activations: 8-bit blocks of 32 err by 0.4 % of a block's largest
# value and by about 1 % of its norm; a layer has four such products in a row. F16 and BF16 are finer.
ENGINE_BAND_QUANTIZED = 0.1
ENGINE_BAND_FLOAT = 0.03


_WORDS = {
    "weights": ("the file's weights", ", where their types allow {band}"),
    "engine": ("the engine", ", on the same weights and input, where rounding explains {band}"),
    "reference": ("PyTorch against the teacher", ", on the same weights and input, where rounding explains {band}"),
}


def weights_band(reachable: float | None) -> float:
    """Return how large an error the file's weights may make where honest quantizing makes `reachable`."""
    return _WEIGHTS_FACTOR * (reachable or 0.0) + _WEIGHTS_LEAST


def engine_band(types: Collection[str]) -> float:
    """Return how large an error the engine may make by its rounding.

    Args:
        types: element types of the file's matrices.
    """
    return ENGINE_BAND_FLOAT if set(types) <= {"F32", "F16", "BF16"} else ENGINE_BAND_QUANTIZED


def file_engine_band(path: Path) -> float:
    """Return `engine_band` of a GGUF."""
    return engine_band({tensor.type for tensor in read_gguf(path).tensors if len(tensor.shape) > 1})


def find_culprits(
    ends: Sequence[EndError],
    layers: Sequence[LayerError],
    operations: Sequence[OperationError],
    *,
    engine: float | None,
    reference: float | None,
) -> tuple[Culprit, ...]:
    """Return everything that is out of its band, in order of the model.

    Args:
        ends, layers, operations: what was measured; any may be empty.
        engine, reference: bands of engine and PyTorch; None for one that shows no layers.
    """
    found: list[Culprit] = []
    parts = ["weights", *(["engine"] if engine is not None else []), *(["reference"] if reference is not None else [])]

    def add(part: str, place: str, layer: int | None, operation: str | None, error: float | None, band: float) -> None:
        if error is not None and error <= band:
            return
        subject, ending = _WORDS[part]
        amount = "values that are not finite" if error is None else f"an error of {error:.2g} of what it adds"
        within = f", first in its {operation}" if operation is not None and layer is not None else ""
        sentence = f"{place}: {subject}: {amount}{ending.format(band=f'{band:.2g}')}{within}"
        found.append(Culprit(part=part, layer=layer, operation=operation, error=error, band=band, sentence=sentence))

    def bands(one: EndError | OperationError) -> dict[str, tuple[float | None, float]]:
        return {
            "weights": (one.weights, weights_band(one.reachable)),
            "engine": (one.engine, engine or 0.0),
            "reference": (one.reference, reference or 0.0),
        }

    def first_operation(part: str, layer: int) -> str | None:
        for one in operations:
            error, band = bands(one)[part]
            # Weights are always shown, so what is missing there is not finite.
            if one.layer == layer and (part == "weights" if error is None else error > band):
                return one.operation
        return None

    by_place = {end.place: end for end in ends}
    for part in parts if "embedding" in by_place else ():
        add(part, "the embedding", None, "embedding", *bands(by_place["embedding"])[part])
    broken: set[str] = set()
    for layer in layers:
        errors = {
            "weights": (layer.alone_weights, weights_band(layer.alone_reachable)),
            "engine": (layer.alone_engine, engine or 0.0),
            "reference": (layer.alone_reference, reference or 0.0),
        }
        for part in parts:
            # Once a stream is not finite, nothing behind it can be judged; nor an engine by weights that lead there.
            if part in broken or (part == "engine" and "weights" in broken):
                continue
            name = f"layer {layer.layer} ({layer.kind.replace('_', ' ')})"
            add(part, name, layer.layer, first_operation(part, layer.layer), *errors[part])
            if errors[part][0] is None:
                broken.add(part)
    for part in parts if "final norm" in by_place else ():
        if not broken & {part, "weights"}:
            add(part, "the final norm", None, "final norm", *bands(by_place["final norm"])[part])
    return tuple(found)


def carried_state(layers: Sequence[LayerError], engine: float) -> str | None:
    """Return a sentence when the engine errs only in calls that start from the state of earlier ones."""
    later = [layer for layer in layers if (layer.alone_engine_later_calls or 0.0) > engine]
    if not later or any((layer.alone_engine_first_calls or 0.0) > engine for layer in layers):
        return None
    numbers = ", ".join(str(layer.layer) for layer in later[:8])
    kinds = " and ".join(sorted({layer.kind.replace("_", " ") for layer in later}))
    return (
        f"state between calls: the engine is right in each example's first call and wrong in later ones, at the"
        f" {kinds} layers {numbers}: what it carries from call to call is wrong"
    )
