"""The real engine on a tiny model: parity with PyTorch, its settings, and what it must refuse."""

import importlib.util

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, dequantize

from receipts.errors import EngineFailedError, EngineMissingError, GgufError, HarnessError
from support.gguf_tools import edit_gguf
from support.plans import centred_difference, kl_nats, plan_of, random_ids
from teacher.plans.call_shape import CallShape
from teacher.process.streams import run_source

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("xllamacpp") is None, reason="needs the package xllamacpp (llama.cpp)"
)
F32 = GGMLQuantizationType.F32
IDS = random_ids(100, 420)
EXACT = {"flash_attention": "off", "type_k": "f32", "type_v": "f32"}


def run(gguf, plan, kind="llama_cpp", **settings):
    spec = {"gguf": str(gguf), **settings} if kind == "llama_cpp" else settings
    rows = [[] for _ in plan.examples]
    with run_source(kind, spec, plan, threads=1) as source:
        for block in source:
            rows[block.example].append(block.logits)
        return [np.concatenate(parts) for parts in rows], source.description


@pytest.fixture(scope="module")
def plan():
    return plan_of((IDS, (60, 1, 1, 38)), (IDS[:30], (30,)))


def test_an_f32_file_computes_what_pytorch_does(tiny, tiny_gguf, plan):
    actual, _ = run(tiny_gguf, plan, **EXACT)
    expected, description = run(None, plan, kind="transformers", snapshot=str(tiny))
    # Both are F32 sums in another order; the arbiter's bound (tests/parity) holds for each, so twice it for both.
    for left, right in zip(expected, actual, strict=True):
        assert centred_difference(left, right).max() < 2 * 9e-4
        assert kl_nats(left, right).mean() < 1e-9
    assert description["dtype"] == "float32"


def test_on_a_trained_model_the_f32_file_is_within_the_floor(golden, tmp_path):
    source = golden / "gguf" / "qwen35-tiny-BF16.gguf"
    widened = {t.name: dequantize(t.data, t.tensor_type) for t in GGUFReader(source).tensors if t.tensor_type != F32}
    path = edit_gguf(source, tmp_path / "m.gguf", metadata={"general.file_type": 0}, tensors=widened,
                     types=dict.fromkeys(widened, "F32"))  # fmt: skip
    ids = random_ids(128, 1995)
    plan = plan_of((ids, (128,)), (ids[:24], (1,) * 24))
    expected, _ = run(None, plan, kind="transformers", snapshot=str(golden / "qwen35-tiny"))
    actual, _ = run(path, plan, **EXACT)
    # The random model's bound is wide for its logits of size 15 out of weights no training has tamed; here both sides
    # are F32 sums in another order whose rounding was measured as 1e-11 nats and 6e-5, a third of the bound.
    for left, right in zip(expected, actual, strict=True):
        assert centred_difference(left, right).max() < 2e-4
        assert kl_nats(left, right).mean() < 1e-9


def test_a_quantized_file_answers_otherwise_token_by_token(golden):
    ids = random_ids(64, 1995)
    (prefill, decode), _ = run(golden / "gguf" / "qwen35-tiny-Q4_K_M.gguf", plan_of((ids, (64,)), (ids, (1,) * 64)))
    spread = kl_nats(prefill, decode).mean()
    assert 1e-6 < spread < 0.1  # its own noise, to be reported beside its distance from the teacher


def test_an_example_does_not_remember_the_one_before(tiny_gguf, plan):
    both, _ = run(tiny_gguf, plan)
    alone, _ = run(tiny_gguf, plan_of((IDS[:30], (30,))))
    assert np.array_equal(both[1], alone[0])


