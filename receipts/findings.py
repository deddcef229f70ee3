"""What the tensor audit found: every tensor of a GGUF against its source, as plain values."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from receipts.errors import ReceiptFormatError

SCHEMA = "source-teacher/audit/v1"
TENSOR_VERDICTS = ("exact", "as_good", "worse", "wrong")


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
class Audit:
    """Every tensor of a GGUF against the snapshot.

    Attributes:
        file: name of the GGUF.
        source_bytes: bytes of source weights that were read.
        tensors: one for each tensor of the text model, in the order of the file.
        notes: what is odd in the header but prevents nothing.
    """

    file: str
    source_bytes: int
    tensors: tuple[TensorFinding, ...]
    notes: tuple[str, ...]

    def of_verdict(self, *verdicts: str) -> tuple[TensorFinding, ...]:
        """Return the tensors of some verdicts."""
        return tuple(tensor for tensor in self.tensors if tensor.verdict in verdicts)

    @property
    def passed(self) -> bool:
        """Whether every tensor is exact or as good as its type allows."""
        return not self.of_verdict("worse", "wrong")

    def to_dict(self) -> dict[str, Any]:
        """Return the audit as plain values, with its schema."""
        return {"schema": SCHEMA, **asdict(self)}
