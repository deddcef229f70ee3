"""The base-text cache as a plan, and the receipt that says it was allocated so: pure values and their v1 hashes.

Both hashes are SHA-256 over compact JSON in a declared field order, byte-compatible with the first implementation of
this profile. They are the only JSON here that is not RFC 8785.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from receipts.errors import DigestMismatchError, IntegrityError, PlanError, ReceiptFormatError

SCHEMA_VERSION = 1
PROFILE = "dense_qwen35_source_teacher_base_text_f32_cache_v1"
MAX_LAYERS = 256
MAX_SEQUENCE_TOKENS = 4096
MAX_PAYLOAD_BYTES = 2 << 30
FULL, LINEAR = "full_attention", "linear_attention"
_U32, _U64 = 2**32 - 1, 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSizes:
    """The sizes of a model that its cache depends on, spelled as in config.json.

    Attributes:
        dense: whether every layer has one dense feed-forward; a mixture of experts has no plan.
        intermediate_size: None when the config has none, as in a mixture of experts.
    """

    num_hidden_layers: int
    layer_types: tuple[str, ...]
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    max_position_embeddings: int
    dense: bool
    intermediate_size: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferRecord:
    """One buffer of the cache.

    Attributes:
        role: `blk.<layer>.base_text_cache.<name>`.
        shape: axis sizes, all above 0.
        dtype: always "f32".
        byte_len: 4 bytes an element.
    """

    role: str
    shape: tuple[int, ...]
    dtype: str
    byte_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlan:
    """Every buffer of the cache, in layer order, with totals and the digest of it all.

    Attributes:
        max_sequence_tokens: positions each full-attention layer can hold.
        n_sequences: always 1.
        buffer_records: k, v of each full-attention layer; conv_state, conv_state_scratch, recurrent and
            recurrent_scratch of each linear one.
        mtp_slot_allocated, tq_kv_active, linear_capture_allocated: features this profile leaves out, always False.
        layout_sha256: hash of the v1 view, which is every other field in declared order.
    """

    schema_version: int
    profile: str
    max_sequence_tokens: int
    n_sequences: int
    full_attention_slots: int
    linear_attention_slots: int
    buffer_records: tuple[BufferRecord, ...]
    base_full_attention_cache_bytes: int
    base_linear_attention_state_bytes: int
    total_payload_bytes: int
    mtp_slot_allocated: bool
    tq_kv_active: bool
    linear_capture_allocated: bool
    layout_sha256: str

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain values."""
        return _plain(self)

    @staticmethod
    def from_dict(form: Mapping[str, Any]) -> CachePlan:
        """Read a plan back; `verify_plan` says whether it holds together.

        Raises:
            ReceiptFormatError: a field is missing, unknown or of another type.
        """
        values = _fields_of(CachePlan, form, "cache plan")
        records = values["buffer_records"]
        if not isinstance(records, list | tuple):
            raise ReceiptFormatError(f"cache plan: expected a list of buffer_records, got {type(records).__name__}")
        values["buffer_records"] = tuple(_buffer_from_dict(record) for record in records)
        return CachePlan(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheReceipt:
    """Says that a plan's buffers were allocated, on which device, and held no token.

    Attributes:
        device_registry_id: Metal's id of the device, None on other backends.
        device_identity: stable identity where there is no registry id (GPU uuid, processor model), else None.
        actual_payload_bytes: bytes of the buffers that were found.
        fresh_semantic_state: whether they held no token.
        receipt_sha256: hash of the v1 view with the registry id, or of the same view with the identity in its place.
    """

    schema_version: int
    profile: str
    plan: CachePlan
    device_name: str
    device_registry_id: int | None
    device_identity: str | None
    actual_payload_bytes: int
    fresh_semantic_state: bool
    receipt_sha256: str

    def to_dict(self) -> dict[str, Any]:
        """Return the receipt as plain values; a registry id is written as a string, since it may pass 2**53."""
        form = _plain(self)
        if self.device_registry_id is not None:
            form["device_registry_id"] = str(self.device_registry_id)
        return form

    @staticmethod
    def from_dict(form: Mapping[str, Any]) -> CacheReceipt:
        """Read a receipt back; `verify_receipt` says whether it holds together.

        Raises:
            ReceiptFormatError: a field is missing, unknown or of another type.
        """
        values = _fields_of(CacheReceipt, form, "cache receipt")
        if not isinstance(values["plan"], Mapping):
            raise ReceiptFormatError(f"cache receipt: expected a plan, got {type(values['plan']).__name__}")
        values["plan"] = CachePlan.from_dict(values["plan"])
        registry = values["device_registry_id"]
        if registry is not None:
            if not isinstance(registry, str) or not re.fullmatch(r"0|[1-9][0-9]{0,19}", registry):
                raise ReceiptFormatError(f"cache receipt device_registry_id: expected decimal digits, got {registry!r}")
            values["device_registry_id"] = int(registry)
        return CacheReceipt(**values)


def plan_cache(sizes: CacheSizes, max_sequence_tokens: int) -> CachePlan:
    """Plan the cache of a dense model for one sequence.

    Raises:
        PlanError: a limit is passed, the model is not dense, sizes contradict each other, or a layer kind is absent.
    """
    _check_sizes(sizes, max_sequence_tokens)
    channels = _checked(
        2 * sizes.linear_num_key_heads * sizes.linear_key_head_dim
        + sizes.linear_num_value_heads * sizes.linear_value_head_dim,
        "convolution channels",
    )
    keys = (1, sizes.num_key_value_heads, max_sequence_tokens, sizes.head_dim)
    conv = (channels, max(sizes.linear_conv_kernel_dim - 1, 1), 1)
    state = (sizes.linear_key_head_dim, sizes.linear_value_head_dim, sizes.linear_num_value_heads, 1)
    buffers = {
        FULL: (("k", keys), ("v", keys)),
        LINEAR: (
            ("conv_state", conv),
            ("conv_state_scratch", conv),
            ("recurrent", state),
            ("recurrent_scratch", state),
        ),
    }
    records: list[BufferRecord] = []
    kind_bytes = {FULL: 0, LINEAR: 0}
    for layer, kind in enumerate(sizes.layer_types):
        for suffix, shape in buffers[kind]:
            record = _planned_buffer(f"blk.{layer}.base_text_cache.{suffix}", shape)
            kind_bytes[kind] = _checked(kind_bytes[kind] + record.byte_len, f"{kind} bytes")
            records.append(record)
    total = _checked(kind_bytes[FULL] + kind_bytes[LINEAR], "total bytes")
    if total > MAX_PAYLOAD_BYTES:
        raise PlanError(f"cache plan: expected at most {MAX_PAYLOAD_BYTES} bytes in all, got {total}")
    view: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "profile": PROFILE,
        "max_sequence_tokens": max_sequence_tokens,
        "n_sequences": 1,
        "full_attention_slots": sizes.layer_types.count(FULL),
        "linear_attention_slots": sizes.layer_types.count(LINEAR),
        "buffer_records": tuple(records),
        "base_full_attention_cache_bytes": kind_bytes[FULL],
        "base_linear_attention_state_bytes": kind_bytes[LINEAR],
        "total_payload_bytes": total,
        "mtp_slot_allocated": False,
        "tq_kv_active": False,
        "linear_capture_allocated": False,
    }
    return CachePlan(**view, layout_sha256=_v1_sha256(view))