def test_the_same_calls_give_the_same_bits_in_another_process(tiny_gguf, plan):
    first, second = (run(tiny_gguf, plan)[0] for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def test_call_boundaries_reach_the_engine(tiny_gguf):
    whole, _ = run(tiny_gguf, plan_of((IDS, (100,))), **EXACT)
    single, _ = run(tiny_gguf, plan_of((IDS, CallShape.parse("decode").cut(100))), **EXACT)
    assert not np.array_equal(whole[0], single[0])  # other kernels, so other rounding
    assert kl_nats(whole[0], single[0]).mean() < 1e-9


def test_a_call_longer_than_n_batch_is_the_calls_it_is_split_into(tiny_gguf):
    split, description = run(tiny_gguf, plan_of((IDS, (100,))), n_batch=40)
    asked, _ = run(tiny_gguf, plan_of((IDS, (40, 40, 20))))
    assert np.array_equal(split[0], asked[0])
    assert description["settings"]["n_batch"] == description["in_force"]["n_batch"] == 40


@pytest.mark.parametrize("n_ubatch", [32, 64])
def test_micro_batches_inside_a_call_change_no_logit_beyond_rounding(tiny_gguf, n_ubatch):
    whole, _ = run(tiny_gguf, plan_of((IDS, (100,))), **EXACT)
    cut, _ = run(tiny_gguf, plan_of((IDS, (100,))), n_ubatch=n_ubatch, **EXACT)
    assert kl_nats(whole[0], cut[0]).max() < 1e-9


def test_settings_are_in_force_and_recorded(tiny_gguf, plan):
    _, description = run(tiny_gguf, plan, type_k="q8_0", type_v="f16", n_ubatch=32, max_call_tokens=64)
    assert description["settings"]["type_k"] == "q8_0"
    assert description["in_force"]["n_ubatch"] == 32
    assert description["in_force"]["n_batch"] == 64
    assert any("K (q8_0)" in line for line in description["in_force"]["log"])
    assert len(description["library"]["sha256"]) == 64
    assert description["package_version"]


def test_a_quantized_kv_cache_changes_the_logits(tiny_gguf, plan):
    plain, _ = run(tiny_gguf, plan)
    quantized, _ = run(tiny_gguf, plan, type_k="q8_0")
    assert kl_nats(plain[0], quantized[0]).mean() > 1e-8


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda data: data[:1000], "expected llama.cpp to load it"),
        (lambda data: b"not a model" * 100, "expected llama.cpp to load it"),
        (lambda data: b"", "expected llama.cpp to load it"),
        (lambda data: data[:-1], "not within the file bounds"),
        (lambda data: data[: len(data) // 2], "not within the file bounds"),
        (lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", "to load it"),
        (lambda data: b"GGUF" + b"\xff" * 60, "expected llama.cpp to load it"),
        (lambda data: data.replace(b"blk.0.ssm_a", b"blk.0.ssm_x"), "tensor 'blk.0.ssm_a' not found"),
    ],
)
def test_a_file_the_engine_refuses_is_one_sentence(tiny_gguf, tmp_path, plan, spoil, sentence):
    path = tmp_path / "m.gguf"
    path.write_bytes(spoil(tiny_gguf.read_bytes()))
    with pytest.raises(GgufError, match=sentence):
        run(path, plan)


@pytest.mark.parametrize(
    ("metadata", "sentence"),
    [
        ({"general.architecture": "qwen99"}, "unknown model architecture: 'qwen99'"),
        ({"general.architecture": "llama"}, r"key not found in model: llama\.context_length"),
        ({"qwen35.block_count": None}, r"key not found in model: qwen35\.block_count"),
        ({"qwen35.rope.dimension_sections": [2, 1, 1]}, "dimension_sections has wrong array length; expected 4, got 3"),
        ({"tokenizer.ggml.pre": "nonsense"}, "unknown pre-tokenizer type: 'nonsense'"),
    ],
)
def test_the_engines_own_reason_is_given(tiny_gguf, tmp_path, plan, metadata, sentence):
    with pytest.raises(GgufError, match=sentence):
        run(edit_gguf(tiny_gguf, tmp_path / "m.gguf", metadata=metadata), plan)


def test_a_file_that_crashes_the_engine_is_an_error_of_ours(tiny_gguf, tmp_path, plan):
    path = edit_gguf(tiny_gguf, tmp_path / "m.gguf", metadata={"qwen35.full_attention_interval": 0})
    with pytest.raises(EngineFailedError, match=r"got signal SIG.*; last words: Fatal Python error"):
        run(path, plan)  # it divides by the interval


def test_a_missing_file_is_refused(tmp_path, plan):
    with pytest.raises(HarnessError, match="expected a GGUF file, found none"):
        run(tmp_path / "none.gguf", plan)


@pytest.mark.parametrize(
    ("settings", "error", "sentence"),
    [
        ({"flash_attention": "maybe"}, EngineFailedError, "flash_attention: expected one of auto, off, on"),
        ({"type_k": "q3"}, EngineFailedError, "type_k: expected one of"),
        ({"n_ubatch": 0}, EngineFailedError, "n_ubatch: expected a count of at least 1, got 0"),
        ({"speed": 11}, EngineFailedError, "speed"),
        ({"library": "/nowhere/libllama.so"}, EngineMissingError, "/nowhere/libllama.so"),
    ],
)
def test_settings_that_cannot_be_are_refused(tiny_gguf, plan, settings, error, sentence):
    with pytest.raises(error, match=sentence):
        run(tiny_gguf, plan, **settings)
