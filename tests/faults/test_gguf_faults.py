"""Faults that people reported in public, as far as the header of a GGUF shows them; each is one small file here."""

import dataclasses
import struct
import tracemalloc

import gguf
import numpy as np
import pytest

from receipts.errors import GgufError
from support.gguf_tools import edit_gguf, entry, raw_gguf, tensor_of, text
from teacher.gguf.file import read_gguf
from teacher.gguf.match import verify_matches
from teacher.snapshot.config import read_config

SMALL = 4 << 20
OID = "4d7a" * 16
NEXTN = {"blk.4.nextn.eh_proj.weight": np.ones((4, 4)), "blk.4.attn_q.weight": np.ones((4, 4))}


@pytest.fixture(scope="module")
def config(tiny):
    return read_config(tiny / "config.json")


@pytest.fixture
def sentence(config):
    """Read a file and hold it against the tiny config; return the one sentence of the refusal."""

    def read(path):
        tracemalloc.start()
        try:
            with pytest.raises(GgufError) as caught:
                verify_matches(read_gguf(path), config)
            assert tracemalloc.get_traced_memory()[1] < SMALL
        finally:
            tracemalloc.stop()
        assert path.name in str(caught.value)
        return str(caught.value)

    return read


def write(path, data):
    path.write_bytes(data)
    return path


def tokens_of(path):
    return list(read_gguf(path).metadata["tokenizer.ggml.tokens"])


def with_offset(path, name, change):
    """The bytes of a GGUF in which one tensor's offset was changed."""
    data = bytearray(path.read_bytes())
    at = data.rindex(text(name), 0, read_gguf(path).data_start) + len(text(name))
    (rank,) = struct.unpack_from("<I", data, at)
    place = at + 4 + 8 * rank + 4
    (offset,) = struct.unpack_from("<Q", data, place)
    struct.pack_into("<Q", data, place, change(offset) % 2**64)
    return bytes(data)


def alignment(value, kind=4):
    return text("general.alignment") + struct.pack("<II", kind, value)


# Cut and joined files.


