import json
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from receipts.errors import SnapshotError
from teacher.snapshot.safetensors_file import read_entries

TWO = {
    "a": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]},
    "b": {"dtype": "F32", "shape": [1], "data_offsets": [12, 16]},
}


def write(path, header, data=b"\0" * 16, length=None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def test_entries_come_with_their_place_in_the_file(tmp_path):
    path = write(tmp_path / "m.safetensors", {"__metadata__": {"format": "pt"}, **TWO})
    first, second = read_entries(path)
    assert (first.name, first.shape, first.dtype, second.name) == ("a", (2, 3), "BF16", "b")
    assert second.stop == path.stat().st_size
    assert second.start - first.start == 12


def entry(**changes):
    return {**TWO, "b": {**TWO["b"], **changes}}


@pytest.mark.parametrize(
    ("header", "sentence"),
    [
        (entry(data_offsets=[8, 12]), r"b to begin at byte .* overlaps"),
        (entry(data_offsets=[13, 17]), r"leaves a hole"),
        (entry(data_offsets=[16, 12]), r"expected 4 bytes for F32 \[1\], got data_offsets 16 to 12"),
        (entry(data_offsets=[12]), r"expected two data_offsets"),
        (entry(data_offsets=[12, 16.0]), r"expected two data_offsets"),
        (entry(data_offsets=[-4, 0]), r"expected two data_offsets"),
        (entry(shape=[1000, 1000]), r"expected 4000000 bytes for F32"),
        (entry(shape=[2**62, 2**62]), r"expected \d+ bytes"),
        (entry(shape=[-1]), r"expected a shape"),
        (entry(shape=[True]), r"expected a shape"),
        (entry(dtype="F4"), r"expected a known dtype, got 'F4'"),
        (entry(dtype=["F32"]), r"expected a known dtype"),
        ({**TWO, "c": 5}, r"c: expected dtype, shape and data_offsets"),
        ({"__metadata__": {"a": 1}, **TWO}, r"__metadata__"),
        (b'{"a": 1, "a": 2}', r"each key once, got 'a' twice"),
        (b"[1]", r"expected a JSON object"),
        (b"\xff\xff", r"expected JSON"),
        (b"{" * 50_000, r"expected JSON"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(tmp_path, header, sentence):
    with pytest.raises(SnapshotError, match=sentence):
        read_entries(write(tmp_path / "m.safetensors", header))


@pytest.mark.parametrize("cut", [1, 8, 16])
def test_a_short_file_says_what_is_missing(tmp_path, cut):
    path = write(tmp_path / "m.safetensors", TWO)
    data = path.read_bytes()
    path.write_bytes(data[:-cut])
    with pytest.raises(SnapshotError, match=rf"expected {len(data)} bytes by its header, got {len(data) - cut}"):
        read_entries(path)


def test_bytes_after_the_last_tensor_are_refused(tmp_path):
    path = write(tmp_path / "m.safetensors", TWO, data=b"\0" * 24)
    with pytest.raises(SnapshotError, match="bytes left after the last tensor"):
        read_entries(path)


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 10_000])
def test_a_header_length_beyond_the_file_is_refused_without_allocating(tmp_path, length):
    with pytest.raises(SnapshotError, match=f"got a length of {length}"):
        read_entries(write(tmp_path / "m.safetensors", TWO, length=length))


def test_a_git_lfs_pointer_is_named_as_such(tmp_path):
    path = tmp_path / "m.safetensors"
    path.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'ab' * 32}\nsize 1234\n")
    with pytest.raises(SnapshotError, match=f"Git LFS pointer for sha256 {'ab' * 32}"):
        read_entries(path)


def test_an_empty_file_is_refused(tmp_path):
    (tmp_path / "m.safetensors").write_bytes(b"")
    with pytest.raises(SnapshotError, match="got a file of 0 bytes"):
        read_entries(tmp_path / "m.safetensors")


@settings(max_examples=300, deadline=None)
@given(place=st.integers(0, 400), value=st.integers(0, 255), cut=st.integers(0, 40))
def test_no_damage_gives_another_error(tmp_path_factory, place, value, cut):
    path = write(tmp_path_factory.getbasetemp() / "damaged.safetensors", TWO)
    data = bytearray(path.read_bytes())
    data[place % len(data)] = value
    path.write_bytes(bytes(data[: len(data) - cut]))
    try:
        for found in read_entries(path):
            assert found.stop <= len(data) - cut
    except SnapshotError:
        pass
