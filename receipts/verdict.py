"""Report and policy in, verdict out: pure, so that anybody can decide again.

INVALID       the tokenizers differ where the policy asks for equal ones, or the teacher has no finite row
FAIL          a limit is clearly broken, or the candidate has rows that are not finite or all of one value
INCONCLUSIVE  the floor or the sample cannot bear the claim: the floor of a quantity is more than the policy's share of
              its limit, a mean lies within the policy's standard errors of its limit, or there is too little of it
PASS          everything else

A difference that the floor explains is no finding: where the floor is too high, a limit fails only when the value is
beyond it by more than the floor itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from receipts.comparison import Comparison
from receipts.errors import ReceiptFormatError
from receipts.plain import from_plain
from receipts.policy import Limit, Policy, quantity_reader
from receipts.report import Report

SCHEMA = "source-teacher/verdict/v1"
EXIT_CODES = {"PASS": 0, "FAIL": 4, "INCONCLUSIVE": 3, "INVALID": 2}
_OUTCOMES = ("pass", "fail", "inconclusive", "invalid")
_ALWAYS = (
    Limit(quantity="candidate.nonfinite_rows", bound="max", limit=0.0, reason="a row with NaN is no prediction"),
    Limit(quantity="candidate.constant_rows", bound="max", limit=0.0, reason="equal logits are no prediction"),
)
_ALWAYS_AUDITED = (
    Limit(quantity="audit.wrong_tensors", bound="max", limit=0.0, reason="a wrong tensor is another model"),
    Limit(quantity="audit.math_keys", bound="max", limit=0.0, reason="another constant is another model"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One limit against one report.

    Attributes:
        quantity, bound, limit: as in the policy.
        value: what was measured; None when there was nothing to measure.
        floor: the same quantity between teacher and PyTorch, None where it has no floor.
        outcome: "pass", "fail", "inconclusive" or "invalid".
        sentence: the same for a person.
    """

    quantity: str
    bound: str
    limit: float
    value: float | None
    floor: float | None
    outcome: str
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a policy says of a report.

    Attributes:
        status: "PASS", "FAIL", "INCONCLUSIVE" or "INVALID".
        reason: one sentence.
        policy: name of the policy.
        checks: one for each limit, and for each condition that was not met.
        uses: name of a receipt -> SHA-256 of the file it was decided from.
    """

    status: str
    reason: str
    policy: str
    checks: tuple[Check, ...]
    uses: dict[str, str]

    def __post_init__(self) -> None:
        if self.status not in EXIT_CODES:
            raise ReceiptFormatError(f"verdict status: expected one of {', '.join(EXIT_CODES)}, got {self.status!r}")
        for check in self.checks:
            if check.outcome not in _OUTCOMES:
                raise ReceiptFormatError(
                    f"verdict check {check.quantity}: expected one of {', '.join(_OUTCOMES)}, got {check.outcome!r}"
                )

    @property
    def passed(self) -> bool:
        """Whether the policy is met."""
        return self.status == "PASS"

    @property
    def exit_code(self) -> int:
        """What a program exits with."""
        return EXIT_CODES[self.status]

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict as plain values, with its schema."""
        return {"schema": SCHEMA, **asdict(self)}

    @staticmethod
    def from_dict(form: Mapping[str, Any]) -> Verdict:
        """Read a verdict back.

        Raises:
            ReceiptFormatError: a field is missing, unknown or of another type; names it.
        """
        body = dict(form)
        if body.pop("schema", None) != SCHEMA:
            raise ReceiptFormatError(f"verdict: expected schema {SCHEMA}, got {form.get('schema')!r}")
        return from_plain(Verdict, body, "verdict")