@pytest.mark.parametrize("cut", [1, 4096, "tensor", "header"])
def test_a_file_shorter_than_its_header_says_is_refused_with_both_sizes(tiny_gguf, tmp_path, sentence, cut):
    found = read_gguf(tiny_gguf)
    last = max(found.tensors, key=lambda tensor: tensor.start)
    data = tiny_gguf.read_bytes()
    kept = {"tensor": last.start, "header": found.data_start // 2}.get(cut) or last.start + last.size_bytes - cut
    said = sentence(write(tmp_path / "m.gguf", data[:kept]))
    assert f"got a file of {kept} bytes (truncated)" in said
    if cut != "header":
        assert f"{last.name}: expected its bytes to end at {last.start + last.size_bytes}" in said


@pytest.mark.parametrize("extra", [8, 32, 4096])
def test_bytes_after_the_last_tensor_are_refused(tiny_gguf, tmp_path, sentence, extra):
    size = tiny_gguf.stat().st_size
    said = sentence(write(tmp_path / "m.gguf", tiny_gguf.read_bytes() + b"\0" * extra))
    assert f"expected {size} bytes by its header, got {size + extra} ({extra} trailing bytes)" in said


def test_a_download_resumed_by_appending_the_whole_is_refused(tiny_gguf, tmp_path, sentence):
    data, begun = tiny_gguf.read_bytes(), read_gguf(tiny_gguf).data_start + 1000
    assert f"({begun} trailing bytes)" in sentence(write(tmp_path / "m.gguf", data[:begun] + data))


@pytest.mark.parametrize("end", [".incomplete", ".aria2", ".part"])
def test_an_unfinished_download_is_named(tiny_gguf, tmp_path, sentence, end):
    # A downloader may have given the file its full size, zeros in it, so what it holds is no proof.
    data = tiny_gguf.read_bytes()
    assert "got an unfinished download by its name" in sentence(write(tmp_path / f"m.gguf{end}", data))
    assert f"(unfinished download: m.gguf{end})" in sentence(tmp_path / "m.gguf")
    assert f"got m.gguf{end} beside it" in sentence(write(tmp_path / "m.gguf", data))


def test_a_git_lfs_pointer_is_named_with_its_oid(tmp_path, sentence):
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{OID}\nsize 5316480\n".encode()
    assert 120 < len(pointer) < 140
    assert f"got a Git LFS pointer for sha256 {OID}" in sentence(write(tmp_path / "m.gguf", pointer))


def test_a_link_to_nothing_is_named_and_a_link_to_a_file_is_read(tiny_gguf, tmp_path, sentence, config):
    (tmp_path / "m.gguf").symlink_to(tmp_path / "blobs" / OID)
    assert "got a link to nothing" in sentence(tmp_path / "m.gguf")
    (tmp_path / "F32.gguf").symlink_to(tiny_gguf)
    linked = read_gguf(tmp_path / "F32.gguf")
    assert linked.name == "F32.gguf"
    assert verify_matches(linked, config) == ()


@pytest.mark.parametrize("name", ["m-00001-of-00003.gguf", "m-00002-of-00003.gguf"])
def test_a_part_of_a_split_set_is_refused_and_named(tiny_gguf, tmp_path, sentence, name):
    part = int(name[2:7])
    assert f"got part {part} of 3, by its name; merge" in sentence(write(tmp_path / name, tiny_gguf.read_bytes()))


def test_a_split_set_is_known_by_its_key_too(tiny_gguf, tmp_path, sentence):
    path = edit_gguf(tiny_gguf, tmp_path / "m.gguf", metadata={"split.count": 3, "split.no": 1})
    assert "got part 2 of 3, by its split.count" in sentence(path)


def test_an_empty_and_an_absent_part_are_named(tmp_path, sentence):
    assert "got an empty file" in sentence(write(tmp_path / "m-00002-of-00003.gguf", b""))
    assert "got no such file" in sentence(tmp_path / "m-00003-of-00003.gguf")


def test_a_safetensors_file_under_a_ggufs_name_is_named(tiny, tmp_path, sentence):
    data = (tiny / "model.safetensors").read_bytes()
    assert "got a safetensors file" in sentence(write(tmp_path / "m.gguf", data))


def test_a_big_endian_file_is_named(tmp_path, sentence):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen35", endianess=gguf.GGUFEndian.BIG)
    writer.add_block_count(4)
    writer.add_tensor("blk.0.ssm_a", np.ones(6, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "expected a little-endian GGUF, got a big-endian one" in sentence(tmp_path / "m.gguf")


# Numbers of the header.


@pytest.mark.parametrize(
    ("key", "part"),
    [
        (alignment(0), "a power of two from 8 to 65536, got 0"),
        (alignment(3), "a power of two from 8 to 65536, got 3"),
        (alignment(2**31), "a power of two from 8 to 65536, got 2147483648"),
        (alignment(32, kind=5), "general.alignment as an unsigned 32-bit number, got type 5"),
    ],
)
def test_an_alignment_that_cannot_be_is_refused(tmp_path, sentence, key, part):
    assert part in sentence(write(tmp_path / "m.gguf", raw_gguf(keys=(key,))))


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda offset: offset + 1, "expected an offset that is a multiple of 32"),
        (lambda _: 2**40, "(truncated)"),
        (lambda _: 2**64 - 32, "(truncated)"),
        (lambda _: 0, "inside another tensor"),
        (lambda offset: offset - 32, "inside another tensor"),
    ],
)
def test_one_bad_offset_among_good_ones_is_refused(tiny_gguf, tmp_path, sentence, change, part):
    name = "blk.2.ssm_a"
    assert part in sentence(write(tmp_path / "m.gguf", with_offset(tiny_gguf, name, change)))


