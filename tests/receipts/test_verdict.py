import dataclasses

import pytest

from receipts.canonical import canonical_bytes, parse_canonical
from receipts.comparison import Where
from receipts.errors import ReceiptFormatError
from receipts.policy import Policy
from receipts.report import TokenizerParity
from receipts.verdict import Verdict, decide
from support.run_folder import POLICY, comparison, report, stats


def judge(policy=POLICY, **changes):
    return decide(report(**changes), Policy.parse(policy), report_sha256="0" * 64, policy_sha256="1" * 64)


def outcome(verdict, quantity):
    return next(check.outcome for check in verdict.checks if check.quantity == quantity)


def test_a_report_within_every_limit_passes():
    verdict = judge()
    assert (verdict.status, verdict.exit_code, verdict.passed) == ("PASS", 0, True)
    assert "0.001 nats" in verdict.reason
    assert verdict.uses == {"report.json": "0" * 64, "policy.toml": "1" * 64}


def test_a_clear_breach_fails_and_says_the_quantity_its_limit_and_its_value():
    verdict = judge(candidate=comparison(0.5))
    assert (verdict.status, verdict.exit_code) == ("FAIL", 4)
    assert verdict.reason == "candidate.kl_nats.mean: expected at most 0.01, got 0.5"


def test_low_agreement_fails_a_minimum():
    verdict = judge(candidate=comparison(top1_agreement=0.5, by_example=(), kl_nats=stats(0.001, count=600)))
    assert outcome(verdict, "candidate.top1_agreement") == "fail"


@pytest.mark.parametrize("mean", [0.0099, 0.0101])
def test_a_mean_within_two_standard_errors_of_its_limit_decides_nothing(mean):
    verdict = judge(candidate=comparison(mean))
    assert (verdict.status, verdict.exit_code) == ("INCONCLUSIVE", 3)
    assert "standard error" in verdict.reason


def test_rows_that_are_not_finite_fail_under_every_policy():
    verdict = judge(candidate=comparison(nonfinite_rows=1, first_nonfinite=Where(example=0, position=0)))
    assert outcome(verdict, "candidate.nonfinite_rows") == "fail"
    assert verdict.status == "FAIL"


@pytest.mark.parametrize("quantity", ["nonfinite_rows", "constant_rows"])
def test_no_policy_can_allow_broken_rows(quantity):
    allowed = f'[[limit]]\nquantity = "candidate.{quantity}"\nmax = 5\nreason = "r"\n'.encode()
    verdict = judge(POLICY + allowed, candidate=comparison(**{quantity: 3}))
    assert (verdict.status, verdict.exit_code) == ("FAIL", 4)
    named = judge(POLICY + allowed.replace(b"5", b"0"), candidate=comparison(**{quantity: 3}))
    assert [check.quantity for check in named.checks].count(f"candidate.{quantity}") == 1


def test_broken_rows_fail_in_however_small_a_sample():
    verdict = judge(candidate=comparison(positions=4, examples=1, nonfinite_rows=1))
    assert verdict.status == "FAIL"
    assert outcome(verdict, "candidate.positions") == "inconclusive"


def test_constant_rows_fail_under_every_policy():
    assert judge(candidate=comparison(constant_rows=2)).status == "FAIL"


def test_a_candidate_without_one_finite_row_fails():
    verdict = judge(candidate=comparison(nonfinite_rows=6, kl_nats=None, first_nonfinite=Where(example=0, position=0)))
    assert verdict.status == "FAIL"
    assert outcome(verdict, "candidate.kl_nats.mean") == "inconclusive"


def test_other_tokenizers_are_invalid_before_anything_else():
    tokenizer = TokenizerParity(status="differs", texts=1, tokens=1, first_difference="text 'a': expected [1], got [2]")
    verdict = judge(tokenizer=tokenizer, candidate=comparison(0.5))
    assert (verdict.status, verdict.exit_code) == ("INVALID", 2)
    assert "text 'a'" in verdict.reason
    allowed = POLICY.replace(b'require = "match"', b'require = "any"')
    assert judge(allowed, tokenizer=tokenizer).status == "PASS"


