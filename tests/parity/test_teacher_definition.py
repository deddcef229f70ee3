"""The teacher against the F64 arbiter: every call shape, every length around a chunk's edge, and faults it must see."""

import numpy as np
import pytest

from support.plans import centred_difference, kl_nats, plan_of, random_ids, replayed_logits
from support.tiny_qwen35 import Sizes, write_snapshot
from teacher.model.arbiter import forward
from teacher.plans.call_shape import CallShape
from teacher.snapshot.folder import read_snapshot
from teacher.snapshot.weights import WeightSource

# F32 keeps 2^-24 of a value. A logit here is of size 15 and has passed four layers of sums over at most 160 terms
# and, in the linear layers, products that a chunk's triangular inverse can amplify; with 1e3 for both that is
# 15 * 1e3 * 2^-24 = 9e-4. PyTorch's F32 has 7.8e-4 on the same ids.
LIMIT = 9e-4
# In nats the same rounding is squared: 0.5 * (9e-4)^2 if every logit were off by that.
KL_LIMIT = 4e-7


@pytest.fixture(scope="module")
def odd_widths(tmp_path_factory):
    """Key and value head widths differ, so that a transposed state cannot pass."""
    sizes = Sizes(key_width=16, value_width=24, tied=True, wrapped=False)
    return read_snapshot(write_snapshot(tmp_path_factory.mktemp("odd") / "odd", sizes, seed=3))


@pytest.fixture(scope="module", params=["tiny", "odd_widths"])
def model(request, tiny):
    snapshot = read_snapshot(tiny) if request.param == "tiny" else request.getfixturevalue("odd_widths")
    ids = random_ids(130, 90, seed=5)
    return snapshot, ids, forward(WeightSource(snapshot), snapshot.config, ids)


@pytest.mark.parametrize("shape", ["prefill", "decode", "chunks:63", "chunks:64", "chunks:65", "mixed:24"])
def test_every_call_shape_computes_the_definition(model, shape):
    snapshot, ids, expected = model
    plan = plan_of((ids, CallShape.parse(shape).cut(len(ids))))
    (actual,) = replayed_logits(snapshot, plan, 130)
    worst = centred_difference(expected, actual)
    assert worst.max() < LIMIT, (worst.max(), worst.argmax())
    assert kl_nats(expected, actual).max() < KL_LIMIT


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 127, 128, 129])
def test_lengths_around_a_chunks_edge_need_no_padding(model, length):
    snapshot, ids, expected = model
    (actual,) = replayed_logits(snapshot, plan_of((ids[:length], (length,))), 130)
    assert centred_difference(expected[:length], actual).max() < LIMIT


def test_an_example_is_the_same_alone_and_beside_others(model):
    snapshot, ids, _ = model
    alone = replayed_logits(snapshot, plan_of((ids, (100, 30))), 130)[0]
    beside = replayed_logits(snapshot, plan_of((ids[:7], (7,)), (ids, (100, 30)), (ids[3:90], (87,))), 130)[1]
    assert np.array_equal(alone, beside)


def test_the_arbiters_angles_are_those_of_the_released_definition(model):
    snapshot, ids, expected = model
    exact = forward(WeightSource(snapshot), snapshot.config, ids, exact_angles=True)
    cost = centred_difference(expected, exact)
    assert 0 < cost.max() < 1e-2


def test_the_arbiter_is_causal(model):
    snapshot, ids, expected = model
    changed = (*ids[:100], *random_ids(30, 90, seed=9))
    again = forward(WeightSource(snapshot), snapshot.config, changed)
    assert np.array_equal(again[:100], expected[:100])
    assert centred_difference(expected[100:], again[100:]).max() > 1


WRONG = {
    "norm weight without its 1": ("input_layernorm.weight", lambda v: v - 1),
    "gated norm with a 1": ("linear_attn.norm.weight", lambda v: v + 1),
    "A_log of the other sign": ("linear_attn.A_log", lambda v: -v),
    "taps reversed": ("linear_attn.conv1d.weight", lambda v: v[..., ::-1]),
    "value heads reordered": ("linear_attn.dt_bias", lambda v: np.roll(v, 1)),
}


@pytest.mark.parametrize("fault", WRONG)
def test_the_bound_sees_a_fault_in_one_tensor_of_one_layer(model, fault, monkeypatch):
    snapshot, ids, expected = model
    part, change = WRONG[fault]
    original = WeightSource.layer

    def spoilt(self, index):
        layer = original(self, index)
        if index == 0:
            stored = layer[part]
            values = np.ascontiguousarray(change(stored.float32()), np.float32)
            layer[part] = type(stored)(name=stored.name, dtype="F32", shape=stored.shape, bits=values)
        return layer

    monkeypatch.setattr(WeightSource, "layer", spoilt)
    (actual,) = replayed_logits(snapshot, plan_of((ids, (len(ids),))), 130)
    assert centred_difference(expected, actual).max() > 10 * LIMIT