def decide(report: Report, policy: Policy, *, report_sha256: str, policy_sha256: str) -> Verdict:
    """Hold a report against a policy.

    Args:
        report, policy: what was measured, and what is asked.
        report_sha256, policy_sha256: digests of their files, in hex, which the verdict names.
    """
    limits = _all_limits(policy, audited=report.audit is not None)
    checks = [*_conditions(report, policy), *(_check(report, policy, limit) for limit in limits)]
    order = {"invalid": "INVALID", "fail": "FAIL", "inconclusive": "INCONCLUSIVE"}
    status, reason = "PASS", _passed(report, policy)
    for outcome, name in order.items():
        found = [check for check in checks if check.outcome == outcome]
        if found:
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            status, reason = name, found[0].sentence + more
            break
    return Verdict(
        status=status,
        reason=reason,
        policy=policy.name,
        checks=tuple(checks),
        uses={"report.json": report_sha256, "policy.toml": policy_sha256},
    )


def _all_limits(policy: Policy, *, audited: bool) -> list[Limit]:
    """Return the limits of every policy, which no policy loosens, and then its own."""
    first = (*_ALWAYS, *(_ALWAYS_AUDITED if audited else ()))
    always = {(limit.quantity, limit.bound, limit.limit) for limit in first}
    return [*first, *(one for one in policy.limits if (one.quantity, one.bound, one.limit) not in always)]


def _passed(report: Report, policy: Policy) -> str:
    stats = report.candidate.kl_nats
    mean = "no finite row" if stats is None else f"a mean KLD of {stats.mean:.3g} nats"
    return (
        f"all {len(policy.limits)} limits of policy {policy.name} are met over {report.candidate.positions} positions,"
        f" with {mean}"
    )


def _conditions(report: Report, policy: Policy) -> list[Check]:
    """Return a check for each condition on the evidence that is not met."""
    found = []
    if policy.tokenizer_require == "match" and report.tokenizer.status != "match":
        where = report.tokenizer.first_difference or report.tokenizer.status
        found.append(_unmet("tokenizer", "min", 1.0, 0.0, "invalid", f"the tokenizers are not the same: {where}"))
    if report.floor.kl_nats is None:
        found.append(_unmet("floor.kl_nats.mean", "max", policy.floor_max_kl_nats_mean, None, "invalid",
                            "the teacher and PyTorch have no finite row in common"))  # fmt: skip
    elif report.floor.kl_nats.mean > policy.floor_max_kl_nats_mean:
        found.append(_unmet(
            "floor.kl_nats.mean", "max", policy.floor_max_kl_nats_mean, report.floor.kl_nats.mean, "inconclusive",
            f"teacher and PyTorch differ by {report.floor.kl_nats.mean:.3g} nats in the mean, where the policy allows"
            f" {policy.floor_max_kl_nats_mean:.3g}{_arbitration(report)}",
        ))  # fmt: skip
    for name, value, least in (
        ("positions", report.candidate.positions, policy.min_positions),
        ("examples", report.candidate.examples, policy.min_examples),
    ):
        if value < least:
            found.append(_unmet(f"candidate.{name}", "min", float(least), float(value), "inconclusive",
                                f"{value} {name} are fewer than the {least} the policy asks for"))  # fmt: skip
    return found


def _arbitration(report: Report) -> str:
    """Return who of the three is off, where that was found out."""
    found = None if report.diagnosis is None else report.diagnosis.arbitration
    return "" if found is None else f"; {found.sentence}"


def _unmet(quantity: str, bound: str, limit: float, value: float | None, outcome: str, sentence: str) -> Check:
    return Check(
        quantity=quantity, bound=bound, limit=limit, value=value, floor=None, outcome=outcome, sentence=sentence
    )