def test_a_bad_offset_names_its_tensor(tiny_gguf, tmp_path, sentence):
    data = with_offset(tiny_gguf, "blk.2.ssm_a", lambda _: 2**40)
    assert "blk.2.ssm_a: expected its bytes to end at 10995" in sentence(write(tmp_path / "m.gguf", data))


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (raw_gguf(counts=(2**64 - 1, 1)), "expected no more than its"),
        (raw_gguf(keys=(text("k") + struct.pack("<IQ", 8, 2**64 - 1),)), "the value of 'k' of 184467440737095"),
        (raw_gguf(keys=(text("k") + struct.pack("<IIQ", 9, 8, 2**60),)), "k: expected 1152921504606846976 entries"),
        (raw_gguf(keys=(text("k") + struct.pack("<II", 4, 1),) * 2), "expected each key once, got 'k' twice"),
        (raw_gguf(entries=(entry("a", (4,), 0, 0), entry("a", (4,), 0, 32)), data=b"\0" * 64), "each tensor once"),
        (raw_gguf(entries=(entry("a", (8,), 0, 0), entry("b", (8,), 0, 0))), "b: expected an offset of at least 32"),
        (raw_gguf(entries=(entry("a", (1000, 1000), 0, 0),), data=b"\0" * 4), "a: expected its bytes to end at 40000"),
        (raw_gguf(entries=(entry("a", (2**32, 2**32), 0, 0),)), "a shape of 1 to 2^63 elements"),
        (raw_gguf(entries=(entry("a", (40,), 12, 0),)), "rows of whole Q4_K blocks of 256, got 40"),
        (raw_gguf(entries=(entry("a", (32,), 4, 0),)), "a known element type, got number 4"),
    ],
)
def test_an_attack_on_the_header_is_refused_in_bounded_memory(tmp_path, sentence, data, part):
    assert part in sentence(write(tmp_path / "m.gguf", data))


# A file that is sound, and not this model's.


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        # Converters that lost keys, or took a class default in the place of a value.
        ({"qwen35.block_count": None}, "expected a number for qwen35.block_count, got no such key"),
        (
            {"qwen35.attention.layer_norm_rms_epsilon": None},
            "expected a number for qwen35.attention.layer_norm_rms_epsilon, got no such key",
        ),
        ({"qwen35.ssm.time_step_rank": 4}, "expected qwen35.ssm.time_step_rank 6 as config.json has, got 4"),
        # Another dialect.
        ({"qwen35.rope.dimension_sections": [2, 1, 1]}, "4 entries of rope.dimension_sections, got 3; this is Ollama"),
        # MTP blocks.
        ({"qwen35.block_count": 5, "qwen35.nextn_predict_layers": 1}, "(declared MTP block absent)"),
        ({"qwen35.block_count": 5}, "expected 4 layers as config.json has, got 5"),
        # Another model.
        ({"general.architecture": "qwen35moe"}, "got 'qwen35moe' (a mixture of experts; dense models only)"),
        ({"general.architecture": "llama"}, "expected general.architecture qwen35, got 'llama'"),
        ({"qwen35.feed_forward_length": 9728}, "feed_forward_length 160 as config.json has, got 9728; this is another"),
        ({"qwen35.full_attention_interval": 4}, "a full_attention_interval of 4"),
    ],
)
def test_keys_of_another_model_are_refused_by_what_differs(tiny_gguf, tmp_path, sentence, changes, part):
    assert part in sentence(edit_gguf(tiny_gguf, tmp_path / "m.gguf", metadata=changes))


@pytest.mark.parametrize("change", [-1, 1])
def test_one_token_fewer_or_more_is_refused_with_both_counts(tiny_gguf, tmp_path, sentence, change):
    tokens = tokens_of(tiny_gguf)
    other = [*tokens, "[PAD]"] if change > 0 else tokens[:-1]
    path = edit_gguf(tiny_gguf, tmp_path / "m.gguf", metadata={"tokenizer.ggml.tokens": other})
    assert f"a vocabulary of {len(tokens)} rows as config.json has, got {len(other)} tokens" in sentence(path)


