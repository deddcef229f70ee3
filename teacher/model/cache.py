"""The state of the layers in one session: allocated as planned, checked fresh, receipted, and handed over once.

The plan and the receipt are pure values in `receipts.cache_plan`; here are the F32 buffers they speak of.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from receipts.cache_plan import BufferRecord, CachePlan, CacheReceipt, make_receipt, plan_cache, verify_receipt
from receipts.errors import InputError, IntegrityError, SessionError
from teacher.backend.device import Device, mx
from teacher.snapshot.config import ModelConfig

_ROLE = "blk.{layer}.base_text_cache.{suffix}"


class FullSlot:
    """Keys and values of one full-attention layer.

    Attributes:
        k, v: [1, Hkv, max_tokens, head_dim] float32; rows past `length` are never read.
        length: tokens held.
    """

    suffixes = ("k", "v")

    def __init__(self, k: mx.array, v: mx.array) -> None:
        self.k, self.v, self.length = k, v, 0

    def arrays(self) -> tuple[mx.array, ...]:
        """Return the buffers in plan order."""
        return self.k, self.v

    def is_fresh(self) -> bool:
        """Say whether the slot holds no token."""
        return self.length == 0

    def reset(self) -> None:
        """Forget every token."""
        self.k, self.v, self.length = mx.zeros_like(self.k), mx.zeros_like(self.v), 0


class LinearSlot:
    """Convolution history and delta-rule state of one linear-attention layer, each with the buffer it is written to.

    A call reads the current pair and writes the scratch pair, and then the two change places; a call that fails in
    between leaves the pair it read untouched.

    Attributes:
        conv_state, conv_state_scratch: [channels, history, 1] float32, oldest column first.
        recurrent, recurrent_scratch: [Dk, Dv, Hv, 1] float32.
        flipped: whether the pairs have changed places an odd number of times.
    """

    suffixes = ("conv_state", "conv_state_scratch", "recurrent", "recurrent_scratch")

    def __init__(self, conv: mx.array, conv_scratch: mx.array, state: mx.array, state_scratch: mx.array) -> None:
        self.conv_state, self.conv_state_scratch = conv, conv_scratch
        self.recurrent, self.recurrent_scratch = state, state_scratch
        self.flipped = False

    def arrays(self) -> tuple[mx.array, ...]:
        """Return the buffers in plan order."""
        return self.conv_state, self.conv_state_scratch, self.recurrent, self.recurrent_scratch

    def read(self) -> tuple[mx.array, mx.array]:
        """Return (history [channels, history], state [Hv, Dk, Dv])."""
        return self.conv_state[..., 0], self.recurrent[..., 0].transpose(2, 0, 1)

    def write(self, history: mx.array, state: mx.array) -> None:
        """Write what a call left behind into the scratch pair, and swap."""
        self.conv_state_scratch = mx.contiguous(history[..., None])
        self.recurrent_scratch = mx.contiguous(state.transpose(1, 2, 0)[..., None])
        self.conv_state, self.conv_state_scratch = self.conv_state_scratch, self.conv_state
        self.recurrent, self.recurrent_scratch = self.recurrent_scratch, self.recurrent
        self.flipped = not self.flipped

    def is_fresh(self) -> bool:
        """Say whether history and state are those before the first token."""
        return not self.flipped and not bool(mx.any(self.conv_state != 0)) and not bool(mx.any(self.recurrent != 0))

    def reset(self) -> None:
        """Forget every token."""
        self.conv_state, self.conv_state_scratch = mx.zeros_like(self.conv_state), mx.zeros_like(self.conv_state)
        self.recurrent, self.recurrent_scratch = mx.zeros_like(self.recurrent), mx.zeros_like(self.recurrent)
        self.flipped = False


Slot = FullSlot | LinearSlot


class CacheAuthorization:
    """Permission to move a prepared cache into a session; good for one cache, once.

    Python cannot make it unforgeable. It can make a forgery visible: only `teacher.run.session` holds the key.
    """

    def __init__(self, key: object) -> None:
        if key is not _SESSION_KEY:
            raise SessionError("cache authorization: expected to be made by a session, got another caller")
        self.used = False


_SESSION_KEY = object()


class PreparedCache:
    """A fresh cache with its receipt, before a session owns it."""

    def __init__(self, slots: tuple[Slot, ...], receipt: CacheReceipt) -> None:
        self._slots: tuple[Slot, ...] | None = slots
        self.receipt = receipt

    def into_session(self, authorization: CacheAuthorization) -> tuple[Slot, ...]:
        """Hand the slots over; the second call finds nothing.

        Raises:
            SessionError: the authorization was used before, or the cache has an owner already.
        """
        if authorization.used:
            raise SessionError("cache authorization: expected one use, got a second")
        if self._slots is None:
            raise SessionError("prepared cache: expected no owner, got one that moved it in before")
        authorization.used = True
        slots, self._slots = self._slots, None
        return slots


def allocate_slot(plan: CachePlan, layer: int) -> Slot:
    """Allocate the buffers the plan has for one layer, zeroed, on the device."""
    buffers = {record.role: mx.zeros(record.shape, dtype=mx.float32) for record in layer_records(plan, layer)}
    kind = FullSlot if _ROLE.format(layer=layer, suffix="k") in buffers else LinearSlot
    slot: Slot = kind(*(buffers[_ROLE.format(layer=layer, suffix=s)] for s in kind.suffixes))
    mx.eval(*slot.arrays())
    return slot


def layer_records(plan: CachePlan, layer: int) -> tuple[BufferRecord, ...]:
    """Return the plan's buffer records of one layer, in plan order."""
    prefix = _ROLE.format(layer=layer, suffix="")
    return tuple(record for record in plan.buffer_records if record.role.startswith(prefix))


