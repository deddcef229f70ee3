import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from receipts.canonical import canonical_bytes, parse_canonical
from receipts.errors import CanonicalError

# Whole numbers from 2**53 on are to be written as strings.
SCALARS = (
    st.none() | st.booleans() | st.integers(1 - 2**53, 2**53 - 1) | st.floats(allow_nan=False, allow_infinity=False)
)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.recursive(SCALARS | TEXTS, lambda v: st.lists(v) | st.dictionaries(TEXTS, v), max_leaves=12)


def test_the_example_of_the_rfc_has_the_bytes_of_the_rfc():
    # RFC 8785, section 3.2.2 to 3.2.4.
    source = r"""{"numbers": [333333333.33333329, 1E30, 4.50, 2e-3, 0.000000000000000000000000001],
      "string": "\u20ac$\u000F\u000aA'\u0042\u0022\u005c\\\"\/", "literals": [null, true, false]}"""
    expected = (
        '{"literals":[null,true,false],"numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27],'
        '"string":"€$\\u000f\\nA\'B\\"\\\\\\\\\\"/"}'
    )
    assert canonical_bytes(json.loads(source)) == expected.encode()


@given(VALUES)
def test_what_was_read_has_the_bytes_it_was_read_from(value):
    data = canonical_bytes(value)
    assert canonical_bytes(parse_canonical(data)) == data


@pytest.mark.parametrize(
    "value", [np.float32(1), np.float64(1), np.int64(1), np.bool_(True), np.zeros(2), b"x", {1}, 1j, object()],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_a_value_of_another_type_is_an_error_and_never_a_text(value):
    with pytest.raises(CanonicalError, match=r"^\$\.a\[1\]: expected a JSON value"):
        canonical_bytes({"a": [0, value]})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 2**53, "\ud800"])
def test_a_value_without_canonical_bytes_is_an_error(value):
    with pytest.raises(CanonicalError, match=r"^\$\.a: expected"):
        canonical_bytes({"a": value})


def test_keys_are_texts():
    with pytest.raises(CanonicalError, match="expected keys that are strings, got 1"):
        canonical_bytes({1: 2})


@pytest.mark.parametrize(
    "data", [b'{"a":1,"a":1}', b'{"b":1,"a":2}', b"[1, 2]", b"[1.0]", b"[NaN]", b"[1]\n", b"\xff", b"", b'["\\u0041"]',
        b"[9007199254740993]", b"[" * 100_000, b"9" * 10_000],
)  # fmt: skip
def test_other_bytes_than_the_canonical_ones_are_refused(data):
    with pytest.raises(CanonicalError, match=r"^here: "):
        parse_canonical(data, "here")