def make_receipt(
    plan: CachePlan,
    *,
    device_name: str,
    device_registry_id: int | None,
    device_identity: str,
    actual_payload_bytes: int,
    fresh_semantic_state: bool,
) -> CacheReceipt:
    """Return the receipt of an allocated cache; the identity is kept only where there is no registry id."""
    values: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "profile": PROFILE,
        "plan": plan,
        "device_name": device_name,
        "device_registry_id": device_registry_id,
        "device_identity": device_identity if device_registry_id is None else None,
        "actual_payload_bytes": actual_payload_bytes,
        "fresh_semantic_state": fresh_semantic_state,
    }
    unsigned = CacheReceipt(**values, receipt_sha256="")
    return CacheReceipt(**values, receipt_sha256=_receipt_sha256(unsigned))


def verify_plan(plan: CachePlan) -> None:
    """Check that a plan's digest and totals follow from its own records.

    Raises:
        DigestMismatchError: the layout digest is not that of the fields.
        IntegrityError: a record or a total contradicts the others, or a limit or the profile is not kept.
    """
    view = {field.name: getattr(plan, field.name) for field in fields(plan) if field.name != "layout_sha256"}
    digest = _v1_sha256(view)
    if digest != plan.layout_sha256:
        raise DigestMismatchError(f"cache plan: expected layout_sha256 {digest}, got {plan.layout_sha256}")
    sums = {"k": 0, "v": 0, "conv_state": 0, "conv_state_scratch": 0, "recurrent": 0, "recurrent_scratch": 0}
    for record in plan.buffer_records:
        suffix = record.role.rpartition(".")[2]
        if suffix not in sums or record != _planned_buffer(record.role, record.shape):
            raise IntegrityError(f"cache buffer {record.role}: expected an F32 buffer of the profile, got {record}")
        sums[suffix] += record.byte_len
    full = sums["k"] + sums["v"]
    linear = sum(sums.values()) - full
    expected = {
        "schema_version": SCHEMA_VERSION,
        "profile": PROFILE,
        "n_sequences": 1,
        "base_full_attention_cache_bytes": full,
        "base_linear_attention_state_bytes": linear,
        "total_payload_bytes": full + linear,
        "mtp_slot_allocated": False,
        "tq_kv_active": False,
        "linear_capture_allocated": False,
    }
    for name, value in expected.items():
        if getattr(plan, name) != value:
            raise IntegrityError(f"cache plan {name}: expected {value}, got {getattr(plan, name)}")
    if len(plan.buffer_records) != 2 * plan.full_attention_slots + 4 * plan.linear_attention_slots:
        raise IntegrityError(
            f"cache plan: expected 2 buffers for each of {plan.full_attention_slots} full and 4 for each of"
            f" {plan.linear_attention_slots} linear layers, got {len(plan.buffer_records)}"
        )
    if not 0 < plan.max_sequence_tokens <= MAX_SEQUENCE_TOKENS or plan.total_payload_bytes > MAX_PAYLOAD_BYTES:
        raise IntegrityError("cache plan: expected sizes within the limits of the profile, got larger ones")


