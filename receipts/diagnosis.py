"""Why a candidate differs: the four cells, the layers and operations at which it parts, and who of three is off."""

from __future__ import annotations

from dataclasses import dataclass

from receipts.comparison import Comparison
from receipts.errors import ReceiptFormatError

PARTS = ("weights", "engine", "reference")


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrast:
    """The mean KLD between two cells, or what the cells' contrasts leave over.

    Attributes:
        name: "weights", "engine", "conversion", "floor", "total" or "interaction".
        kl_nats_mean: in nats; of an interaction it may be negative; None where a side has no finite row.
        stderr: standard error with examples as clusters; None below two examples.
        above_floor: whether it is larger than the floor, below which nothing is claimed.
        sentence: the same for a person.
    """

    name: str
    kl_nats_mean: float | None
    stderr: float | None
    above_floor: bool
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """Teacher math or engine, source weights or the GGUF's: two factors, and what each does.

    Attributes:
        weights: teacher math on source weights against teacher math on the GGUF's weights.
        engine: teacher math on the GGUF's weights against the engine on the GGUF.
        conversion: teacher against the engine on an unquantized GGUF; None when none was given.
        contrasts: their means beside floor, total and interaction.
    """

    weights: Comparison
    engine: Comparison
    conversion: Comparison | None
    contrasts: tuple[Contrast, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerError:
    """Relative errors of one decoder layer on the traced calls.

    The first three are errors of the residual stream after the layer, relative to the teacher's, with everything
    that earlier layers did; the others are of the layer alone, fed the same input on both sides, relative to what the
    layer adds to the stream. Each is the root mean square over positions; None where something is not finite or not
    shown.

    Attributes:
        layer: index.
        kind: "linear_attention" or "full_attention".
        reference, weights, candidate: of PyTorch, of the GGUF's weights in teacher math, of the engine.
        alone_reference: PyTorch's layer against the teacher's.
        alone_weights: the GGUF's weights against the source's, both in teacher math.
        alone_reachable: the source quantized by the types' own quantizers, in place of the GGUF's weights.
        alone_engine: the engine's layer against teacher math on the GGUF's weights.
        alone_engine_first_calls, alone_engine_later_calls: the same over each example's first call, and over the calls
            that start from a carried state; None where there are none.
    """

    layer: int
    kind: str
    reference: float | None
    weights: float | None
    candidate: float | None
    alone_reference: float | None
    alone_weights: float | None
    alone_reachable: float | None
    alone_engine: float | None
    alone_engine_first_calls: float | None
    alone_engine_later_calls: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationError:
    """Relative errors of one operation's result within a layer, the layer's input being the same on both sides.

    Attributes:
        layer: index.
        operation: name, in the order in which they are computed.
        weights: the GGUF's weights against the source's.
        reachable: the source quantized by the types' own quantizers against the source.
        engine: the engine against teacher math on the GGUF's weights.
        reference: PyTorch against the teacher. All are None where something is not finite or not shown.
    """

    layer: int
    operation: str
    weights: float | None
    reachable: float | None
    engine: float | None
    reference: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndError:
    """Relative errors before the first layer and behind the last, each from the side's own stream.

    Attributes:
        place: "embedding" or "final norm".
        weights: the GGUF's weights against the source's.
        reachable: the source quantized by the type's own quantizer against the source.
        engine: the engine against the GGUF's weights.
        reference: PyTorch against the teacher. All are None where something is not finite or not shown.
    """

    place: str
    weights: float | None
    reachable: float | None
    engine: float | None
    reference: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """A place where something is out of its band.

    Attributes:
        part: "weights", "engine" or "reference".
        layer: index; None for embedding and final norm.
        operation: the first one out of its band, or "embedding" or "final norm"; None where none was found.
        error, band: relative error of the place alone, None where it is not finite, and how large it may be.
        sentence: the same for a person.
    """

    part: str
    layer: int | None
    operation: str | None
    error: float | None
    band: float
    sentence: str

    def __post_init__(self) -> None:
        if self.part not in PARTS:
            raise ReceiptFormatError(f"culprit: expected one of {', '.join(PARTS)}, got {self.part!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Localisation:
    """Residual streams of all sides after every layer, on a few examples.

    Attributes:
        examples: names of those that were traced.
        positions: how many positions that is.
        ends: embedding and final norm.
        layers: one for each layer.
        operations: of the layers that were looked into.
        culprits: where something is out of its band, in order of the model.
        rounding: sides whose residual stream holds values of a narrower type alone, as sentences.
    """

    examples: tuple[str, ...]
    positions: int
    ends: tuple[EndError, ...]
    layers: tuple[LayerError, ...]
    operations: tuple[OperationError, ...]
    culprits: tuple[Culprit, ...]
    rounding: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arbitration:
    """Teacher and PyTorch against the F64 definition on a short text.

    Attributes:
        positions: of the text.
        teacher_kl_nats, reference_kl_nats: mean KLD of the definition against each; None where no row is finite.
        between_kl_nats: mean KLD of the teacher against PyTorch.
        sentence: which pair of the three agrees.
    """

    positions: int
    teacher_kl_nats: float | None
    reference_kl_nats: float | None
    between_kl_nats: float | None
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What explains a verdict.

    Attributes:
        cells: the four cells.
        localisation: layer by layer; None when it was not asked for, or the engine shows no layers.
        state: findings on what a candidate carries between calls and examples, as sentences.
        arbitration: who is off when teacher and PyTorch differ; None when they do not.
    """

    cells: Cells | None
    localisation: Localisation | None
    state: tuple[str, ...]
    arbitration: Arbitration | None

    @property
    def sentences(self) -> tuple[str, ...]:
        """Everything it says, as sentences; of many layers out of the same band the first alone."""
        found = [] if self.arbitration is None else [self.arbitration.sentence]
        found += () if self.localisation is None else self.localisation.rounding
        culprits = () if self.localisation is None else self.localisation.culprits
        for part in PARTS:
            of_part = [culprit for culprit in culprits if culprit.part == part]
            if of_part:
                more = f" (and {len(of_part) - 1} places behind it)" if len(of_part) > 1 else ""
                found.append(of_part[0].sentence + more)
        return (*found, *self.state)
