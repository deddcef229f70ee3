"""Which place is blamed: bands, the first of them, what cannot be judged any more, and state carried between calls."""

from dataclasses import replace

import pytest

from receipts.diagnosis import EndError, LayerError, OperationError
from teacher.diagnose.bands import (
    ENGINE_BAND_FLOAT,
    ENGINE_BAND_QUANTIZED,
    carried_state,
    engine_band,
    find_culprits,
    weights_band,
)

ENDS = tuple(
    EndError(place=place, weights=0.005, reachable=0.005, engine=1e-7, reference=1e-7)
    for place in ("embedding", "final norm")
)
BANDS = {"engine": 0.1, "reference": 1e-4}


def layer(number, **changes):
    values = {
        "reference": 1e-6, "weights": 0.02, "candidate": 0.03, "alone_reference": 1e-6, "alone_weights": 0.01,
        "alone_reachable": 0.01, "alone_engine": 0.02, "alone_engine_first_calls": 0.02,
        "alone_engine_later_calls": 0.02,
    }  # fmt: skip
    return LayerError(layer=number, kind="linear_attention", **{**values, **changes})


def operation(number, name, **changes):
    values = {"weights": 0.01, "reachable": 0.01, "engine": 0.01, "reference": None}
    return OperationError(layer=number, operation=name, **{**values, **changes})


def places(*layers, ends=ENDS, operations=(), **bands):
    found = find_culprits(ends, layers, operations, **{**BANDS, **bands})
    return [(one.part, one.layer, one.operation) for one in found]


def test_nothing_is_blamed_within_the_bands():
    assert places(layer(0), layer(1, alone_engine=0.1, alone_weights=weights_band(0.01))) == []


def test_each_part_is_judged_by_its_own_band_and_in_order_of_the_model():
    layers = layer(0, alone_reference=2e-4), layer(1, alone_engine=0.2), layer(2, alone_weights=0.05)
    assert places(*layers) == [("reference", 0, None), ("engine", 1, None), ("weights", 2, None)]
    assert places(*layers, engine=None, reference=None) == [("weights", 2, None)]


def test_the_first_operation_out_of_its_band_is_named():
    rows = (operation(1, "input norm"), operation(1, "decay", weights=1.5), operation(1, "delta rule", weights=3.0))
    assert places(layer(1, alone_weights=0.5), operations=rows) == [("weights", 1, "decay")]


def test_an_operation_whose_result_is_not_finite_is_the_first_one():
    rows = (operation(1, "convolution"), operation(1, "delta rule", weights=None))
    (found,) = find_culprits((), (layer(1, alone_weights=None),), rows, **BANDS)
    assert (found.operation, found.error) == ("delta rule", None)
    assert "values that are not finite" in found.sentence and "first in its delta rule" in found.sentence


def test_what_lies_behind_values_that_are_not_finite_is_not_judged():
    layers = layer(0), layer(1, alone_engine=None), layer(2, alone_engine=None), layer(3, alone_weights=0.5)
    assert places(*layers) == [("engine", 1, None), ("weights", 3, None)]


def test_an_engine_is_not_blamed_for_weights_that_lead_to_infinity():
    broken = layer(1, alone_weights=None, alone_engine=None)
    ends = (ENDS[0], replace(ENDS[1], engine=None, weights=None))
    assert places(layer(0), broken, layer(2, alone_engine=None), ends=ends) == [("weights", 1, None)]


@pytest.mark.parametrize("place", ["embedding", "final norm"])
def test_ends_are_places_too(place):
    ends = tuple(replace(end, weights=0.5) if end.place == place else end for end in ENDS)
    assert places(layer(0), ends=ends) == [("weights", None, place)]


def test_one_layer_alone_has_no_ends():
    assert places(layer(5, alone_engine=0.5), ends=()) == [("engine", 5, None)]


def test_weights_of_an_exact_type_have_room_for_two_libraries_of_exp_alone():
    assert weights_band(None) == weights_band(0.0) == 1e-4


def test_an_engine_of_float_types_has_a_narrower_band():
    assert engine_band({"F32", "BF16"}) == ENGINE_BAND_FLOAT
    assert engine_band({"F32", "Q8_0"}) == ENGINE_BAND_QUANTIZED


def test_state_is_blamed_when_later_calls_alone_are_wrong():
    wrong = {"alone_engine": 0.3, "alone_engine_later_calls": 0.5}
    said = carried_state((layer(0), layer(1, **wrong), layer(2, **wrong)), 0.1)
    assert "linear attention layers 1, 2: what it carries from call to call is wrong" in said
    assert carried_state((layer(0),), 0.1) is None
    first = layer(3, alone_engine=0.3, alone_engine_first_calls=0.3, alone_engine_later_calls=0.3)
    assert carried_state((layer(1, **wrong), first), 0.1) is None  # the engine errs without any state, too