def verify_receipt(receipt: CacheReceipt) -> None:
    """Check that a receipt's digest follows from its fields, and that it speaks of a fresh cache of its plan.

    Raises:
        DigestMismatchError: a digest is not that of the fields.
        IntegrityError: bytes differ from the plan, the state was not fresh, or the device is not named.
    """
    verify_plan(receipt.plan)
    digest = _receipt_sha256(receipt)
    if digest != receipt.receipt_sha256:
        raise DigestMismatchError(f"cache receipt: expected receipt_sha256 {digest}, got {receipt.receipt_sha256}")
    if receipt.schema_version != SCHEMA_VERSION or receipt.profile != PROFILE:
        raise IntegrityError(f"cache receipt: expected profile {PROFILE}, got {receipt.profile}")
    if receipt.actual_payload_bytes != receipt.plan.total_payload_bytes:
        raise IntegrityError(
            f"cache receipt: expected {receipt.plan.total_payload_bytes} bytes as planned, got"
            f" {receipt.actual_payload_bytes}"
        )
    if not receipt.fresh_semantic_state:
        raise IntegrityError("cache receipt: expected a fresh cache, got one that held tokens")
    if (receipt.device_registry_id is None) == (receipt.device_identity is None):
        raise IntegrityError("cache receipt: expected a registry id or an identity of the device, got both or neither")


def _check_sizes(sizes: CacheSizes, max_sequence_tokens: int) -> None:
    bound = min(MAX_SEQUENCE_TOKENS, sizes.max_position_embeddings)
    if not 0 < max_sequence_tokens <= bound:
        raise PlanError(
            f"cache plan: expected 1 to {bound} tokens (profile limit {MAX_SEQUENCE_TOKENS}, model limit"
            f" {sizes.max_position_embeddings}), got {max_sequence_tokens}"
        )
    if not sizes.dense or sizes.intermediate_size is None:
        raise PlanError("cache plan: expected a dense model, got a mixture of experts")
    if not 0 < sizes.num_hidden_layers <= MAX_LAYERS:
        raise PlanError(f"cache plan: expected 1 to {MAX_LAYERS} layers, got {sizes.num_hidden_layers}")
    if len(sizes.layer_types) != sizes.num_hidden_layers:
        raise PlanError(
            f"cache plan: expected layer_types for {sizes.num_hidden_layers} layers, got {len(sizes.layer_types)}"
        )
    for layer, kind in enumerate(sizes.layer_types):
        if kind not in (FULL, LINEAR):
            raise PlanError(f"cache plan layer {layer}: expected {FULL} or {LINEAR}, got {kind!r}")
    for name in (
        "num_key_value_heads",
        "head_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_conv_kernel_dim",
    ):
        if not 0 < getattr(sizes, name) <= _U32:
            raise PlanError(f"cache plan {name}: expected 1 to {_U32}, got {getattr(sizes, name)}")
    if sizes.linear_num_value_heads % sizes.linear_num_key_heads:
        raise PlanError(
            f"cache plan linear_num_value_heads: expected a multiple of {sizes.linear_num_key_heads} key heads, got"
            f" {sizes.linear_num_value_heads}"
        )
    for kind in (FULL, LINEAR):
        if kind not in sizes.layer_types:
            raise PlanError(f"cache plan: expected both layer kinds, got no {kind} layer")


