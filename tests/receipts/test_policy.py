from pathlib import Path

import pytest

from receipts.digest import sha256_bytes
from receipts.errors import PolicyError
from receipts.policy import Policy, quantity_reader
from support.run_folder import POLICY, comparison, report

SHIPPED = sorted((Path(__file__).parents[2] / "ci" / "policies").glob("*.toml"))


def test_a_policy_keeps_the_digest_of_its_bytes():
    assert Policy.parse(POLICY).sha256 == sha256_bytes(POLICY).hex


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_policy_can_be_used(path):
    policy = Policy.load(path)
    assert policy.name == path.stem
    assert all(limit.reason for limit in policy.limits)


def test_there_are_policies_for_the_types_people_ship():
    assert {path.stem for path in SHIPPED} >= {"q8_0", "q6_k", "q4_k_m"}


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (b'name = "small"\n', b"", r"expected the key 'name', got none"),
        (b'name = "small"', b'name = ""', r"name: expected a text"),
        (b"/v1", b"/v2", r"expected schema source-teacher/policy/v1"),
        (b"max_share", b"max_shares", r"floor: expected keys among .*, got 'max_shares'"),
        (b"max_share = 0.1", b"max_share = nan", r"floor max_share: expected a number"),
        (b"max_share = 0.1", b"max_share = true", r"floor max_share: expected a number"),
        (b"min_positions = 5", b"min_positions = 0", r"min_positions: expected a whole number of at least 1"),
        (b'"match"', b'"maybe"', r"expected match or any"),
        (b"kl_nats.mean", b"kl_nats.average", r"expected a quantity of the report, got 'candidate.kl_nats.average'"),
        (b"max = 0.01", b"max = 0.01\nmin = 0.0", r"expected one of max and min"),
        (b"max = 0.01\n", b"", r"expected one of max and min, got neither"),
        (b"max = 0.01", b"max = inf", r"max: expected a number"),
        (b'max = 0.01\nreason = "a test"', b"max = 0.01", r"limit 1: expected the key 'reason'"),
        (b"[[limit]]", b"[limits]", r"expected keys among|Cannot"),
        (b"schema", b"schema = 1\nschema", r"expected TOML"),
        (b"schema", b"\xff", r"expected TOML"),
        (b"max = 0.01", b"max = 1e17", r"max: expected a number"),
        (b"max = 0.01", b"max = -0.01", r"max: expected a number of at least 0"),
        (b"max = 0.01", b"max = 1" + b"0" * 400, r"max: expected a number"),
        (b"max = 0.01", b"max = 1" + b"0" * 5000, r"expected TOML"),
        (b"min_positions = 5", b"min_positions = 1" + b"0" * 400, r"min_positions: expected a whole number"),
        (b"max = 0.01", b"max = " + b"[" * 5000 + b"]" * 5000, r"expected TOML"),
    ],
)
def test_a_bad_policy_is_one_sentence(old, new, sentence):
    assert old in POLICY
    with pytest.raises(PolicyError, match=sentence):
        Policy.parse(POLICY.replace(old, new, 1))


def test_a_bound_stands_once():
    twice = POLICY + POLICY[POLICY.index(b"[[limit]]") :]
    with pytest.raises(PolicyError, match="a second max of candidate"):
        Policy.parse(twice)


@pytest.mark.parametrize(
    ("quantity", "value"),
    [
        ("candidate.kl_nats.p99", 0.004),
        ("floor.kl_nats.mean", 1e-11),
        ("spread.kl_nats.mean", 3e-4),
        ("spread.kl_nats.max_mean", 3e-4),
        ("candidate.topk_agreement.10", 0.98),
        ("candidate.topk_agreement.7", None),
        ("candidate.padded.actual_argmax_in_padding", 0.0),
        ("candidate.padded.expected_argmax_in_padding", 0.0),
        ("candidate.perplexity_ratio", 1.010050167084168),
    ],
)
def test_quantities_are_read_from_the_report(quantity, value):
    spread = (comparison(1e-4), comparison(3e-4))
    reader = quantity_reader(quantity)
    assert reader is not None
    assert reader(report(spread=spread)) == value


def test_a_file_that_is_not_there_is_one_sentence(tmp_path):
    with pytest.raises(PolicyError, match="expected a policy file"):
        Policy.load(tmp_path / "none.toml")


def test_absent_padding_counts_as_none():
    reader = quantity_reader("candidate.padded.expected_argmax_in_padding")
    assert reader is not None
    assert reader(report(candidate=comparison(padded=None))) == 0.0


@pytest.mark.parametrize("nll", [1e4, -1e4, 1e308])
def test_a_perplexity_ratio_stays_a_finite_number(nll):
    reader = quantity_reader("candidate.perplexity_ratio")
    assert reader is not None
    value = reader(report(candidate=comparison(observed_nll_actual=nll)))
    assert value is not None and 0 < value < float("inf")
