import struct
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gguf_tools import entry, raw_gguf, text

from receipts.errors import GgufError
from teacher.gguf_file import read_gguf


def key(name, kind, payload):
    return text(name) + struct.pack("<I", kind) + payload


def alignment(value, kind=4, code="I"):
    return key("general.alignment", kind, struct.pack(f"<{code}", value))


@pytest.fixture
def refuse(tmp_path):
    def check(data, sentence, name="m.gguf"):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(GgufError, match=sentence) as caught:
            read_gguf(tmp_path / name)
        assert name in str(caught.value)

    return check


def test_a_whole_file_is_read(tiny_gguf):
    found = read_gguf(tiny_gguf)
    assert found.metadata["general.architecture"] == "qwen35"
    assert found.size_bytes == tiny_gguf.stat().st_size
    by_name = {tensor.name: tensor for tensor in found.tensors}
    assert by_name["blk.0.ffn_up.weight"].shape == (160, 96)
    assert by_name["blk.0.ffn_up.weight"].type == "F32"


def test_places_and_bytes_are_those_of_the_gguf_package(tiny_gguf):
    import gguf

    for mine, theirs in zip(read_gguf(tiny_gguf).tensors, gguf.GGUFReader(tiny_gguf).tensors, strict=True):
        assert (mine.name, mine.start, mine.size_bytes) == (theirs.name, theirs.data_offset, theirs.n_bytes)
        assert mine.shape == tuple(reversed(theirs.shape.tolist()))


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "got an empty file"),
        (b"PK\3\4zip", "got a file that begins with b'PK"),
        (struct.pack("<Q", 2) + b"{}", "got a safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"ab" * 32, f"Git LFS pointer for sha256 {'ab' * 32}"),
        (raw_gguf(version=1), "expected GGUF version 2 or 3, got 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "got a big-endian one"),
        (b"GGUF\3\0", "truncated"),
        (raw_gguf(counts=(2**60, 0)), "are more than its"),
        (raw_gguf(counts=(0, 2**60)), "are more than its"),
        (raw_gguf(keys=(struct.pack("<Q", 2**62),)), "truncated"),
        (raw_gguf(keys=(key("a", 4, b"\0\0\0\0"),) * 2), "expected each key once, got 'a' twice"),
        (raw_gguf(keys=(key("a", 99, b""),)), "expected a known value type, got number 99"),
        (raw_gguf(keys=(key("a", 9, struct.pack("<IQ", 4, 2**61)),)), "expected an array within the file"),
        (raw_gguf(keys=(key("a", 9, struct.pack("<IQ", 9, 1) * 6),)), "arrays at most 4 deep"),
        (raw_gguf(keys=(alignment(0),)), "power of two from 8"),
        (raw_gguf(keys=(alignment(3),)), "power of two from 8"),
        (raw_gguf(keys=(alignment(2**31),)), "power of two from 8"),
        (raw_gguf(keys=(alignment(32, 5, "i"),)), "as an unsigned 32-bit number, got type 5"),
        (raw_gguf(keys=(key("split.count", 2, struct.pack("<H", 3)),)), "a part of a set of 3"),
        (raw_gguf(entries=(entry("a", (), 0, 0),)), "expected 1 to 4 axes, got 0"),
        (raw_gguf(entries=(entry("a", (1,) * 5, 0, 0),)), "expected 1 to 4 axes, got 5"),
        (raw_gguf(entries=(entry("a", (0,), 0, 0),)), "a shape of 1 to 2"),
        (raw_gguf(entries=(entry("a", (2**40, 2**40), 0, 0),)), "a shape of 1 to 2"),
        (raw_gguf(entries=(entry("a", (33,), 8, 0),)), "whole Q8_0 blocks of 32, got 33"),
        (raw_gguf(entries=(entry("a", (4,), 77, 0),)), "a known element type, got number 77"),
        (raw_gguf(entries=(entry("a", (4,), 0, 1),)), "an offset that is a multiple of 32, got 1"),
        (raw_gguf(entries=(entry("a", (4,), 0, 2**40),)), "truncated"),
        (raw_gguf(entries=(entry("a", (4,), 0, 2**64 - 64),)), "truncated"),
        (raw_gguf(entries=(entry("a", (4,), 0, 0),) * 2), "expected each tensor once, got a twice"),
        (raw_gguf(entries=(entry("a", (4,), 0, 0), entry("b", (4,), 0, 0))), "inside another tensor"),
        (raw_gguf(entries=(entry("a", (4,), 0, 64),), data=b"\0" * 96), "expected an offset of 0, got 64"),
        (raw_gguf(data=b"\0" * 80), "64 bytes after it|bytes after it"),
    ],
)  # fmt: skip
def test_a_header_that_contradicts_itself_is_refused(refuse, data, sentence):
    refuse(data, sentence)


@pytest.mark.parametrize("cut", [1, 32, 5000])
def test_a_truncated_file_names_the_tensor_that_is_cut(refuse, tiny_gguf, cut):
    refuse(tiny_gguf.read_bytes()[:-cut], "truncated")


def test_a_part_of_a_set_is_named_by_its_file_name(refuse):
    refuse(raw_gguf(), "a part of a set of 3; merge the parts first", name="m-00002-of-00003.gguf")


def test_a_missing_file_names_an_unfinished_download(tmp_path):
    (tmp_path / "m.gguf.incomplete").write_bytes(b"")
    with pytest.raises(GgufError, match=r"no such file \(unfinished download: m.gguf.incomplete\)"):
        read_gguf(tmp_path / "m.gguf")
    with pytest.raises(GgufError, match="got a folder"):
        read_gguf(tmp_path)


@settings(max_examples=250, deadline=None)
@given(place=st.integers(0, 3000), value=st.integers(0, 255), cut=st.integers(0, 200))
def test_no_damage_gives_another_error_or_much_memory(tiny_gguf, tmp_path_factory, place, value, cut):
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    data = bytearray(tiny_gguf.read_bytes())
    data[place] = value
    path.write_bytes(bytes(data[: len(data) - cut]))
    tracemalloc.start()
    try:
        for tensor in read_gguf(path).tensors:
            assert tensor.start + tensor.size_bytes <= len(data) - cut
    except GgufError:
        pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20
