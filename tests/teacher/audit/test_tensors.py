"""The tensor audit: no false alarm on clean files, and planted faults found, placed and named."""

import json
import shutil

import gguf
import numpy as np
import pytest

from teacher.audit.mapping import SourceTensor, expected_rows, map_tensors
from teacher.audit.quants import dequantize, quantize, row_bytes
from teacher.audit.tensors import audit_file
from teacher.cli import main
from teacher.snapshot.folder import read_snapshot

NAME = "qwen35-tiny"
PACKAGE_TYPES = [
    kind.name for kind in gguf.GGMLQuantizationType
    if kind in gguf.quants._type_traits and kind.name not in ("F32", "Q8_1", "Q8_K", "MXFP4", "NVFP4")
]  # fmt: skip


@pytest.fixture(scope="module")
def source(golden):
    return read_snapshot(golden / NAME)


def spoiled(golden, tmp_path, kind, tensor, change):
    """A copy of a golden GGUF in which `change` worked on one tensor's bytes or F32 values, in place."""
    path = tmp_path / f"{NAME}-{kind}.gguf"
    shutil.copyfile(golden / "gguf" / path.name, path)
    found = {one.name: one for one in gguf.GGUFReader(path, "r+").tensors}
    change(found[tensor].data, found)
    found[tensor].data.flush()
    return path


@pytest.mark.parametrize("kind", ["BF16", "Q8_0", "Q6_K", "Q4_K_M", "Q4_0"])
def test_a_clean_file_of_each_type_raises_no_alarm(golden, source, kind):
    audit = audit_file(source, golden / "gguf" / f"{NAME}-{kind}.gguf", threads=1)
    assert audit.passed
    assert len(audit.tensors) == len(list(map_tensors(source.config)))
    if kind == "BF16":  # but for exp in -exp(A_log), every value is the source's
        assert {tensor.kind for tensor in audit.tensors if tensor.verdict != "exact"} <= {"ssm_a"}


def test_a_tied_model_has_no_head_of_its_own(golden):
    audit = audit_file(
        read_snapshot(golden / "qwen35-tiny-tied"), golden / "gguf/qwen35-tiny-tied-Q8_0.gguf", threads=1
    )
    assert audit.passed
    assert "output.weight" not in {tensor.name for tensor in audit.tensors}


@pytest.mark.parametrize("kind", PACKAGE_TYPES)
def test_each_type_dequantizes_as_the_gguf_package_does(kind):
    # Two implementations of one definition; products of a scale in F16 and small integers are exact in F32 but for a
    # few sums, so one part in 2^20 of the block's largest value is ample.
    number = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[number]
    rng = np.random.default_rng(7)
    data = rng.integers(0, 256, (64, size), dtype=np.uint8)
    with np.errstate(invalid="ignore", over="ignore"):  # random bytes hold infinite scales too
        expected = gguf.quants.dequantize(data, number).reshape(64, block)
    actual = dequantize(kind, data, block)
    usable = np.isfinite(expected).all(axis=1) & (np.abs(expected).max(axis=1) < 1e30)
    assert usable.sum() > 32 or kind in ("F16", "BF16")
    limit = np.abs(expected[usable]).max(axis=1, keepdims=True) * 2.0**-20
    assert np.all(np.abs(actual[usable] - expected[usable]) <= limit)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "Q6_K", "IQ4_XS", "IQ2_XXS", "IQ1_S"])
def test_the_types_own_quantizer_comes_near_to_its_bits(kind):
    # A uniform b-bit quantizer of normal values reaches about 6 b - 7 dB; half of 6 b tells a working one from none.
    values = np.random.default_rng(3).normal(size=(8, 512)).astype(np.float32)
    error = quantize(kind, values) - values
    reached = 10 * np.log10(np.square(values).sum() / np.square(error).sum())
    assert reached > 3 * 8 * row_bytes(kind, 512) / 512


def negate(data, _):
    np.negative(data, out=data)


def put(values):
    def change(data, _):
        data[...] = values.reshape(data.shape)

    return change


def mapped(source, name):
    mapping = next(one for one in map_tensors(source.config) if one.name == name)
    tensor = SourceTensor(source, mapping.source)
    return mapping, tensor, expected_rows(tensor, mapping, slice(None))


