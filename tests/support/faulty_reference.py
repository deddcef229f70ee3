"""A PyTorch side with one fault, for the fault matrix."""

from typing import Any

import torch

from teacher.sides.reference import TransformersReference


class PatchedPyTorch(TransformersReference):
    """Someone patched it: layer 3's key norm lacks its +1."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, parameter in self._model.named_parameters():
            if name.endswith("layers.3.self_attn.k_norm.weight"):
                with torch.no_grad():
                    parameter.sub_(1.0)
