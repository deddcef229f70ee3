"""One session: one cache, calls in order, poisoned while a call runs and for good when it fails.

A call takes token ids at the session's next position, runs every layer, and returns logits when asked for them.
What holds before a call is checked before it, what must hold after it is checked after it, and a call that fails
waits for the device before it raises, so that nothing still runs on buffers that nobody owns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from receipts.cache_plan import CachePlan, CacheReceipt
from receipts.errors import IntegrityError, PlanError, SessionError
from teacher.backend.device import current_device, drain
from teacher.backend.precision import measure, verify_precision
from teacher.model.blocks import LayerWeights, apply_layer, prepare_layer
from teacher.model.cache import (
    _SESSION_KEY,
    CacheAuthorization,
    FullSlot,
    PreparedCache,
    Slot,
    verify_fresh_slot,
    verify_slot_layout,
)
from teacher.model.head import OutputHead, embed
from teacher.run.graph_policy import current_policy
from teacher.snapshot.config import ModelConfig
from teacher.snapshot.folder import VerifiedSnapshot
from teacher.snapshot.weights import WeightSource


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResult:
    """What a call with the output head returns.

    Attributes:
        logits: [1, V] float32 of the last row, or [T, V] when all rows were asked for.
        hidden: [T, D] float32, the final norm of the residual stream; logits are a function of it.
        graph_policy_sha256: digest of the policy in force when the call began.
    """

    logits: npt.NDArray[np.float32]
    hidden: npt.NDArray[np.float32]
    graph_policy_sha256: str


def verify_call(token_ids: Sequence[int], position: int, capacity: int, config: ModelConfig) -> None:
    """Refuse a call that cannot run.

    Raises:
        PlanError: it is empty, reaches past the cache, or has an id outside the vocabulary.
    """
    if not token_ids:
        raise PlanError(f"call at position {position}: expected at least one token, got none")
    if position + len(token_ids) > capacity:
        raise PlanError(
            f"call at position {position}: expected at most {capacity - position} tokens (cache of {capacity}), got"
            f" {len(token_ids)}"
        )
    for offset, token in enumerate(token_ids):
        if not 0 <= token < config.vocab_size:
            raise PlanError(
                f"token at position {position + offset}: expected an id below {config.vocab_size}, got {token}"
            )


class Session:
    """The BF16 source-teacher on one cache.

    Args:
        snapshot: a verified snapshot; `finish` returns it after hashing its files again.
        prepared: a fresh cache, moved in for good.
    """

    def __init__(self, snapshot: VerifiedSnapshot, prepared: PreparedCache) -> None:
        self._device = current_device()
        verify_precision(measure())
        self._snapshot = snapshot
        self._config: ModelConfig = snapshot.config
        self.receipt: CacheReceipt = prepared.receipt
        self._slots: tuple[Slot, ...] = prepared.into_session(CacheAuthorization(_SESSION_KEY))
        self._position = 0
        self._poisoned = False
        self._finished = False
        self._verify_fresh()
        source = WeightSource(snapshot)
        self._source = source
        self._layers: tuple[LayerWeights, ...] = tuple(
            prepare_layer(source.layer(i)) for i in range(self._config.num_hidden_layers)
        )
        self._head = OutputHead(source, self._config)

    @property
    def next_position(self) -> int:
        """Position of the first token of the next call."""
        return self._position

    @property
    def poisoned(self) -> bool:
        """Whether a failed call has made the session unusable."""
        return self._poisoned

    @property
    def _plan(self) -> CachePlan:
        return self.receipt.plan

    def run_call(
        self, token_ids: Sequence[int], *, evaluate_output_head: bool = True, all_rows: bool = False
    ) -> CallResult | None:
        """Run one forward over `token_ids` at the next position.

        Args:
            token_ids: at least one id.
            evaluate_output_head: without it the call only advances the cache, and still completes.
            all_rows: logits of every row and not of the last alone.

        Returns:
            Logits and hidden state, or None without the output head.

        Raises:
            SessionError: the session is poisoned or finished.
            PlanError: the call cannot run; the session stays usable.
        """
        self._require_usable()
        verify_call(token_ids, self._position, self._plan.max_sequence_tokens, self._config)
        self._preflight()
        policy = current_policy(self._device, precision_passed=True)
        end = self._position + len(token_ids)
        flips = tuple(getattr(slot, "flipped", None) for slot in self._slots)
        self._poisoned = True
        try:
            result = self._forward(token_ids, policy.sha256(), evaluate_output_head, all_rows)
            drain()
            self._postflight(end, flips)
        except BaseException as error:
            try:
                drain()
            except Exception as drain_error:
                raise SessionError(
                    f"call at position {self._position}: failed with '{error}', and waiting for the device failed"
                    f" too with '{drain_error}'"
                ) from error
            raise
        self._position = end
        self._poisoned = False
        return result

    def reset_example(self) -> None:
        """Return to a verified fresh cache at position 0."""
        self._require_usable()
        for slot in self._slots:
            slot.reset()
        self._position = 0
        self._verify_fresh()

    def drain_for_completion(self) -> None:
        """Wait for the device before results are used elsewhere."""
        self._require_usable()
        drain()

    def drain_after_failure(self) -> None:
        """Poison the session and wait for the device; for a caller that failed outside a call."""
        self._poisoned = True
        drain()

    def finish(self) -> VerifiedSnapshot:
        """End the session; return the snapshot after hashing its files again.

        Raises:
            DigestMismatchError: a file changed while the session ran.
        """
        self._finished = True
        self._snapshot.rehash()
        return self._snapshot

    def _forward(
        self, token_ids: Sequence[int], policy_sha256: str, evaluate_output_head: bool, all_rows: bool
    ) -> CallResult | None:
        x = embed(self._source, token_ids)
        for weights, slot in zip(self._layers, self._slots, strict=True):
            x = apply_layer(x, weights, self._config, slot, self._position)
        if not evaluate_output_head:
            return None
        hidden = self._head.normalise(x)
        rows = hidden if all_rows else hidden[-1:]
        return CallResult(
            logits=np.concatenate(list(self._head.logits(rows))),
            hidden=np.array(hidden),
            graph_policy_sha256=policy_sha256,
        )

    def _require_usable(self) -> None:
        if self._poisoned:
            raise SessionError("session: expected to be usable, got one poisoned by a call that failed")
        if self._finished:
            raise SessionError("session: expected to be open, got one that is finished")

    def _verify_fresh(self) -> None:
        total = sum(verify_fresh_slot(self._plan, i, slot) for i, slot in enumerate(self._slots))
        if total != self.receipt.actual_payload_bytes:
            raise IntegrityError(f"cache: expected {self.receipt.actual_payload_bytes} bytes as receipted, got {total}")

    def _preflight(self) -> None:
        for layer, slot in enumerate(self._slots):
            verify_slot_layout(self._plan, layer, slot)
            if isinstance(slot, FullSlot) and slot.length != self._position:
                raise IntegrityError(
                    f"layer {layer} cache: expected {self._position} tokens before the call, got {slot.length}"
                )

    def _postflight(self, end: int, flips_before: tuple[bool | None, ...]) -> None:
        for layer, (slot, flipped) in enumerate(zip(self._slots, flips_before, strict=True)):
            verify_slot_layout(self._plan, layer, slot)
            if isinstance(slot, FullSlot):
                if slot.length != end:
                    raise IntegrityError(
                        f"layer {layer} cache: expected {end} tokens after the call, got {slot.length}"
                    )
            elif slot.flipped == flipped:
                raise IntegrityError(f"layer {layer} cache: expected its state to be written once, got no write")