def test_a_teacher_without_finite_rows_is_invalid():
    assert judge(floor=comparison(kl_nats=None)).status == "INVALID"


def test_a_high_floor_supports_no_pass():
    verdict = judge(floor=comparison(1e-5))
    assert verdict.status == "INCONCLUSIVE"
    assert outcome(verdict, "floor.kl_nats.mean") == "inconclusive"


def test_a_difference_that_the_floor_explains_is_no_finding():
    floor = comparison(0.008)
    assert outcome(judge(floor=floor, candidate=comparison(0.015, kl_nats=stats(0.015, stderr=0.0))),
                   "candidate.kl_nats.mean") == "inconclusive"  # fmt: skip
    assert outcome(judge(floor=floor, candidate=comparison(0.5)), "candidate.kl_nats.mean") == "fail"


def test_too_small_a_sample_decides_nothing():
    verdict = judge(candidate=comparison(positions=4))
    assert (verdict.status, verdict.reason) == ("INCONCLUSIVE", "4 positions are fewer than the 5 the policy asks for")


def test_agreement_near_its_limit_is_judged_by_the_spread_of_examples():
    buckets = tuple(
        dataclasses.replace(comparison().by_example[0], label=str(i), positions=100, top1_agreement=share)
        for i, share in enumerate((0.6, 1.0, 0.7, 0.94))
    )
    verdict = judge(candidate=comparison(top1_agreement=0.81, by_example=buckets))
    assert outcome(verdict, "candidate.top1_agreement") == "inconclusive"
    even = tuple(dataclasses.replace(bucket, top1_agreement=0.81) for bucket in buckets)
    assert judge(candidate=comparison(top1_agreement=0.81, by_example=even)).status == "PASS"


def test_a_ratio_is_measured_from_one():
    limit = b'[[limit]]\nquantity = "candidate.perplexity_ratio"\nmax = 1.005\nreason = "r"\n'
    verdict = judge(POLICY + limit, floor=comparison(1e-11, observed_nll_actual=2.5))
    assert outcome(verdict, "candidate.perplexity_ratio") == "fail"
    better = comparison(observed_nll_actual=2.4)
    verdict = judge(POLICY + limit, candidate=better, floor=comparison(1e-11, observed_nll_actual=2.5))
    assert verdict.status == "PASS"


def test_a_verdict_survives_its_dictionary_form():
    verdict = judge(candidate=comparison(0.5))
    assert Verdict.from_dict(verdict.to_dict()) == verdict
    with pytest.raises(ReceiptFormatError, match=r"PASS, FAIL"):
        Verdict.from_dict({**verdict.to_dict(), "status": "FINE"})


def test_agreement_without_examples_to_compare_has_the_binomial_error():
    def near(count):
        one = comparison(top1_agreement=0.83, by_example=(), kl_nats=stats(0.001, count=count))
        return outcome(judge(candidate=one), "candidate.top1_agreement")

    # sqrt(0.83 * 0.17 / count) is 0.038 and then 0.012; the limit lies 0.03 away.
    assert (near(100), near(1000)) == ("inconclusive", "pass")


@pytest.mark.parametrize("nats", [40.0, 1e4])
def test_a_candidate_that_is_lost_has_a_verdict_that_can_be_written(nats):
    limit = b'[[limit]]\nquantity = "candidate.perplexity_ratio"\nmax = 1.005\nreason = "r"\n'
    verdict = judge(POLICY + limit, candidate=comparison(observed_nll_actual=nats + 2.5))
    assert verdict.status == "FAIL"
    data = canonical_bytes(verdict.to_dict())
    assert Verdict.from_dict(parse_canonical(data)) == verdict


def test_shares_that_no_share_can_be_do_not_stop_the_decision():
    odd = dataclasses.replace(comparison().by_example[0], top1_agreement=1e300)
    for parts in ((), (odd, odd)):
        assert judge(candidate=comparison(top1_agreement=-1e300, by_example=parts)).status == "FAIL"