def test_padded_rows_of_the_vocabulary_are_part_of_it(tiny_gguf, config):
    assert sum(token.startswith("[PAD") for token in tokens_of(tiny_gguf)) == 7
    assert verify_matches(read_gguf(tiny_gguf), config) == ()


def test_a_convolution_that_was_transposed_is_refused_by_its_shape(tiny_gguf, tmp_path, sentence):
    name = "blk.2.ssm_conv1d.weight"
    path = edit_gguf(tiny_gguf, tmp_path / "m.gguf", tensors={name: tensor_of(tiny_gguf, name).T})
    assert f"expected {name} of shape [160, 4] by config.json, got [4, 160]" in sentence(path)


def test_a_missing_head_is_refused_unless_the_embeddings_are_tied(tiny_gguf, tmp_path, sentence, config):
    path = edit_gguf(tiny_gguf, tmp_path / "m.gguf", drop=("output.weight",))
    assert "expected the tensor output.weight, got none" in sentence(path)
    tied = dataclasses.replace(config, tie_word_embeddings=True)
    assert verify_matches(read_gguf(path), tied) == ()
    (note,) = verify_matches(read_gguf(tiny_gguf), tied)
    assert "holds output.weight although config.json ties the embeddings" in note


def test_a_time_step_bias_without_its_ending_is_named_as_a_dialect(tiny_gguf, tmp_path, sentence):
    path = edit_gguf(tiny_gguf, tmp_path / "m.gguf", rename={"blk.0.ssm_dt.bias": "blk.0.ssm_dt"})
    assert "blk.0.ssm_dt.bias, got blk.0.ssm_dt, one without .bias; this is Ollama's dialect" in sentence(path)


def test_bundled_vision_and_mtp_tensors_are_reported(tiny_gguf, tmp_path, config):
    extra = {"v.blk.0.attn_q.weight": np.ones((4, 4)), "mtp.fc.weight": np.ones((4, 4))}
    path = edit_gguf(tiny_gguf, tmp_path / "m-F32.gguf", tensors=extra)
    assert verify_matches(read_gguf(path), config) == (
        "m-F32.gguf: 1 MTP tensors, which take no part: mtp.fc.weight",
        "m-F32.gguf: 1 vision tensors, which take no part: v.blk.0.attn_q.weight",
    )


def test_an_mtp_block_in_block_count_is_not_a_layer(tiny_gguf, tmp_path, config):
    changes = {"qwen35.block_count": 5, "qwen35.nextn_predict_layers": 1}
    path = edit_gguf(tiny_gguf, tmp_path / "m-F32.gguf", metadata=changes, tensors=NEXTN)
    (note,) = verify_matches(read_gguf(path), config)
    assert "2 MTP tensors, which take no part" in note


def test_an_mtp_block_that_is_not_declared_is_named(tiny_gguf, tmp_path, sentence):
    path = edit_gguf(tiny_gguf, tmp_path / "m.gguf", metadata={"qwen35.block_count": 5}, tensors=NEXTN)
    assert "blk.4 holds an MTP block that no nextn_predict_layers declares" in sentence(path)


@pytest.mark.parametrize(
    ("name", "file_type", "parts"),
    [
        ("m.gguf", 15, ["says it is Q4_K_M, 32 of 32 matrices are F32"]),
        ("m-Q4_K_M.gguf", 0, ["its name says Q4_K_M, general.file_type says F32"]),
        ("m-Q8_0.gguf", 15, ["32 of 32 matrices are F32", "its name says Q8_0, general.file_type says Q4_K_M"]),
        ("m-F32.gguf", 0, []),
    ],
)
def test_a_name_or_a_file_type_that_lies_about_the_types_is_noted(tiny_gguf, tmp_path, config, name, file_type, parts):
    path = edit_gguf(tiny_gguf, tmp_path / name, metadata={"general.file_type": file_type})
    notes = verify_matches(read_gguf(path), config)
    assert len(notes) == len(parts)
    assert all(part in note for part, note in zip(parts, notes, strict=True))
