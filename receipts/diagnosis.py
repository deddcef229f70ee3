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
    layer adds to the stream.

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
    weights: float
    candidate: float | None
    alone_reference: float | None
    alone_weights: float
    alone_reachable: float
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
        engine: the engine against teacher math on the GGUF's weights; None where the engine does not show it.
    """

    layer: int
    operation: str
    weights: float
    reachable: float
    engine: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """A place where something is out of its band.

    Attributes:
        part: "weights", "engine" or "reference".
        layer: index; None for what stands before or behind the layers.
        operation: the first one out of its band; None where none was found.
        error, band: relative error of the layer alone, and how large it may be.
        sentence: the same for a person.
    """

    part: str
    layer: int | None
    operation: str | None
    error: float
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
        embedding_weights, embedding_engine: relative errors of the stream before the first layer.
        final_engine: relative error of the engine's final norm, from its own stream; None where it shows none.
        layers: one for each layer.
        operations: of the layers that were looked into.
        culprits: where something is out of its band, in order of the model.
    """

    examples: tuple[str, ...]
    positions: int
    embedding_weights: float
    embedding_engine: float | None
    final_engine: float | None
    layers: tuple[LayerError, ...]
    operations: tuple[OperationError, ...]
    culprits: tuple[Culprit, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arbitration:
    """Teacher and PyTorch against the F64 definition on a short text.

    Attributes:
        positions: of the text.
        teacher_kl_nats, reference_kl_nats: mean KLD of the definition against each.
        between_kl_nats: mean KLD of the teacher against PyTorch.
        sentence: which pair of the three agrees.
    """

    positions: int
    teacher_kl_nats: float
    reference_kl_nats: float
    between_kl_nats: float
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
        """Everything it says, as sentences."""
        found = [] if self.arbitration is None else [self.arbitration.sentence]
        found += [] if self.localisation is None else [culprit.sentence for culprit in self.localisation.culprits]
        return (*found, *self.state)
