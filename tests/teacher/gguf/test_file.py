import os
import struct
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from receipts.errors import GgufError
from support.gguf_tools import entry, raw_gguf, text
from teacher.gguf.file import read_gguf

LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"ab" * 32 + b"\nsize 12\n"


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
        (LFS_POINTER, f"Git LFS pointer for sha256 {'ab' * 32}"),
        (raw_gguf(version=1), "expected GGUF version 2 or 3, got 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "got a big-endian one"),
        (b"GGUF\3\0", "truncated"),
        (raw_gguf(counts=(2**60, 0)), "expected no more than its 96 bytes hold, got 1152921504606846976 tensors"),
        (raw_gguf(counts=(0, 2**60)), "expected no more than its 96 bytes hold, got 0 tensors and 1152"),
        (raw_gguf(counts=(0, 70_000), data=b"\0" * 1_000_000), "expected at most 65536, got 0 tensors and 70000 keys"),
        (raw_gguf(keys=(struct.pack("<Q", 2**62),)), "a key of 1 to 256 bytes, got 4611686018427387904"),
        (raw_gguf(keys=(key("", 4, b"\0\0\0\0"),)), "a key of 1 to 256 bytes, got 0"),
        (raw_gguf(keys=(key("a\x1b[31m", 4, b"\0\0\0\0"),)), "a key in printable UTF-8, got b'a.x1b"),
        (raw_gguf(keys=(struct.pack("<Q", 1) + b"\xff" + b"\0" * 16,)), "a key in printable UTF-8, got b'.xff'"),
        (raw_gguf(keys=(key("a", 8, struct.pack("<Q", 2**63)),)), "the value of 'a' of 9223372036854775808 bytes at"),
        (raw_gguf(keys=(key("a", 4, b"\0\0\0\0"),) * 2), "expected each key once, got 'a' twice"),
        (raw_gguf(keys=(key("a", 99, b""),)), "expected a known value type, got number 99"),
        (raw_gguf(keys=(key("a", 9, struct.pack("<IQ", 4, 2**61)),)), "a: expected 2305843009213693952 entries"),
        (raw_gguf(keys=(key("a", 9, struct.pack("<IQ", 9, 1) * 6),)), "arrays at most 4 deep"),
        (raw_gguf(keys=(key("a", 9, struct.pack("<IQ", 0, 2**22 + 1)),), data=b"\0" * 2**23), "at most 4194304"),
        (raw_gguf(keys=(alignment(0),)), "power of two from 8"),
        (raw_gguf(keys=(alignment(3),)), "power of two from 8"),
        (raw_gguf(keys=(alignment(2**31),)), "power of two from 8"),
        (raw_gguf(keys=(alignment(32, 5, "i"),)), "as an unsigned 32-bit number, got type 5"),
        (raw_gguf(keys=(key("split.count", 2, struct.pack("<H", 3)),)), "got part 1 of 3, by its split.count; merge"),
        (raw_gguf(entries=(entry("a" * 64, (4,), 0, 0),)), "a tensor's name of 1 to 63 bytes, got 64"),
        (raw_gguf(entries=(entry("a\n", (4,), 0, 0),)), "a tensor's name in printable UTF-8"),
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
        (raw_gguf(data=b"\0" * 80), r"expected 96 bytes by its header, got 144 \(48 trailing bytes\)"),
        (raw_gguf(data=b"\0" * 33), "1 trailing bytes"),
        (raw_gguf(entries=(), data=b"\0" * 32), "trailing bytes"),
    ],
)  # fmt: skip
def test_a_header_that_contradicts_itself_is_refused(refuse, data, sentence):
    refuse(data, sentence)


@pytest.mark.parametrize("cut", [1, 32, 5000])
def test_a_truncated_file_names_the_tensor_that_is_cut(refuse, tiny_gguf, cut):
    refuse(tiny_gguf.read_bytes()[:-cut], "truncated")


def test_a_part_of_a_set_is_named_by_its_file_name(refuse):
    refuse(raw_gguf(), "got part 2 of 3, by its name; merge the parts first", name="m-00002-of-00003.gguf")


def test_a_missing_file_names_an_unfinished_download(tmp_path):
    (tmp_path / "m.gguf.incomplete").write_bytes(b"")
    with pytest.raises(GgufError, match=r"no such file \(unfinished download: m.gguf.incomplete\)"):
        read_gguf(tmp_path / "m.gguf")
    with pytest.raises(GgufError, match="got a folder"):
        read_gguf(tmp_path)


