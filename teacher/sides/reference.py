"""The reference: transformers' own Qwen3.5 text model on PyTorch, run call by call over its own cache.

Weights come from the snapshot's safetensors, every one of them or none: a model is built without storage, so that
nothing is ever left at a random start. Sizes come from config.json as it is written, and are held against what
transformers made of them.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from receipts.errors import EngineFailedError, EngineMissingError, PlanError, SnapshotError
from teacher.process.frames import rows_per_frame
from teacher.process.sources import LogitBlock, Plan
from teacher.process.traces import TraceWriter

_PREFIXES = ("model.language_model.", "model.")
_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "rms_norm_eps", "linear_num_key_heads", "linear_num_value_heads",
    "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim", "layer_types", "hidden_act",
)  # fmt: skip
_KERNELS = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "causal_conv1d_forward",
            "causal_conv1d_fn", "causal_conv1d_update")  # fmt: skip
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TransformersReference:
    """A snapshot in transformers on a CPU; a LogitSource.

    Attributes:
        snapshot: folder with config.json and safetensors.
        threads: threads of torch's products.
        dtype: "float32" widens the released BF16 values exactly; "bfloat16" runs as `from_pretrained` would.
        attention: "sdpa" (transformers' default) or "eager".
    """

    def __init__(self, *, snapshot: str, threads: int, dtype: str = "float32", attention: str = "sdpa") -> None:
        if dtype not in _DTYPES:
            raise EngineFailedError(f"dtype: expected one of {', '.join(_DTYPES)}, got {dtype!r}", setting="dtype")
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(True)
        torch.set_float32_matmul_precision("highest")
        self._folder = Path(snapshot)
        self._dtype = dtype
        self._attention = attention
        self._text, tied = read_text_config(self._folder)
        self._tied = tied
        self._model, self._ignored = build_model(self._folder, self._text, tied, _DTYPES[dtype], attention)
        self._kernels = kernel_functions()

    def describe(self) -> dict[str, Any]:
        """Return versions, threads, attention and delta-rule implementations, and the BLAS torch was built with."""
        return {
            "engine": "transformers",
            "transformers_version": importlib.metadata.version("transformers"),
            "torch_version": torch.__version__,
            "model_class": type(self._model).__name__,
            "dtype": self._dtype,
            "device": "cpu",
            "attention": self._model.config._attn_implementation,
            "kernels": self._kernels,
            "threads": torch.get_num_threads(),
            "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            "blas": _build_setting("BLAS_INFO"),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "mkldnn": torch.backends.mkldnn.is_available(),
            "vocabulary_rows": self._text["vocab_size"],
            "tied_embeddings": self._tied,
            "ignored_tensors": self._ignored,
        }

    def blocks(self, plan: Plan) -> Iterator[LogitBlock]:
        """Run the plan; each example starts from a cache of its own, carried from call to call.

        Raises:
            PlanError: a token id is outside the vocabulary.
            EngineFailedError: the cache does not hold the positions it was given.
        """
        width = self._text["vocab_size"]
        step = rows_per_frame(width)
        for number, example in enumerate(plan.examples):
            wrong = next((token for token in example.token_ids if not 0 <= token < width), None)
            if wrong is not None:
                raise PlanError(
                    f"example {number}: expected token ids below {width}, got {wrong}", example=number, token=wrong
                )
        for number, example in enumerate(plan.examples):
            cache, first = self._fresh_cache(), 0
            for call, length in enumerate(example.calls):
                hidden = self._hidden(example.token_ids[first : first + length], cache)  # [T, D]
                for row in range(0, length, step):
                    with torch.inference_mode():
                        logits = self._model.lm_head(hidden[row : row + step]).float()  # [n, V]
                    yield LogitBlock(example=number, call=call, position=first + row, logits=logits.numpy())
                first += length
                if cache.get_seq_length() != first:
                    raise EngineFailedError(
                        f"example {number} call {call}: expected a cache of {first} positions,"
                        f" got {cache.get_seq_length()}",
                        example=number,
                        call=call,
                    )

    def trace(self, plan: Plan, writer: TraceWriter, layer: int | None, kind: str | None) -> None:
        """Run the plan and keep what hooks see: the stream after every layer, and one layer's submodules."""
        body, first = self._model.model, 0

        def rows(value: Any) -> Any:
            tensor = value[0] if isinstance(value, tuple) else value
            return tensor.reshape(length, -1).float().numpy()

        hooks = [
            body.embed_tokens.register_forward_hook(lambda _, __, out: writer.residual(-1, first, rows(out))),
            body.norm.register_forward_hook(lambda _, __, out: writer.final_norm(first, rows(out))),
        ]
        for index, block in enumerate(body.layers):
            hooks.append(
                block.register_forward_hook(lambda _, __, out, index=index: writer.residual(index, first, rows(out)))
            )
        for operation, module, is_input in () if layer is None else _operations(body.layers[layer], kind):

            def keep(_: Any, given: Any, out: Any, operation: str = operation, is_input: bool = is_input) -> None:
                writer.operation(operation, first, rows(given if is_input else out))

            hooks.append(module.register_forward_hook(keep))
        try:
            for example in plan.examples:
                cache, at = self._fresh_cache(), 0
                for length in example.calls:
                    self._hidden(example.token_ids[at : at + length], cache)
                    at, first = at + length, first + length
        finally:
            for hook in hooks:
                hook.remove()

    def _fresh_cache(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self._model.config)

    def _hidden(self, ids: tuple[int, ...], cache: Any) -> torch.Tensor:
        """Return the normalised hidden states of one call, [T, D]; the cache changes in place."""
        body = self._model.model
        # Renamed in transformers 5.19; both names are accepted for some releases, then one is not.
        name = "cache" if "cache" in inspect.signature(type(body).forward).parameters else "past_key_values"
        with torch.inference_mode():
            out = body(input_ids=torch.tensor([ids]), use_cache=True, **{name: cache})
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden


def _operations(block: Any, kind: str | None) -> list[tuple[str, Any, bool]]:
    """Return (name of an operation, the module that shows it, whether by its input) of one layer."""
    shared = [
        ("input norm", block.input_layernorm, False),
        ("post-attention norm", block.post_attention_layernorm, False),
        ("feed-forward gate and up", block.mlp.down_proj, True),
        ("feed-forward down", block.mlp.down_proj, False),
    ]
    if kind == "full_attention":
        mixer = block.self_attn
        return [
            *shared,
            ("query and gate projection", mixer.q_proj, False),
            ("key projection", mixer.k_proj, False),
            ("value projection", mixer.v_proj, False),
            ("query norm", mixer.q_norm, False),
            ("key norm", mixer.k_norm, False),
            ("gate", mixer.o_proj, True),
            ("output projection", mixer.o_proj, False),
        ]
    mixer = block.linear_attn
    return [
        *shared,
        ("query, key and value projection", mixer.in_proj_qkv, False),
        ("gate projection", mixer.in_proj_z, False),
        ("gated norm", mixer.out_proj, True),
        ("output projection", mixer.out_proj, False),
    ]


def read_text_config(folder: Path) -> tuple[dict[str, Any], bool]:
    """Return the text model's config as written, and whether the head shares the embedding.

    Raises:
        SnapshotError: there is no config.json, or it describes no dense Qwen3.5.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SnapshotError(f"{path}: expected a JSON config, got {error}", path=str(path)) from error
    text = config.get("text_config", config)
    if text.get("model_type") not in ("qwen3_5_text", "qwen3_5"):
        raise SnapshotError(f"{path}: expected model_type qwen3_5_text, got {text.get('model_type')!r}", path=str(path))
    return text, bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False)))


def build_model(
    folder: Path, text: Mapping[str, Any], tied: bool, dtype: torch.dtype, attention: str
) -> tuple[Any, dict[str, int]]:
    """Return the model with every parameter from the snapshot, and how many tensors of other parts were left out.

    Raises:
        EngineFailedError: a parameter has no tensor, a tensor another shape, or transformers read another size
            than config.json says.
    """
    try:
        from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
    except ImportError as error:
        raise EngineMissingError(f"transformers: expected one with Qwen3.5, got {error}") from error
    settings: dict[str, Any] = {**text, "tie_word_embeddings": tied, "attn_implementation": attention}
    config = Qwen3_5TextConfig(**settings)
    for name in _SIZES:
        if name in text and getattr(config, name) != text[name]:
            raise EngineFailedError(
                f"transformers: expected {name} {text[name]} of config.json, got {getattr(config, name)}", field=name
            )
    with torch.device("meta"):
        model = Qwen3_5ForCausalLM(config)
    tensors, ignored = _text_tensors(folder)
    if tied:
        tensors.setdefault("lm_head.weight", tensors.get("model.embed_tokens.weight", torch.empty(0)))
    _place(model, tensors, dtype, folder)
    # The rotary table is no parameter and has no tensor: it is made anew, with storage.
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config)
    model.eval()
    return model, ignored


def _text_tensors(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """Return the text model's tensors under `Qwen3_5ForCausalLM`'s names, and counts of all others by first name."""
    from safetensors import SafetensorError, safe_open

    found: dict[str, torch.Tensor] = {}
    ignored: dict[str, int] = {}
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise SnapshotError(f"{folder}: expected safetensors files, found none", path=str(folder))
    for path in paths:
        try:
            with safe_open(path, framework="pt") as shard:
                for name in shard.keys():  # noqa: SIM118 - a shard is no mapping
                    inner = _text_name(name)
                    if inner is None:
                        part = ".".join(name.split(".")[: 2 if name.startswith("model.") else 1])
                        ignored[part] = ignored.get(part, 0) + 1
                    else:
                        found[inner] = shard.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise SnapshotError(f"{path}: expected a safetensors file, got {error}", path=str(path)) from error
    return found, ignored


def _text_name(name: str) -> str | None:
    if name == "lm_head.weight":
        return name
    for prefix in _PREFIXES:
        rest = name.removeprefix(prefix)
        if rest != name and re.match(r"layers\.|embed_tokens\.|norm\.", rest):
            return "model." + rest
    return None


def _place(model: Any, tensors: dict[str, torch.Tensor], dtype: torch.dtype, folder: Path) -> None:
    """Give every parameter its tensor, in the run's dtype."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    missing = sorted(set(parameters) - set(tensors))
    if missing:
        raise EngineFailedError(
            f"{folder.name}: expected a tensor for each of {len(parameters)} parameters,"
            f" {len(missing)} are missing, first {missing[0]}",
            missing=missing,
        )
    unused = sorted(set(tensors) - set(parameters))
    if unused:
        raise EngineFailedError(
            f"{folder.name}: expected no tensor beyond the config's layers, got {unused[0]}", unused=unused
        )
    keep = tuple(model._keep_in_fp32_modules or ()) + tuple(model._keep_in_fp32_modules_strict or ())
    state = {}
    for name, parameter in parameters.items():
        tensor = tensors[name]
        if tensor.shape != parameter.shape:
            raise EngineFailedError(
                f"{name}: expected shape {tuple(parameter.shape)}, got {tuple(tensor.shape)}", tensor=name
            )
        if not tensor.is_floating_point() or tensor.element_size() not in (2, 4):
            raise EngineFailedError(f"{name}: expected BF16 or F32 values, got {tensor.dtype}", tensor=name)
        wide = any(part in name.split(".") for part in keep)
        state[name] = tensor.to(torch.float32 if wide else dtype)
    model.load_state_dict(state, strict=True, assign=True)


def kernel_functions() -> dict[str, str]:
    """Return where each delta-rule and convolution function comes from, once sure that all are PyTorch's plain ones.

    Raises:
        EngineFailedError: an installed package has put a fused kernel in the place of one.
    """
    from transformers.models.qwen3_5 import modeling_qwen3_5 as module

    found = {}
    for name in _KERNELS:
        function = getattr(module, name, None)
        if function is None:
            continue
        inner = _innermost(function)
        found[name] = f"{inner.__module__}.{inner.__qualname__}"
        if inner.__module__ != module.__name__:
            raise EngineFailedError(
                f"{name}: expected transformers' own PyTorch function, got {found[name]}", kernel=name
            )
    if not found:
        raise EngineFailedError(f"transformers: expected the functions {', '.join(_KERNELS)}, found none of them")
    return found


def _innermost(function: Any) -> Any:
    """Return what a kernel function calls in the end.

    transformers wraps the plain function once (`implementation` is what it chose); since 5.25 the package `kernels`
    is always installed and turns that into a module whose `forward` calls `func`.
    """
    while True:
        outer = type(function).forward if isinstance(function, torch.nn.Module) else function
        held = inspect.getclosurevars(outer).nonlocals
        inner = held.get("implementation", held.get("func"))
        if inner is None:
            return outer
        function = inner


def _build_setting(name: str) -> str:
    found = re.search(rf"{name}=([^,]*)", torch.__config__.show())
    return found.group(1) if found else "unknown"
