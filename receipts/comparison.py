"""Two sides over the same positions, in numbers."""

from __future__ import annotations

from dataclasses import dataclass


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
        kl_histogram: pairs (lower edge in nats, positions) of the half-decades that hold any; the first edge is 0.
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
    kl_histogram: tuple[tuple[float, int], ...]
    padded: PaddedRows | None
    by_position: tuple[Bucket, ...]
    by_example: tuple[Bucket, ...]
    by_call_shape: tuple[Bucket, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenShare:
    """A token and the probability a side gives it.

    Attributes:
        token_id: its id.
        text: as the tokenizer decodes it alone.
        probability: softmax over the real vocabulary.
    """

    token_id: int
    text: str
    probability: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorstPosition:
    """A position at which the sides differ most.

    Attributes:
        where: its place in the plan.
        kl_nats: KL(expected || actual).
        context: the text before it, its own token at the end.
        following: the token that follows in the plan, decoded; None at an example's end.
        expected_top, actual_top: the five likeliest next tokens of either side.
    """

    where: Where
    kl_nats: float
    context: str
    following: str | None
    expected_top: tuple[TokenShare, ...]
    actual_top: tuple[TokenShare, ...]
