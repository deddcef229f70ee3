"""The teacher as a logit source: replayed once, then recomputed from its hidden states.

The last layer's normalised hidden state is 4 * hidden bytes a token, where a row of logits is 4 * vocabulary; and
logits are an exact function of it. So the first run replays the layers and keeps the hidden states, and every later
run computes the head's products alone, with the same kernel on the same shapes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from receipts.canonical import canonical_bytes
from receipts.digest import sha256_bytes, sha256_file
from receipts.errors import DigestMismatchError
from receipts.files import write_atomic
from teacher.backend.device import current_device, mx
from teacher.backend.precision import measure, verify_precision
from teacher.diagnose import locator
from teacher.gguf.weights import GgufWeights
from teacher.model.head import OutputHead
from teacher.process.sources import LogitBlock, Plan
from teacher.run.graph_policy import current_policy
from teacher.run.replay import call_spans, replay
from teacher.snapshot.folder import read_snapshot
from teacher.snapshot.weights import Weights, WeightSource


class TeacherSource:
    """The BF16 source-teacher behind `teacher.process.sources.LogitSource`.

    Args:
        snapshot: folder of the snapshot, hashed by the caller before and after.
        max_sequence_tokens: capacity of the planned cache.
        threads: as recorded; the BLAS took its own number from the environment before Python started.
        hidden: file of hidden states, [tokens, D] float32 little-endian, examples one after another. Absent: the
            layers are replayed and the file is written, beside it `<hidden>.json` with what the replay recorded.
        gguf: take the weights from this file, dequantized and in the snapshot's layout, and all else as it is.
    """

    def __init__(
        self, *, threads: int, snapshot: str, max_sequence_tokens: int, hidden: str, gguf: str | None = None
    ) -> None:
        self._device = current_device()
        self._precision = measure()
        verify_precision(self._precision)
        self._snapshot = read_snapshot(snapshot)
        self._weights: Weights = (
            WeightSource(self._snapshot) if gguf is None else GgufWeights(Path(gguf), self._snapshot.config)
        )
        self._max_sequence_tokens = max_sequence_tokens
        self._hidden = Path(hidden)
        self._record = Path(hidden + ".json")
        self.on_progress: Callable[[int, int, str], None] = lambda done, total, unit: None

    @staticmethod
    def answer(
        question: Mapping[str, Any], spec: Mapping[str, Any], on_progress: Callable[[int, int, str], Any]
    ) -> Any:
        """Answer a question of the localisation; see `teacher.diagnose.locator.answer`."""
        return locator.answer(question, spec, on_progress)

    def describe(self) -> dict[str, Any]:
        """Return device, graph policy and the measured self-check."""
        policy = current_policy(self._device, precision_passed=True)
        return {
            "engine": "source-teacher",
            "weights": "gguf" if self._weights.folded else "snapshot",
            "device": asdict(self._device),
            "graph_policy": policy.to_dict(),
            "graph_policy_sha256": policy.sha256(),
            "precision": asdict(self._precision),
        }

    def blocks(self, plan: Plan) -> Iterator[LogitBlock]:
        """Yield logits of every position, replaying the layers first when no hidden states are kept."""
        if not self._hidden.is_file():
            self._replay(plan)
        hidden = self._read(plan)
        head = OutputHead(self._weights, self._snapshot.config)
        first = 0
        for index, example in enumerate(plan.examples):
            for call, (start, stop) in enumerate(call_spans(example.calls)):
                position = start
                for rows in head.logits(mx.array(hidden[first + start : first + stop])):
                    yield LogitBlock(example=index, call=call, position=position, logits=rows)
                    position += rows.shape[0]
            first += len(example.token_ids)

    def _replay(self, plan: Plan) -> None:
        done = replay(
            self._snapshot,
            plan,
            max_sequence_tokens=self._max_sequence_tokens,
            weights=self._weights,
            on_layer=lambda layer, layers: self.on_progress(layer, layers, "layers"),
        )
        rows = b"".join(np.ascontiguousarray(x, dtype="<f4").tobytes() for x in done.hidden)
        record = {
            "cache_receipt": done.cache_receipt.to_dict(),
            "graph_policy": done.policy.to_dict(),
            "graph_policy_sha256": done.policy_sha256,
            "precision": asdict(done.precision),
            "hidden_sha256": sha256_bytes(rows).hex,
        }
        write_atomic(self._record, canonical_bytes(record))
        write_atomic(self._hidden, rows)

    def _read(self, plan: Plan) -> np.ndarray[Any, np.dtype[np.float32]]:
        record = json.loads(self._record.read_bytes())
        digest, _ = sha256_file(self._hidden)
        if digest.hex != record["hidden_sha256"]:
            raise DigestMismatchError(
                f"{self._hidden.name}: expected sha256 {record['hidden_sha256']}, got {digest.hex}"
            )
        policy = current_policy(self._device, precision_passed=True).sha256()
        if policy != record["graph_policy_sha256"]:
            raise DigestMismatchError(
                f"graph policy: expected {record['graph_policy_sha256']}, as when the hidden states were made, got"
                f" {policy}"
            )
        tokens = sum(len(example.token_ids) for example in plan.examples)
        return np.fromfile(self._hidden, dtype="<f4").reshape(tokens, self._snapshot.config.hidden_size)
