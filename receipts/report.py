"""What was measured: the teacher against its floor, against the candidate, and the candidate against itself."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any, TypeVar

from receipts.errors import ReceiptFormatError

SCHEMA = "source-teacher/report/v1"
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """A place in the plan.

    Attributes:
        example: index into the plan's examples.
        position: token position within the example.
    """

    example: int
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """A quantity over positions.

    Attributes:
        count: positions it was taken over.
        stderr: standard error of the mean with examples as clusters; None below two examples.
        p90, p95, p99, p999: nearest-rank quantiles.
        max_at: first place of the maximum.
    """

    count: int
    mean: float
    stderr: float | None
    median: float
    p90: float
    p95: float
    p99: float
    p999: float
    max: float
    max_at: Where


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A part of the positions.

    Attributes:
        label: what they have in common.
        kl_nats_mean, kl_nats_max: KL(expected || actual) in nats.
        top1_agreement: share of positions with the same top token.
    """

    label: str
    positions: int
    kl_nats_mean: float
    kl_nats_max: float
    top1_agreement: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedRows:
    """Logits that no token of the tokenizer stands for.

    Attributes:
        count: such entries in a row of logits.
        max_abs_difference: between the sides, over all positions.
        expected_argmax_in_padding, actual_argmax_in_padding: positions whose largest logit is one of them.
    """

    count: int
    max_abs_difference: float
    expected_argmax_in_padding: int
    actual_argmax_in_padding: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two sides over the same positions; all but `padded` over the real vocabulary.

    Attributes:
        expected, actual: names of the sides.
        positions, examples: what was compared.
        nonfinite_rows: rows of the actual side with NaN or infinity; they count in no statistic.
        first_nonfinite: where the first of them is.
        constant_rows: rows of the actual side whose logits are all equal.
        kl_nats: KL(expected || actual); None when no row is finite.
        reverse_kl_nats: KL(actual || expected).
        top1_agreement: share of positions with the same top token.
        topk_agreement: pairs (k, mean share of the expected top k that is in the actual top k).
        expected_top_rank: rank, from 0, of the expected top token on the actual side.
        observed_probability_change: actual minus expected probability of the token that follows.
        observed_nll_expected, observed_nll_actual: mean negative log-likelihood of it, in nats.
        nmse_centred: squared difference of centred logits over squared centred expected logits.
        max_abs_centred, max_abs_centred_at: largest difference of centred logits, and its place.
        padded: logits beyond the tokenizer's vocabulary; None when there are none.
        by_position, by_example, by_call_shape: the same in parts.
    """

    expected: str
    actual: str
    positions: int
    examples: int
    nonfinite_rows: int
    first_nonfinite: Where | None
    constant_rows: int
    kl_nats: Stats | None
    reverse_kl_nats: Stats | None
    top1_agreement: float
    topk_agreement: tuple[tuple[int, float], ...]
    expected_top_rank: Stats | None
    observed_probability_change: Stats | None
    observed_nll_expected: float | None
    observed_nll_actual: float | None
    nmse_centred: float
    max_abs_centred: float
    max_abs_centred_at: Where
    padded: PaddedRows | None
    by_position: tuple[Bucket, ...]
    by_example: tuple[Bucket, ...]
    by_call_shape: tuple[Bucket, ...]


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
            raise ReceiptFormatError(
                f"tokenizer status: expected match, differs or not_checked, got {self.status!r}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything a policy may judge.

    Attributes:
        vocabulary_rows: logits of a row; real_vocabulary: how many of them a token stands for.
        floor: the teacher against PyTorch in F32: what two correct implementations differ by.
        reference_bf16: the teacher against PyTorch in BF16, for scale.
        candidate: the teacher against the candidate.
        spread: the candidate at other call shapes against its main run.
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


def from_plain(kind: type[T], form: Any, place: str) -> T:
    """Build a dataclass from plain values, each field checked against its annotation.

    Raises:
        ReceiptFormatError: names the field, what was expected and what was found.
    """
    if not isinstance(form, Mapping):
        raise ReceiptFormatError(f"{place}: expected an object, got {type(form).__name__}")
    hints = typing.get_type_hints(kind)
    names = {field.name for field in fields(typing.cast(Any, kind))}
    if set(form) != names:
        missing, unknown = sorted(names - set(form)), sorted(set(form) - names)
        raise ReceiptFormatError(f"{place}: expected its fields, got missing {missing} and unknown {unknown}")
    return kind(**{name: _value(hints[name], form[name], f"{place}.{name}") for name in names})


def _value(hint: Any, value: Any, place: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in arguments:
            return None
        (hint,) = (argument for argument in arguments if argument is not type(None))
        return _value(hint, value, place)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ReceiptFormatError(f"{place}: expected a list, got {type(value).__name__}")
        if arguments[-1] is Ellipsis:
            return tuple(_value(arguments[0], item, f"{place}[{i}]") for i, item in enumerate(value))
        if len(value) != len(arguments):
            raise ReceiptFormatError(f"{place}: expected {len(arguments)} entries, got {len(value)}")
        return tuple(
            _value(argument, item, f"{place}[{i}]")
            for i, (argument, item) in enumerate(zip(arguments, value, strict=True))
        )
    if origin is dict:
        if not isinstance(value, Mapping):
            raise ReceiptFormatError(f"{place}: expected an object, got {type(value).__name__}")
        return {str(key): _value(arguments[1], item, f"{place}.{key}") for key, item in value.items()}
    if is_dataclass(hint):
        return from_plain(typing.cast(Any, hint), value, place)
    if hint is Any:
        return value
    if hint is float and type(value) is int:
        return float(value)  # RFC 8785 writes 1.0 as 1
    if type(value) is not hint:
        raise ReceiptFormatError(f"{place}: expected {hint.__name__}, got {type(value).__name__}")
    if hint is float and not math.isfinite(value):
        raise ReceiptFormatError(f"{place}: expected a finite number, got {value}")
    return value
