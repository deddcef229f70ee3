import dataclasses
import hashlib
import json

import pytest

from receipts.cache_plan import (
    CachePlan,
    CacheReceipt,
    CacheSizes,
    make_receipt,
    plan_cache,
    verify_plan,
    verify_receipt,
)
from receipts.errors import DigestMismatchError, IntegrityError, PlanError, ReceiptFormatError


def sizes(layers=4, **changes):
    values = {
        "num_hidden_layers": layers,
        "layer_types": tuple("full_attention" if (i + 1) % 4 == 0 else "linear_attention" for i in range(layers)),
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 262144,
        "dense": True,
        "intermediate_size": 17408,
    }
    return CacheSizes(**(values | changes))


# From the specification this profile re-creates.
@pytest.mark.parametrize(
    ("layers", "value_heads", "tokens", "total", "layout"),
    [
        (64, 48, 4096, 850657280, "e6c958ebba45b5e1f313d52974545eeadad43565e68eed42237eaa0991f44617"),
        (32, 32, 512, 138936320, "0d331471e053c1840224353e6afa5728e13d15b79c6588f737214f8cb926dd8b"),
    ],
)
def test_published_layouts_reproduce(layers, value_heads, tokens, total, layout):
    plan = plan_cache(sizes(layers, linear_num_value_heads=value_heads), tokens)
    assert plan.total_payload_bytes == total
    assert plan.layout_sha256 == layout
    verify_plan(plan)


def test_buffers_come_in_layer_order_with_the_shapes_of_their_kind():
    plan = plan_cache(sizes(), 7)
    assert [record.role for record in plan.buffer_records[:4]] == [
        f"blk.0.base_text_cache.{name}"
        for name in ("conv_state", "conv_state_scratch", "recurrent", "recurrent_scratch")
    ]
    assert [(r.role, r.shape) for r in plan.buffer_records[-2:]] == [
        ("blk.3.base_text_cache.k", (1, 4, 7, 256)),
        ("blk.3.base_text_cache.v", (1, 4, 7, 256)),
    ]
    assert plan.buffer_records[0].shape == (2 * 16 * 128 + 48 * 128, 3, 1)
    assert plan.buffer_records[2].shape == (128, 128, 48, 1)


def test_a_kernel_of_one_tap_still_has_one_column_of_history():
    assert plan_cache(sizes(linear_conv_kernel_dim=1), 7).buffer_records[0].shape[1] == 1


@pytest.mark.parametrize(
    ("tokens", "changes", "words"),
    [
        (0, {}, "1 to 4096 tokens"),
        (4097, {}, "got 4097"),
        (101, {"max_position_embeddings": 100}, "model limit 100"),
        (7, {"dense": False}, "mixture of experts"),
        (7, {"intermediate_size": None}, "mixture of experts"),
        (7, {"num_hidden_layers": 0, "layer_types": ()}, "1 to 256 layers"),
        (7, {"num_hidden_layers": 5}, "layer_types for 5 layers, got 4"),
        (7, {"layer_types": ("linear_attention",) * 3 + ("sliding_attention",)}, "layer 3"),
        (7, {"layer_types": ("linear_attention",) * 4}, "no full_attention layer"),
        (7, {"layer_types": ("full_attention",) * 4}, "no linear_attention layer"),
        (7, {"linear_num_value_heads": 40}, "multiple of 16 key heads"),
        (7, {"linear_num_value_heads": 8}, "multiple of 16 key heads"),
        (7, {"head_dim": 0}, "head_dim"),
        (7, {"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim"),
        (7, {"linear_key_head_dim": 2**32 - 1, "linear_value_head_dim": 2**32 - 1}, "expected at most"),
        (4096, {"num_key_value_heads": 1024}, "2147483648 bytes"),
    ],
)
def test_what_the_plan_refuses(tokens, changes, words):
    with pytest.raises(PlanError, match=words):
        plan_cache(sizes(**changes), tokens)


def test_257_layers_are_too_many_and_256_are_not():
    small = {"num_key_value_heads": 1, "head_dim": 1, "linear_key_head_dim": 1, "linear_value_head_dim": 1}
    assert len(plan_cache(sizes(256, **small), 1).buffer_records) == 192 * 4 + 64 * 2
    with pytest.raises(PlanError, match="1 to 256 layers, got 257"):
        plan_cache(sizes(257, **small), 1)


def receipt(**changes):
    plan = plan_cache(sizes(), 7)
    values = {
        "device_name": "Apple M9",
        "device_registry_id": 2**63 + 1,
        "device_identity": "Apple M9",
        "actual_payload_bytes": plan.total_payload_bytes,
        "fresh_semantic_state": True,
    }
    return make_receipt(plan, **(values | changes))


def test_on_metal_the_receipt_hash_is_the_v1_view():
    got = receipt()
    view = (
        '{"schema_version":1,"profile":"dense_qwen35_source_teacher_base_text_f32_cache_v1",'
        f'"layout_sha256":"{got.plan.layout_sha256}","device_name":"Apple M9",'
        f'"device_registry_id":9223372036854775809,"actual_payload_bytes":{got.actual_payload_bytes},'
        '"fresh_semantic_state":true}'
    )
    assert got.receipt_sha256 == hashlib.sha256(view.encode()).hexdigest()
    assert got.device_identity is None
    verify_receipt(got)


def test_without_a_registry_id_the_identity_is_hashed_under_its_own_name():
    one = receipt(device_registry_id=None, device_identity="GPU-1")
    two = receipt(device_registry_id=None, device_identity="GPU-2")
    verify_receipt(one)
    assert one.receipt_sha256 != two.receipt_sha256


@pytest.mark.parametrize("value", [receipt(), receipt(device_registry_id=None)])
def test_a_receipt_survives_json(value):
    again = CacheReceipt.from_dict(json.loads(json.dumps(value.to_dict())))
    assert again == value
    verify_receipt(again)
    assert CachePlan.from_dict(value.plan.to_dict()) == value.plan


@pytest.mark.parametrize(
    "change",
    [
        {"device_name": "Apple M8"},
        {"actual_payload_bytes": 1},
        {"fresh_semantic_state": False},
        {"device_registry_id": 5},
        {"receipt_sha256": "0" * 64},
    ],
)
def test_a_changed_receipt_no_longer_reproduces(change):
    with pytest.raises(DigestMismatchError, match="receipt_sha256"):
        verify_receipt(dataclasses.replace(receipt(), **change))


def test_a_stale_cache_cannot_be_receipted_as_fresh():
    with pytest.raises(IntegrityError, match="held tokens"):
        verify_receipt(receipt(fresh_semantic_state=False))
    with pytest.raises(IntegrityError, match="bytes as planned"):
        verify_receipt(receipt(actual_payload_bytes=5))


@pytest.mark.parametrize("field", ["total_payload_bytes", "base_full_attention_cache_bytes", "full_attention_slots"])
def test_a_changed_plan_no_longer_reproduces(field):
    plan = plan_cache(sizes(), 7)
    with pytest.raises(DigestMismatchError, match="layout_sha256"):
        verify_plan(dataclasses.replace(plan, **{field: getattr(plan, field) + 1}))


def test_unknown_missing_and_mistyped_fields_are_refused():
    form = receipt().to_dict()
    for broken in (form | {"note": 1}, {k: v for k, v in form.items() if k != "plan"}, form | {"device_name": 3}):
        with pytest.raises(ReceiptFormatError):
            CacheReceipt.from_dict(broken)
