"""What llama.cpp computes on the way to its logits, taken from its evaluation callback.

The engine names the results of its graph ("l_out-3"). The callback asks for some of them by name and copies them
out; everything else runs as it would without it, except that the graph is computed in pieces.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt

from receipts.errors import EngineFailedError
from teacher.candidates.llama_abi import Library

F32 = npt.NDArray[np.float32]
EvalCallback = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)

RESIDUAL = re.compile(r"l_out-(\d+)")
EMBEDDING, FINAL_NORM = "model.input_embed", "result_norm"
_SHARED = {
    "attn_norm": "input norm",
    "attn_post_norm": "post-attention norm",
    "ffn_swiglu": "feed-forward gate and up",
    "ffn_out": "feed-forward down",
}
LINEAR_NODES = {
    **_SHARED,
    "linear_attn_qkv_mixed": "query, key and value projection",
    "conv_output_silu": "convolution",
    "gate": "decay",
    "beta_sigmoid": "beta",
    "attn_output": "delta rule",
    "z": "gate projection",
    "final_output": "gated norm",
    "linear_attn_out": "output projection",
}
FULL_NODES = {
    **_SHARED,
    "Qcur_full": "query and gate projection",
    "Kcur": "key projection",
    "Vcur": "value projection",
    "Qcur_normed": "query norm",
    "Kcur_normed": "key norm",
    "attn_pregate": "attention",
    "attn_gated": "gate",
    "attn_output": "output projection",
}
"""Name of a node in the engine's graph, without its layer, -> the teacher's name of the operation."""


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
        wanted: names of nodes; the first result of a name in each graph is taken.
    """

    def __init__(self, library: Library, wanted: Collection[str]) -> None:
        self._library, self._wanted = library, frozenset(wanted)
        self._found: dict[str, list[F32]] = {}
        self._error: str | None = None
        self.callback = EvalCallback(self._visit)

    def take(self) -> dict[str, list[F32]]:
        """Return what was read since the last call: for each name one array for each piece of the batch, [n, width].

        Raises:
            EngineFailedError: a result was no float32, or could not be read.
        """
        found, self._found = self._found, {}
        if self._error is not None:
            raise EngineFailedError(self._error)
        return found

    def _visit(self, tensor: int, ask: bool, _: Any) -> bool:
        name = (self._library.call("ggml_get_name", tensor) or b"").decode(errors="replace")
        if name not in self._wanted:
            return not ask  # never ends the run
        if not ask and self._error is None:
            try:
                self._keep(name, tensor)
            except (ValueError, OSError) as error:  # nothing may leave a callback
                self._error = f"{name}: expected a readable result, got {error}"
        return True

    def _keep(self, name: str, address: int) -> None:
        head = _Tensor.from_address(address)
        if head.type != 0:
            self._error = f"{name}: expected a float32 result, got ggml type {head.type}"
            return
        shape, strides = tuple(head.ne), tuple(head.nb)
        span = 4 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        data = np.empty(span, dtype=np.uint8)
        self._library.call("ggml_backend_tensor_get", address, data.ctypes.data, 0, span)
        values = np.ndarray(shape[::-1], np.float32, data, strides=strides[::-1])
        self._found.setdefault(name, []).append(np.array(values))
