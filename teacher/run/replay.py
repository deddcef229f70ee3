"""Layer-major replay: layers outside, calls inside, one layer's weights and one layer's cache in memory at a time.

The layer function, the call boundaries and the head's blocks are the session's, so the bits are the session's too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from receipts.cache_plan import CacheReceipt, plan_cache
from receipts.errors import NonFiniteError
from teacher.backend.device import current_device, drain, mx
from teacher.backend.precision import Precision, measure, verify_precision
from teacher.model.blocks import apply_layer, prepare_layer
from teacher.model.cache import allocate_slot, build_receipt, verify_device_limit, verify_fresh_slot
from teacher.model.head import OutputHead, embed
from teacher.process.sources import Plan
from teacher.run.graph_policy import GraphPolicy, current_policy
from teacher.run.session import verify_call
from teacher.snapshot.folder import Snapshot
from teacher.snapshot.weights import Weights, WeightSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What a replay leaves.

    Attributes:
        hidden: per example [T, D] float32, the final norm of the residual stream.
        policy: the graph policy that held before every call of every layer.
        policy_sha256: its digest.
        precision: the measured self-check.
        cache_receipt: receipt of the cache, checked layer by layer as it was allocated.
    """

    hidden: tuple[npt.NDArray[np.float32], ...]
    policy: GraphPolicy
    policy_sha256: str
    precision: Precision
    cache_receipt: CacheReceipt


def call_spans(calls: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return (start, stop) of each call within its example."""
    stops = np.cumsum(calls).tolist()
    return list(zip([0, *stops[:-1]], stops, strict=True))


def replay(
    snapshot: Snapshot,
    plan: Plan,
    *,
    max_sequence_tokens: int,
    weights: Weights | None = None,
    on_layer: Callable[[int, int], Any] = lambda done, total: None,
) -> Replay:
    """Run a plan through the teacher.

    Args:
        snapshot: a checked snapshot.
        plan: examples and their calls.
        max_sequence_tokens: capacity of the planned cache.
        weights: other weights of the snapshot's model, such as a GGUF's; None takes the snapshot's own.
        on_layer: told (layers done, layers in all) as the run goes on.

    Raises:
        PlanError: a call cannot run.
        PrecisionError: the device does not multiply in F32.
        NonFiniteError: the hidden state holds NaN or infinity; names the layer and example where it first did.
    """
    device = current_device()
    precision = measure()
    verify_precision(precision)
    config = snapshot.config
    for example in plan.examples:
        for start, stop in call_spans(example.calls):
            verify_call(example.token_ids[start:stop], start, max_sequence_tokens, config)
    cache_plan = plan_cache(config.cache_sizes(), max_sequence_tokens)
    verify_device_limit(cache_plan.buffer_records, device)
    policy = current_policy(device, precision_passed=True)
    policy_sha256 = policy.sha256()

    source = weights or WeightSource(snapshot)
    streams = [
        [embed(source, example.token_ids[start:stop]) for start, stop in call_spans(example.calls)]
        for example in plan.examples
    ]
    mx.eval(streams)
    payload = 0
    layers = config.num_hidden_layers
    for layer in range(layers):
        prepared = prepare_layer(source.layer(layer), folded=source.folded)
        slot = allocate_slot(cache_plan, layer)
        payload += verify_fresh_slot(cache_plan, layer, slot)
        for index, (example, stream) in enumerate(zip(plan.examples, streams, strict=True)):
            if index:
                slot.reset()
                verify_fresh_slot(cache_plan, layer, slot)
            for call, (start, _) in enumerate(call_spans(example.calls)):
                if current_policy(device, precision_passed=True) != policy:
                    raise RuntimeError("the graph policy changed during a replay")
                stream[call] = apply_layer(stream[call], prepared, config, slot, start)
            _verify_finite(stream, layer, example.name)
        on_layer(layer + 1, layers)
    drain()
    head = OutputHead(source, config)
    hidden = tuple(np.concatenate([np.array(head.normalise(x)) for x in stream]) for stream in streams)
    return Replay(
        hidden=hidden,
        policy=policy,
        policy_sha256=policy_sha256,
        precision=precision,
        cache_receipt=build_receipt(cache_plan, device, payload),
    )


def _verify_finite(stream: list[mx.array], layer: int, name: str) -> None:
    finite = mx.stack([mx.all(mx.isfinite(x)) for x in stream])
    if not bool(mx.all(finite)):
        call = int(np.argmin(np.array(finite)))
        raise NonFiniteError(
            f"teacher layer {layer}: expected finite values in example '{name}', got NaN or infinity in call {call}"
        )
