from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from receipts.errors import PlanError
from teacher.plans.call_shape import CallShape

SHAPES = ("prefill", "chunks:1", "chunks:63", "decode", "decode:8", "mixed", "mixed:5")


@pytest.mark.parametrize(
    ("shape", "length", "calls"),
    [
        ("prefill", 7, (7,)),
        ("chunks:3", 7, (3, 3, 1)),
        ("chunks:3", 6, (3, 3)),
        ("chunks:9", 2, (2,)),
        ("decode", 3, (1, 1, 1)),
        ("decode:4", 6, (4, 1, 1)),
        ("decode:4", 2, (2,)),
        ("mixed:2", 9, (7, 1, 1)),
        ("mixed:24", 9, (6, 1, 1, 1)),
        ("mixed", 2, (2,)),
    ],
)
def test_a_shape_cuts_as_it_says(shape: str, length: int, calls: tuple[int, ...]) -> None:
    assert CallShape.parse(shape).cut(length) == calls


@given(shape=st.sampled_from(SHAPES), length=st.integers(1, 4096))
def test_calls_sum_to_the_length_and_none_is_empty(shape: str, length: int) -> None:
    calls = CallShape.parse(shape).cut(length)
    assert sum(calls) == length
    assert min(calls) >= 1


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_is_written_as_it_is_read(shape: str) -> None:
    assert CallShape.parse(str(CallShape.parse(shape))) == CallShape.parse(shape)


@pytest.mark.parametrize("text", ["", "chunks", "chunks:", "chunks:0", "chunks:-1", "chunks:x", "decode:0", "mixed:1.5",
                                  "prefill:3", "whole", "chunks:1:2", "chunks:99999999999"])  # fmt: skip
def test_any_other_text_is_refused_with_the_forms_that_work(text: str) -> None:
    with pytest.raises(PlanError, match=r"call shape .*expected mixed, mixed:N, prefill, chunks:N, decode or decode:P"):
        CallShape.parse(text)