def test_each_transformation_that_was_left_out_is_named(golden, source, tmp_path):
    _, _, minus_exp = mapped(source, "blk.2.ssm_a")
    heads, raw, _ = mapped(source, "blk.4.ssm_a")
    _, norm, _ = mapped(source, "blk.4.attn_norm.weight")
    _, dt_bias, _ = mapped(source, "blk.1.ssm_dt.bias")
    _, _, taps = mapped(source, "blk.0.ssm_conv1d.weight")
    _, conv, _ = mapped(source, "blk.5.ssm_conv1d.weight")
    _, gated, _ = mapped(source, "blk.6.ssm_norm.weight")
    _, _, q_norm = mapped(source, "blk.3.attn_q_norm.weight")
    _, _, other = mapped(source, "blk.6.post_attention_norm.weight")
    every = slice(None)
    cases = {
        "blk.2.ssm_a": (put(-minus_exp), "sign is reversed"),
        "blk.4.ssm_a": (put(raw.rows(every)[:, heads.columns]), "looks like A_log itself"),
        "blk.4.attn_norm.weight": (put(norm.rows(every)), "norm weight lacks +1"),
        "blk.6.ssm_norm.weight": (put(gated.rows(every) + 1), "gated norm has +1"),
        "blk.1.ssm_dt.bias": (put(dt_bias.rows(every)), "value heads not reordered"),
        "blk.5.ssm_conv1d.weight": (put(conv.rows(every)), "value heads not reordered"),
        "blk.0.ssm_conv1d.weight": (put(np.ascontiguousarray(taps[:, ::-1])), "convolution taps reversed"),
        "blk.3.attn_k_norm.weight": (put(q_norm), "matches attn_q_norm, expected attn_k_norm"),
        "blk.5.post_attention_norm.weight": (put(other), "matches layer 6, expected layer 5"),
        "blk.0.ssm_dt.bias": (put(np.zeros_like(dt_bias.rows(every))), "every value is 0"),
    }
    for name, (change, cause) in cases.items():
        audit = audit_file(source, spoiled(golden, tmp_path, "Q8_0", name, change), threads=1)
        (finding,) = audit.of_verdict("worse", "wrong")
        assert finding.name == name
        assert finding.cause is not None and cause in finding.cause, (name, finding.cause)


def test_broken_blocks_and_swapped_layers_are_named_in_quantized_tensors(golden, source, tmp_path):
    def zero_scale(data, _):
        data[3, 0:2] = 0  # Q4_0: two bytes of scale lead each block

    def nan_scale(data, _):
        data[3, 0:2] = [0, 0x7E]

    def from_layer(number):
        def change(data, found):
            data[...] = found[f"blk.{number}.ffn_up.weight"].data

        return change

    def permute_rows(data, _):
        data[...] = np.roll(data, 17, axis=0)

    for tensor, change, cause in (
        ("blk.1.ffn_up.weight", zero_scale, "1 Q4_0 block is all zero"),
        ("blk.1.ffn_up.weight", nan_scale, "1 Q4_0 block holds NaN or infinity"),
        ("blk.6.ffn_up.weight", from_layer(7), "matches layer 7, expected layer 6"),
        ("token_embd.weight", permute_rows, "rows permuted: row"),
    ):
        audit = audit_file(source, spoiled(golden, tmp_path, "Q4_0", tensor, change), threads=1)
        (finding,) = audit.of_verdict("worse", "wrong")
        assert (finding.name, cause in str(finding.cause)) == (tensor, True), finding


def test_a_stale_tensor_in_an_exact_type_is_worse_than_its_type_allows(golden, source, tmp_path):
    def drift(data, _):
        data *= 1 + np.random.default_rng(1).normal(size=data.shape).astype(np.float32) * np.float32(0.01)

    audit = audit_file(source, spoiled(golden, tmp_path, "Q8_0", "blk.2.attn_norm.weight", drift), threads=1)
    (finding,) = audit.of_verdict("worse", "wrong")
    assert (finding.name, finding.verdict) == ("blk.2.attn_norm.weight", "worse")
    assert 35 < finding.sqnr_db < 45  # noise of 1 % is 40 dB


def test_the_command_prints_tensor_and_cause_and_exits_with_4(golden, tmp_path, capsys):
    path = spoiled(golden, tmp_path, "Q8_0", "blk.2.ssm_a", negate)
    arguments = ["audit", str(golden / NAME), str(path), "--threads", "1", "--quiet"]
    assert main(arguments) == 4
    said = capsys.readouterr().out
    assert "blk.2.ssm_a" in said and "sign is reversed" in said and "FAIL" in said
    assert main([*arguments, "--json"]) == 4
    form = json.loads(capsys.readouterr().out)
    assert [t["name"] for t in form["tensors"] if t["verdict"] in ("worse", "wrong")] == ["blk.2.ssm_a"]
    assert main(["audit", str(golden / NAME), str(golden / "gguf" / f"{NAME}-Q8_0.gguf"), "--quiet"]) == 0
    assert "PASS" in capsys.readouterr().out