def _check(report: Report, policy: Policy, limit: Limit) -> Check:
    reader = quantity_reader(limit.quantity)
    assert reader is not None, "policy.py checked it"
    value = reader(report)
    side, _, name = limit.quantity.partition(".")
    floor_reader = quantity_reader(f"floor.{name}") if side == "candidate" else None
    floor = None if floor_reader is None else floor_reader(report)
    outcome, why = _outcome(report, policy, limit, value, floor)
    word = "at most" if limit.bound == "max" else "at least"
    measured = "nothing to measure" if value is None else f"{value:.4g}"
    return Check(
        quantity=limit.quantity,
        bound=limit.bound,
        limit=limit.limit,
        value=value,
        floor=floor,
        outcome=outcome,
        sentence=f"{limit.quantity}: expected {word} {limit.limit:.4g}, got {measured}{why}{_first(report, limit)}",
    )


def _first(report: Report, limit: Limit) -> str:
    """Return the first finding of the audit that a limit counts, as a count alone says little."""
    side, _, name = limit.quantity.partition(".")
    if side != "audit" or report.audit is None:
        return ""
    audit = report.audit
    found: tuple[Any, ...] = {
        "wrong_tensors": audit.of_verdict("wrong"),
        "worse_tensors": audit.of_verdict("worse"),
        "math_keys": audit.keys_of("math"),
        "usage_keys": audit.keys_of("usage"),
        "types_below": audit.types_of("below"),
        "types_above": audit.types_of("above"),
    }[name]
    return f"; {found[0].sentence}" if found else ""


def _outcome(report: Report, policy: Policy, limit: Limit, value: float | None, floor: float | None) -> tuple[str, str]:
    if value is None:
        # Without one finite row the candidate has failed already, by its rows; here nothing can be said.
        return "inconclusive", ""
    # Distance from perfect agreement: 1 is perfect for a share of agreement and for a ratio, 0 for all else.
    ideal = 1.0 if "agreement" in limit.quantity or limit.quantity.endswith("_ratio") else 0.0
    sign = -1.0 if "agreement" in limit.quantity else 1.0
    loss, allowed = sign * (value - ideal), sign * (limit.limit - ideal)
    noise = None if floor is None else abs(floor - ideal)
    breached = value > limit.limit if limit.bound == "max" else value < limit.limit
    counted = limit.quantity.endswith(("nonfinite_rows", "constant_rows", "argmax_in_padding"))
    if noise is not None and not counted and noise > policy.floor_max_share * abs(allowed) and noise > 0:
        if breached and abs(loss - allowed) > noise:
            return "fail", ""
        return "inconclusive", f"; the floor of {floor:.3g} is too near to the limit to tell"
    error = _standard_error(report.candidate, limit.quantity)
    if error is not None and abs(value - limit.limit) < policy.standard_errors * error:
        return "inconclusive", f"; with a standard error of {error:.2g} the sample cannot tell"
    return ("fail" if breached else "pass"), ""


def _standard_error(candidate: Comparison, quantity: str) -> float | None:
    """Return the standard error of a mean over positions, examples being its clusters; None for other quantities."""
    if quantity == "candidate.top1_agreement":
        return _share_error(candidate)
    for field in ("kl_nats", "reverse_kl_nats", "expected_top_rank"):
        if quantity == f"candidate.{field}.mean":
            stats = getattr(candidate, field)
            return None if stats is None else stats.stderr
    return None


def _share_error(candidate: Comparison) -> float | None:
    """Return the standard error of the share of agreeing positions.

    It comes from the residual of each example, as positions of one text are no independent draws; below two examples
    it is the binomial one, which is too small rather than too large.
    """
    share = _clip(candidate.top1_agreement)
    parts = candidate.by_example
    total = sum(part.positions for part in parts)
    if len(parts) < 2 or total < 1:
        count = 0 if candidate.kl_nats is None else candidate.kl_nats.count
        return math.sqrt(share * (1 - share) / count) if count > 0 else None
    residuals = [part.positions / total * (_clip(part.top1_agreement) - share) for part in parts]
    return math.sqrt(math.fsum(r * r for r in residuals) * len(parts) / (len(parts) - 1))


def _clip(share: float) -> float:
    return min(max(share, 0.0), 1.0)