def test_padding_after_the_last_tensor_may_be_there_or_not(tmp_path):
    for data in (b"\0" * 16, b"\0" * 20, b"\0" * 32):
        (tmp_path / "m.gguf").write_bytes(raw_gguf(data=data))
        found = read_gguf(tmp_path / "m.gguf")
        assert (found.data_start, found.tensors[0].start, found.tensors[0].size_bytes) == (64, 64, 16)


def test_an_alignment_of_its_own_places_the_tensors(tmp_path):
    (tmp_path / "m.gguf").write_bytes(raw_gguf(keys=(alignment(128),), data=b"\0" * 128, alignment=128))
    found = read_gguf(tmp_path / "m.gguf")
    assert (found.alignment, found.data_start, found.version) == (128, 128, 3)


def test_every_kind_of_value_is_read(tmp_path):
    kinds = {"B": 0, "b": 1, "H": 2, "h": 3, "I": 4, "i": 5, "f": 6, "?": 7, "Q": 10, "q": 11, "d": 12}
    keys = [key(f"a{kind}", kind, struct.pack(f"<{code}", 1)) for code, kind in kinds.items()]
    inner = struct.pack("<IQ", 4, 2) + struct.pack("<2I", 5, 6)
    keys.append(key("text", 8, struct.pack("<Q", 3) + "h\u00e9".encode()))
    keys.append(key("nested", 9, struct.pack("<IQ", 9, 1) + inner))
    keys.append(key("broken", 9, struct.pack("<IQ", 8, 1) + struct.pack("<Q", 2) + b"a\xff"))
    (tmp_path / "m.gguf").write_bytes(raw_gguf(keys=tuple(keys), version=2))
    found = read_gguf(tmp_path / "m.gguf").metadata
    assert [found[f"a{kind}"] for kind in kinds.values()] == [1] * len(kinds)
    assert found["text"] == "h\u00e9"
    assert found["nested"] == ((5, 6),)
    assert found["broken"] == ("a\ufffd",)


def test_what_is_no_regular_file_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(GgufError, match=r"pipe\.gguf: expected a GGUF file, got a device"):
        read_gguf(tmp_path / "pipe.gguf")


def attempt(path, data):
    """Read damaged bytes; return the memory it took."""
    path.write_bytes(bytes(data))
    tracemalloc.start()
    try:
        for tensor in read_gguf(path).tensors:
            assert tensor.start + tensor.size_bytes <= len(data)
    except GgufError as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 1000
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak


@settings(max_examples=250, deadline=None)
@given(
    changes=st.lists(st.tuples(st.integers(0, 2**32), st.integers(0, 255)), max_size=8),
    in_header=st.booleans(),
    keep=st.floats(0, 1),
    cut=st.booleans(),
)
def test_no_damage_gives_another_error_or_much_memory(tiny_gguf, tmp_path_factory, changes, in_header, keep, cut):
    data = bytearray(tiny_gguf.read_bytes())
    size = read_gguf(tiny_gguf).data_start if in_header else len(data)
    for place, value in changes:
        data[place % size] = value
    if cut:
        del data[int(size * keep) :]
    assert attempt(tmp_path_factory.getbasetemp() / "damaged.gguf", data) < 4 << 20


@settings(max_examples=250, deadline=None)
@given(data=st.data())
def test_no_number_in_a_header_gives_another_error_or_much_memory(tmp_path_factory, data):
    """Every count, length, type, axis and offset of a small header, at its limits."""
    number = st.sampled_from([0, 1, 2, 4, 8, 9, 31, 32, 33, 2**16, 2**31, 2**32 - 1])
    wide = number | st.sampled_from([2**32, 2**40, 2**60, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 1])
    draw = data.draw
    pairs = [key("general.alignment", draw(number), struct.pack("<I", draw(number)))] * draw(st.integers(0, 2))
    pairs.append(key("a", 9, struct.pack("<IQ", draw(number), draw(wide)) + draw(st.binary(max_size=40))))
    pairs.append(struct.pack("<Q", draw(wide)) + b"b" + struct.pack("<IQ", draw(number), draw(wide)))
    pairs = pairs[: draw(st.integers(0, len(pairs)))]
    axes = tuple(draw(st.lists(wide, max_size=5)))
    raw = raw_gguf(
        keys=tuple(pairs),
        entries=(entry("t", axes, draw(number), draw(wide)), entry("u", (4,), 0, draw(wide))),
        counts=draw(st.none() | st.tuples(wide, wide)),
        version=draw(st.sampled_from([2, 3, 2**24, 9])),
        data=b"\0" * draw(st.sampled_from([0, 16, 64, 160])),
    )
    assert attempt(tmp_path_factory.getbasetemp() / "numbers.gguf", raw) < 1 << 20