def verify_fresh_slot(plan: CachePlan, layer: int, slot: Slot) -> int:
    """Check one layer's buffers against the plan and that they hold no token; return their bytes.

    Raises:
        IntegrityError: names the buffer, what the plan has and what is there.
    """
    total = verify_slot_layout(plan, layer, slot)
    if not slot.is_fresh():
        raise IntegrityError(f"layer {layer} cache: expected fresh state, got state left by earlier tokens")
    return total


def verify_slot_layout(plan: CachePlan, layer: int, slot: Slot) -> int:
    """Check names, shapes, dtypes and bytes of one layer's buffers against the plan; return their bytes."""
    planned = layer_records(plan, layer)
    actual = tuple(
        (_ROLE.format(layer=layer, suffix=suffix), tuple(array.shape), array.dtype, array.nbytes)
        for suffix, array in zip(slot.suffixes, slot.arrays(), strict=True)
    )
    expected = tuple((r.role, tuple(r.shape), mx.float32, r.byte_len) for r in planned)
    for want, got in zip(expected, actual, strict=False):
        if want != got:
            raise IntegrityError(f"cache buffer {want[0]}: expected {_words(want)}, got {_words(got)}")
    if len(expected) != len(actual):
        raise IntegrityError(f"layer {layer} cache: expected {len(expected)} buffers, got {len(actual)}")
    return sum(r.byte_len for r in planned)


def _words(buffer: tuple[Any, ...]) -> str:
    role, shape, dtype, size = buffer
    return f"{role} {dtype} {list(shape)} of {size} bytes"


def verify_device_limit(records: Iterable[BufferRecord], device: Device) -> None:
    """Refuse a buffer larger than the device can hold in one piece."""
    if device.max_buffer_bytes is None:
        return
    for record in records:
        if record.byte_len > device.max_buffer_bytes:
            raise InputError(
                f"cache buffer {record.role}: expected at most {device.max_buffer_bytes} bytes on {device.name},"
                f" got {record.byte_len}"
            )


def build_receipt(plan: CachePlan, device: Device, actual_payload_bytes: int) -> CacheReceipt:
    """Return the receipt for buffers that were allocated and checked, itself checked."""
    receipt = make_receipt(
        plan,
        device_name=device.name,
        device_registry_id=device.registry_id,
        device_identity=device.identity,
        actual_payload_bytes=actual_payload_bytes,
        fresh_semantic_state=True,
    )
    verify_receipt(receipt)
    return receipt


def prepare_cache(config: ModelConfig, device: Device, max_sequence_tokens: int) -> PreparedCache:
    """Plan, allocate and check the cache of every layer.

    Raises:
        InputError: the plan's limits or the device's largest buffer are exceeded.
        IntegrityError: what was allocated is not what was planned.
    """
    plan = plan_cache(config.cache_sizes(), max_sequence_tokens)
    verify_device_limit(plan.buffer_records, device)
    slots = tuple(allocate_slot(plan, layer) for layer in range(config.num_hidden_layers))
    actual = sum(verify_fresh_slot(plan, layer, slot) for layer, slot in enumerate(slots))
    return PreparedCache(slots, build_receipt(plan, device, actual))
