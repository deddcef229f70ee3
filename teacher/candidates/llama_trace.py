"""What llama.cpp computes on the way to its logits, taken from its evaluation callback.

The engine names the results of its graph ("l_out-3"). The callback asks for some of them by name and copies them
out; everything else runs as it would without it, except that the graph is computed in pieces.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import numpy.typing as npt

from receipts.errors import EngineFailedError
from teacher.candidates.llama_abi import Library
from teacher.process.traces import TraceWriter

F32 = npt.NDArray[np.float32]
EvalCallback = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)

RESIDUAL = re.compile(r"l_out-(\d+)")
EMBEDDING, FINAL_NORM = "model.input_embed", "result_norm"
_SHARED = {
    ("attn_norm", 0): "input norm",
    ("attn_post_norm", 0): "post-attention norm",
    ("ffn_swiglu", 0): "feed-forward gate and up",
    ("ffn_out", 0): "feed-forward down",
}
_LINEAR_NODES = {
    **_SHARED,
    ("linear_attn_qkv_mixed", 0): "query, key and value projection",
    ("conv_output_silu", 0): "convolution",
    ("gate", 0): "decay",
    ("beta_sigmoid", 0): "beta",
    ("attn_output", 0): "delta rule",
    ("z", 0): "gate projection",
    ("final_output", 0): "gated norm",
    ("linear_attn_out", 0): "output projection",
}
_FULL_NODES = {
    **_SHARED,
    ("Qcur_full", 0): "query and gate projection",
    ("Kcur", 0): "key projection",
    ("Vcur", 0): "value projection",
    ("Qcur_normed", 0): "query norm",
    ("Kcur_normed", 0): "key norm",
    ("Kcur", 1): "rotated keys",
    ("attn_pregate", 0): "attention",
    ("attn_gated", 0): "gate",
    ("attn_output", 0): "output projection",
}
NODES = {"linear_attention": _LINEAR_NODES, "full_attention": _FULL_NODES}
"""Kind of layer -> (a node's name without its layer, how often the graph had it before) -> the teacher's operation."""


class _Tensor(ctypes.Structure):
    """The head of ggml's tensor; what stands behind is not needed."""

    _fields_ = (
        ("type", ctypes.c_int32),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
    )


class NodeReader:
    """Copies named results out of the graph while it runs; must live as long as the context.

    Args:
        library: the engine's.
        wanted: names of nodes.
        keep: told (name, how often the graph had that name before, result with the engine's slowest axis first).
    """

    def __init__(self, library: Library, wanted: Collection[str], keep: Callable[[str, int, F32], None]) -> None:
        self._library, self._wanted, self._keep = library, frozenset(wanted), keep
        self._seen: dict[str, int] = {}
        self._error: Exception | None = None
        self.callback = EvalCallback(self._visit)

    def raise_error(self) -> None:
        """Raise what went wrong within the callback, which nothing may leave."""
        if self._error is not None:
            raise EngineFailedError(f"trace: expected readable results, got {self._error}") from self._error

    def _visit(self, tensor: int, ask: bool, _: Any) -> bool:
        try:
            name = (self._library.call("ggml_get_name", tensor) or b"").decode(errors="replace")
            if name not in self._wanted:
                return not ask  # never ends the run
            if not ask and self._error is None:
                if name == EMBEDDING:  # the first result of every graph
                    self._seen.clear()
                before = self._seen.get(name, 0)
                self._seen[name] = before + 1
                self._keep(name, before, self._read(name, tensor))
        except Exception as error:  # an exception that leaves a callback is printed and lost
            self._error = error
        return True

    def _read(self, name: str, address: int) -> F32:
        head = _Tensor.from_address(address)
        if head.type != 0:
            raise EngineFailedError(f"{name}: expected a float32 result, got ggml type {head.type}")
        shape, strides = tuple(head.ne), tuple(head.nb)
        span = 4 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        data = np.empty(span, dtype=np.uint8)
        self._library.call("ggml_backend_tensor_get", address, data.ctypes.data, 0, span)
        return np.array(np.ndarray(shape[::-1], np.float32, data, strides=strides[::-1]))


class GraphTrace:
    """Turns the results of each graph into rows of a trace.

    Args:
        library: the engine's.
        writer: where the rows go.
        layers: decoder layers.
        layer, kind: the layer whose operations are kept, and what it is; None keeps none.
    """

    def __init__(self, library: Library, writer: TraceWriter, layers: int, layer: int | None, kind: str | None) -> None:
        self._writer = writer
        self._first, self._rows = 0, 0
        self._suffix = f"-{layer}"
        self._nodes = {} if kind is None else NODES[kind]
        wanted = {EMBEDDING, FINAL_NORM, *(f"l_out-{index}" for index in range(layers))}
        self.reader = NodeReader(library, wanted | {name + self._suffix for name, _ in self._nodes}, self._keep)

    def _keep(self, name: str, before: int, values: F32) -> None:
        if name == EMBEDDING:  # a call of many tokens is several graphs
            self._first += self._rows
            self._rows = values.reshape(-1, values.shape[-1]).shape[0]
        rows = values.reshape(self._rows, -1)
        found = RESIDUAL.fullmatch(name)
        if name == EMBEDDING:
            self._writer.residual(-1, self._first, rows)
        elif name == FINAL_NORM:
            self._writer.final_norm(self._first, rows)
        elif found:
            self._writer.residual(int(found.group(1)), self._first, rows)
        else:
            operation = self._nodes.get((name.removesuffix(self._suffix), before))
            if operation is not None:
                self._writer.operation(operation, self._first, rows)
