"""Messages between processes: what goes in comes out, and what is no message is refused."""

import io
import json
import math
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import receipts.errors
from receipts.errors import EngineFailedError, HarnessError, NonFiniteError
from support.faulty_sources import frame
from teacher.process.frames import (
    PAYLOAD_BOUND,
    decode_error,
    encode_error,
    encode_json,
    read_frame,
    rows_per_frame,
    write_frame,
)

counts = st.integers(0, 2**40)
headers = st.one_of(
    st.fixed_dictionaries(
        {"type": st.just("block"), "example": counts, "call": counts, "position": counts, "rows": counts,
         "width": counts, "more": st.booleans()}
    ),
    st.fixed_dictionaries({"type": st.just("progress"), "done": counts, "total": counts, "unit": st.text()}),
    st.fixed_dictionaries({"type": st.sampled_from(["describe", "answer", "done"])}),
    st.fixed_dictionaries({"type": st.just("error"), "name": st.text()}),
)  # fmt: skip


class Trickle(io.RawIOBase):
    """A pipe that gives what it has in pieces of a few bytes."""

    def __init__(self, data, size):
        self.data, self.size = memoryview(data), size

    def readable(self):
        return True

    def readinto(self, buffer):
        piece = self.data[: min(self.size, len(buffer))]
        buffer[: len(piece)] = piece
        self.data = self.data[len(piece) :]
        return len(piece)


@given(messages=st.lists(st.tuples(headers, st.binary(max_size=200)), max_size=5), size=st.integers(1, 30))
def test_messages_come_out_as_they_went_in_however_the_pipe_cuts_them(messages, size):
    pipe = io.BytesIO()
    for header, payload in messages:
        write_frame(pipe, header, payload)
    source = Trickle(pipe.getvalue(), size)
    for header, payload in messages:
        assert read_frame(source) == (header, payload)
    assert read_frame(source) is None


def test_rows_keep_every_bit():
    rows = np.array([[0.0, -0.0, np.inf], [np.nan, 1e-45, 3.5]], np.float32)[:, ::-1]  # not contiguous
    pipe = io.BytesIO()
    header = {"type": "block", "example": 0, "call": 0, "position": 0, "rows": 2, "width": 3, "more": False}
    write_frame(pipe, header, rows)
    pipe.seek(0)
    _, payload = read_frame(pipe)
    assert bytes(payload) == rows.astype("<f4").tobytes()


@given(cut=st.integers(0, 40))
def test_a_stream_that_ends_inside_a_message_has_ended(cut):
    whole = frame({"type": "done"}, b"{}" * 20)
    assert read_frame(io.BytesIO(whole[: min(cut, len(whole) - 1)])) is None


@given(data=st.binary(max_size=120))
def test_any_bytes_are_a_message_or_the_end_or_our_error(data):
    try:
        found = read_frame(io.BytesIO(data))
    except EngineFailedError:
        return
    assert found is None or found[0]["type"]


@pytest.mark.parametrize("lengths", [(2**32 - 1, 0), (2, 2**64 - 1), ((1 << 20) + 1, 0), (2, PAYLOAD_BOUND + 1)])
def test_lengths_beyond_the_bound_are_refused_before_anything_is_read(lengths):
    class Pipe(io.BytesIO):
        def readinto(self, buffer):
            assert len(buffer) == 12, "only the lengths may be read"
            return super().readinto(buffer)

    with pytest.raises(EngineFailedError, match=f"got {lengths[0]} and {lengths[1]}"):
        read_frame(Pipe(struct.pack("<IQ", *lengths)))


@pytest.mark.parametrize(
    "head",
    [
        b"", b"[1]", b'"block"', b"\xff\xfe", b"[" * 100_000,
        {}, {"type": None}, {"type": ["block"]}, {"type": "gossip"},
        {"type": "error"}, {"type": "progress", "done": 1, "total": "2", "unit": "x"},
        {"type": "progress", "done": True, "total": 2, "unit": "x"},
        {"type": "block", "example": 0, "call": 0, "position": 0, "rows": -1, "width": -1, "more": False},
        {"type": "block", "example": 0, "call": 0, "position": 0.0, "rows": 1, "width": 1, "more": False},
        {"type": "block", "example": 0, "call": 0, "position": 0, "rows": 1, "width": 1, "more": 0},
    ],
)  # fmt: skip
def test_a_header_of_another_form_is_refused(head):
    with pytest.raises(EngineFailedError, match="worker message"):
        read_frame(io.BytesIO(frame(head)))


@pytest.mark.parametrize("value", [math.nan, math.inf, {1, 2}, b"bytes", np.float32(1), Path("x")])
def test_a_value_without_a_json_form_is_an_error_and_never_a_text(value):
    with pytest.raises((TypeError, ValueError)):
        encode_json({"value": value})


def carried(error):
    header, payload = encode_error(error)
    pipe = io.BytesIO()
    write_frame(pipe, header, payload)
    pipe.seek(0)
    return decode_error(*read_frame(pipe))


@pytest.mark.parametrize(
    "name", [n for n, c in vars(receipts.errors).items() if isinstance(c, type) and issubclass(c, HarnessError)]
)
def test_every_error_of_ours_arrives_as_its_own_class_with_its_facts(name):
    kind = getattr(receipts.errors, name)
    found = carried(kind("layer 3: expected é, got \udc80", layer=3, names=("a", "b"), path=Path("x"), worst=math.nan))
    assert type(found) is kind
    assert str(found) == "layer 3: expected é, got \udc80"
    assert found.facts == {"layer": 3, "names": ["a", "b"], "path": "x", "worst": "nan"}


def test_an_error_of_others_arrives_as_a_failed_engine_with_its_name():
    found = carried(KeyError("blk.0"))
    assert type(found) is EngineFailedError
    assert str(found) == "KeyError: 'blk.0'"


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("os", {"sentence": "x", "facts": {}}),
        ("annotations", {"sentence": "x"}),
        ("NonFiniteError", {"sentence": "x", "facts": [1]}),
        ("NonFiniteError", {"sentence": "x", "facts": {"self": 1, "sentence": 2}}),
        ("NonFiniteError", {"facts": {}}),
        ("NonFiniteError", [1]),
    ],
)
def test_an_error_message_of_another_form_is_still_an_error_of_ours(name, body):
    found = decode_error({"type": "error", "name": name}, json.dumps(body).encode())
    assert isinstance(found, EngineFailedError | NonFiniteError)


def test_a_message_holds_at_least_one_row():
    assert rows_per_frame(PAYLOAD_BOUND) == 1
    assert rows_per_frame(248_320) * 248_320 * 4 <= PAYLOAD_BOUND