def _planned_buffer(role: str, shape: tuple[int, ...]) -> BufferRecord:
    if not shape or min(shape) < 1:
        raise PlanError(f"cache buffer {role}: expected axes above 0, got {list(shape)}")
    size = 4
    for axis in shape:
        size = _checked(size * axis, f"bytes of {role}")
    return BufferRecord(role=role, shape=shape, dtype="f32", byte_len=size)


def _checked(value: int, what: str) -> int:
    """Return the value if it fits 64 bits unsigned, as every number of the v1 view does."""
    if value > _U64:
        raise PlanError(f"cache plan {what}: expected at most {_U64}, got {value}")
    return value


def _receipt_sha256(receipt: CacheReceipt) -> str:
    device: dict[str, Any] = (
        {"device_identity": receipt.device_identity}
        if receipt.device_registry_id is None
        else {"device_registry_id": receipt.device_registry_id}
    )
    return _v1_sha256(
        {
            "schema_version": receipt.schema_version,
            "profile": receipt.profile,
            "layout_sha256": receipt.plan.layout_sha256,
            "device_name": receipt.device_name,
            **device,
            "actual_payload_bytes": receipt.actual_payload_bytes,
            "fresh_semantic_state": receipt.fresh_semantic_state,
        }
    )


def _v1_sha256(view: Mapping[str, Any]) -> str:
    text = json.dumps(_plain_value(dict(view)), separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _plain(value: Any) -> dict[str, Any]:
    form: dict[str, Any] = _plain_value(asdict(value))
    return form


def _plain_value(value: Any) -> Any:
    if isinstance(value, BufferRecord):
        return _plain_value(asdict(value))
    if isinstance(value, dict):
        return {name: _plain_value(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain_value(item) for item in value]
    return value


_TYPES = {"int": int, "str": str, "bool": bool, "int | None": int, "str | None": str}


def _fields_of(kind: type[Any], form: Mapping[str, Any], subject: str) -> dict[str, Any]:
    """Return the form's fields after checking that they are exactly the dataclass's, with its simple types."""
    wanted = {field.name: str(field.type) for field in fields(kind)}
    if set(form) != set(wanted):
        odd = sorted(set(form) ^ set(wanted))
        raise ReceiptFormatError(f"{subject}: expected fields {sorted(wanted)}, got a difference in {odd}")
    for name, type_name in wanted.items():
        expected = _TYPES.get(type_name)
        if expected is None or (form[name] is None and type_name.endswith("None")):
            continue
        if name == "device_registry_id":
            continue  # a string in JSON; from_dict reads it
        if type(form[name]) is not expected:
            raise ReceiptFormatError(f"{subject} {name}: expected {type_name}, got {type(form[name]).__name__}")
    return dict(form)


def _buffer_from_dict(form: Any) -> BufferRecord:
    if not isinstance(form, Mapping):
        raise ReceiptFormatError(f"cache buffer: expected an object, got {type(form).__name__}")
    values = _fields_of(BufferRecord, form, "cache buffer")
    shape = values["shape"]
    if not isinstance(shape, list | tuple) or not all(type(axis) is int for axis in shape):
        raise ReceiptFormatError(f"cache buffer {values['role']}: expected a shape of integers, got {shape!r}")
    values["shape"] = tuple(shape)
    return BufferRecord(**values)
