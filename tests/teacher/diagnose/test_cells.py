"""Contrasts of the four cells: what is claimed, what is not, and the interaction."""

from support.run_folder import comparison, stats
from teacher.diagnose.cells import contrasts


def of(floor=1e-11, weights=0.01, engine=0.02, conversion=None, total=0.03, **others):
    sides = [comparison(value) for value in (floor, weights, engine)]
    last = None if conversion is None else comparison(conversion)
    return {one.name: one for one in contrasts(*sides, last, comparison(total), **others)}


def test_parts_are_named_with_their_amounts():
    found = of(conversion=0.002)
    assert list(found) == ["floor", "weights", "engine", "conversion", "total", "interaction"]
    assert found["weights"].sentence.startswith("the file's weights lose 0.01 nats")
    assert found["engine"].sentence.startswith("the engine adds 0.02 nats")
    assert found["weights"].above_floor and not found["floor"].above_floor
    assert "conversion" not in of()


def test_nothing_is_claimed_below_the_floor():
    found = of(floor=0.05)
    assert not any(one.above_floor for one in found.values())
    assert "nothing is claimed" in found["weights"].sentence


def test_nothing_is_claimed_within_two_standard_errors_of_the_floor():
    error = stats(0.01).stderr
    assert error > 0
    assert not of(floor=0.01 - error)["weights"].above_floor
    assert of(floor=0.01 - 3 * error)["weights"].above_floor


def test_what_the_parts_leave_over_is_shown_with_its_sign():
    found = of(total=0.005)["interaction"]
    assert abs(found.kl_nats_mean - (0.005 - 0.01 - 0.02)) < 1e-15
    assert found.above_floor and found.sentence.startswith("total less weights less engine leaves -0.025 nats")


def test_a_side_without_a_finite_row_has_no_amount_and_no_interaction():
    broken = comparison(kl_nats=None)
    found = {one.name: one for one in contrasts(comparison(1e-11), broken, comparison(0.1), None, comparison(0.1))}
    assert found["weights"].kl_nats_mean is None and not found["weights"].above_floor
    assert "interaction" not in found
