"""What was measured: the teacher against its floor, against the candidate, and the candidate against itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from receipts.comparison import Comparison, WorstPosition
from receipts.diagnosis import Diagnosis
from receipts.errors import ReceiptFormatError
from receipts.findings import Audit
from receipts.plain import from_plain

SCHEMA = "source-teacher/report/v2"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerParity:
    """The candidate's own tokenizer beside the snapshot's.

    Attributes:
        status: "match", "differs" or "not_checked".
        texts, tokens: how much was compared.
        first_difference: where they part, as a sentence; None when they do not.
    """

    status: str
    texts: int
    tokens: int
    first_difference: str | None

    def __post_init__(self) -> None:
        if self.status not in ("match", "differs", "not_checked"):
            raise ReceiptFormatError(f"tokenizer status: expected match, differs or not_checked, got {self.status!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything a policy may judge.

    Attributes:
        vocabulary_rows: logits of a row; real_vocabulary: how many of them a token stands for.
        floor: the teacher against PyTorch in F32: what two correct implementations differ by.
        reference_bf16: the teacher against PyTorch in BF16, for scale.
        candidate: the teacher against the candidate.
        spread: the candidate at other call shapes against its main run.
        audit: the file against the snapshot, tensor by tensor; None when it could not be made.
        diagnosis: why the candidate differs; None when it was not asked for.
        worst: the positions at which candidate and teacher differ most, the worst first.
        notes: findings that prevent nothing but belong in the record.
        uses: name of a receipt -> SHA-256 of the file it was computed from.
    """

    vocabulary_rows: int
    real_vocabulary: int
    floor: Comparison
    reference_bf16: Comparison | None
    candidate: Comparison
    spread: tuple[Comparison, ...]
    tokenizer: TokenizerParity
    audit: Audit | None
    diagnosis: Diagnosis | None
    worst: tuple[WorstPosition, ...]
    notes: tuple[str, ...]
    uses: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values, with its schema."""
        return {"schema": SCHEMA, **asdict(self)}

    @staticmethod
    def from_dict(form: Mapping[str, Any]) -> Report:
        """Read a report back.

        Raises:
            ReceiptFormatError: a field is missing, unknown or of another type; names it.
        """
        body = dict(form)
        if body.pop("schema", None) != SCHEMA:
            raise ReceiptFormatError(f"report: expected schema {SCHEMA}, got {form.get('schema')!r}")
        return from_plain(Report, body, "report")
