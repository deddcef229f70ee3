"""What the audit found: every tensor, key and type of a GGUF against its source, as plain values."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from receipts.errors import ReceiptFormatError

SCHEMA = "source-teacher/audit/v1"
TENSOR_VERDICTS = ("exact", "as_good", "worse", "wrong")
METADATA_KINDS = ("math", "usage")
TYPE_KINDS = ("above", "below")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFinding:
    """One tensor of a GGUF against its source, without a forward pass.

    Attributes:
        name: in the GGUF ("blk.3.ffn_up.weight").
        source: in the snapshot, without prefix ("layers.3.mlp.up_proj.weight").
        layer: index of its decoder layer; None for embedding, head and final norm.
        kind: the name within a layer ("ffn_up"), or of the tensor itself ("token_embd").
        type: element type as ggml names it ("Q4_K").
        shape: axes, slowest first.
        sqnr_db: 10 log10(sum of source^2 / sum of error^2); None where there is no error, or where not every value
            is finite.
        reachable_sqnr_db: the same for the source quantized by the type's own quantizer, on the rows that were
            sampled; None where the type holds the source's values exactly.
        cosine: of the two tensors as vectors; None where one of them is all zero or not finite.
        max_abs_error: largest difference; None where not every value is finite.
        zeroed_blocks: blocks of the type that are all zero where the source is not.
        nonfinite_blocks: blocks with NaN or infinity.
        verdict: "exact", "as_good" as the type allows, "worse" than it allows, or "wrong".
        cause: what explains a "worse" or "wrong" tensor, as a sentence; None when nothing known does.
    """

    name: str
    source: str
    layer: int | None
    kind: str
    type: str
    shape: tuple[int, ...]
    sqnr_db: float | None
    reachable_sqnr_db: float | None
    cosine: float | None
    max_abs_error: float | None
    zeroed_blocks: int
    nonfinite_blocks: int
    verdict: str
    cause: str | None

    def __post_init__(self) -> None:
        if self.verdict not in TENSOR_VERDICTS:
            raise ReceiptFormatError(
                f"tensor {self.name}: expected one of {', '.join(TENSOR_VERDICTS)}, got {self.verdict!r}"
            )

    @property
    def sentence(self) -> str:
        """What was found, for a person."""
        allowed = "" if self.reachable_sqnr_db is None else f" where {self.type} reaches {self.reachable_sqnr_db:.1f}"
        ratio = "" if self.sqnr_db is None else f" (SQNR {self.sqnr_db:.1f} dB{allowed})"
        return f"tensor audit: {self.name} is {self.verdict.replace('_', ' ')}: {self.cause or 'no known cause'}{ratio}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataFinding:
    """One key of a GGUF that is not what the snapshot says.

    Attributes:
        key: in the GGUF.
        kind: "math" (the engine computes another model) or "usage" (it is asked in other words, or stops elsewhere).
        sentence: key, expected and actual value, for a person.
    """

    key: str
    kind: str
    sentence: str

    def __post_init__(self) -> None:
        if self.kind not in METADATA_KINDS:
            raise ReceiptFormatError(f"key {self.key}: expected one of {', '.join(METADATA_KINDS)}, got {self.kind!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeFinding:
    """A matrix whose element type is not what a file of this label has.

    Attributes:
        name: of the tensor.
        type: its element type.
        label: the type that the file says it is ("Q4_K_M").
        kind: "above" for a plain float in a quantized file, "below" for a type coarser than the label's coarsest.
    """

    name: str
    type: str
    label: str
    kind: str

    def __post_init__(self) -> None:
        if self.kind not in TYPE_KINDS:
            raise ReceiptFormatError(f"type of {self.name}: expected one of {', '.join(TYPE_KINDS)}, got {self.kind!r}")

    @property
    def sentence(self) -> str:
        """What was found, for a person."""
        what = "was left unquantized" if self.kind == "above" else "is coarser than that"
        return f"type audit: {self.name} is {self.type} in a {self.label} file: it {what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """A GGUF against the snapshot.

    Attributes:
        file: name of the GGUF.
        source_bytes: bytes of source weights that were read.
        tensors: one for each tensor of the text model, in the order of the file.
        metadata: keys that say something else than the snapshot.
        types: matrices of a type that the file's label does not lead one to expect.
        notes: what is odd in the header but prevents nothing.
    """

    file: str
    source_bytes: int
    tensors: tuple[TensorFinding, ...]
    metadata: tuple[MetadataFinding, ...]
    types: tuple[TypeFinding, ...]
    notes: tuple[str, ...]

    def of_verdict(self, *verdicts: str) -> tuple[TensorFinding, ...]:
        """Return the tensors of some verdicts."""
        return tuple(tensor for tensor in self.tensors if tensor.verdict in verdicts)

    def keys_of(self, *kinds: str) -> tuple[MetadataFinding, ...]:
        """Return the findings on keys of some kinds."""
        return tuple(finding for finding in self.metadata if finding.kind in kinds)

    def types_of(self, kind: str) -> tuple[TypeFinding, ...]:
        """Return the findings on types of a kind."""
        return tuple(finding for finding in self.types if finding.kind == kind)

    def _groups(self) -> tuple[tuple[TensorFinding | MetadataFinding | TypeFinding, ...], ...]:
        return (
            self.keys_of("math"), self.of_verdict("wrong"), self.of_verdict("worse"), self.keys_of("usage"),
            self.types_of("below"), self.types_of("above"),
        )  # fmt: skip

    @property
    def sentences(self) -> tuple[str, ...]:
        """Everything that was found, the worst first."""
        return tuple(finding.sentence for group in self._groups() for finding in group)

    @property
    def passed(self) -> bool:
        """Whether the file is the source as far as its types allow; a type finer than the label is only told."""
        return not (self.of_verdict("worse", "wrong") or self.metadata or self.types_of("below"))

    def to_dict(self) -> dict[str, Any]:
        """Return the audit as plain values, with its schema."""
        return {"schema": SCHEMA, **asdict(self)}
