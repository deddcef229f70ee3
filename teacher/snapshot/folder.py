"""A model folder as released: its config, where each tensor of the text model lies, and the digest of every file.

Headers, index and config are read first, because they refuse most bad folders in milliseconds; then every file is
hashed in one read. `rehash` at the end of a run says whether the files are still the ones that were read.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from receipts.errors import SnapshotError
from receipts.manifest import SnapshotManifest, build_manifest, compare
from teacher.json_file import read_object
from teacher.snapshot.config import FULL, ModelConfig, read_config
from teacher.snapshot.hub import Origin, locate
from teacher.snapshot.safetensors_file import TensorEntry, read_entries

SCHEMA = "source-teacher/snapshot/v1"
INDEX = "model.safetensors.index.json"
_PREFIXES = ("model.language_model.", "model.")
_OTHER_PARTS = {"vision": ("model.visual.", "visual."), "mtp": ("mtp.", "model.mtp.")}
# Released checkpoints keep these in F32; each is widened exactly whatever it is.
_MAY_BE_F32 = re.compile(r"(norm\.weight|A_log|dt_bias)$")
_SHIFTED_MEAN = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A model folder whose config and headers have been checked.

    Attributes:
        folder: where it lies.
        origin: what the user named.
        config: sizes of the text model.
        tensors: text tensor by its name without prefix ("layers.0.mlp.up_proj.weight") -> where it lies.
        extras: other parts of the checkpoint ("vision", "mtp") -> number of their tensors.
        warnings: what was odd but harmless.
    """

    folder: Path
    origin: Origin
    config: ModelConfig
    tensors: Mapping[str, TensorEntry]
    extras: Mapping[str, int]
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedSnapshot(Snapshot):
    """A snapshot with the digest of every file.

    Attributes:
        manifest: sizes and digests; its root digest is the subject that an OpenSSF `model.sig` signs.
    """

    manifest: SnapshotManifest

    def rehash(self, on_bytes: Callable[[int], None] | None = None) -> None:
        """Hash every file again.

        Raises:
            IntegrityError: a file changed, appeared or went since the snapshot was opened; names it.
        """
        compare(self.manifest, build_manifest(self.folder, on_bytes=on_bytes))

    def record(self) -> dict[str, Any]:
        """Return the snapshot's receipt."""
        config = asdict(self.config)
        config["warnings"] = list(self.warnings)
        return {
            "schema": SCHEMA,
            "origin": asdict(self.origin),
            "manifest": self.manifest.to_dict(),
            "config": config,
            "text_tensors": len(self.tensors),
            "extra_tensors": dict(sorted(self.extras.items())),
        }


def open_snapshot(
    source: str | Path,
    *,
    revision: str | None = None,
    allow_download: bool = False,
    on_bytes: Callable[[int], None] | None = None,
) -> VerifiedSnapshot:
    """Check a model folder and hash every file in it.

    Args:
        source: a folder, or a hub id such as "Qwen/Qwen3.5-4B".
        revision: branch, tag or commit of a hub id.
        allow_download: fetch what the hub's cache lacks.
        on_bytes: told the size of each piece as it is hashed.

    Raises:
        SnapshotError: the folder cannot be used; one sentence says why.
    """
    return hash_snapshot(read_snapshot(source, revision=revision, allow_download=allow_download), on_bytes)


def hash_snapshot(snapshot: Snapshot, on_bytes: Callable[[int], None] | None = None) -> VerifiedSnapshot:
    """Hash every file of a checked folder; `on_bytes` is told the size of each piece."""
    fields = {name: getattr(snapshot, name) for name in Snapshot.__slots__}
    return VerifiedSnapshot(**fields, manifest=build_manifest(snapshot.folder, on_bytes=on_bytes))


def read_snapshot(source: str | Path, *, revision: str | None = None, allow_download: bool = False) -> Snapshot:
    """Check a model folder without hashing it, as a worker does whose caller has hashed it; see `open_snapshot`."""
    folder, origin = locate(source, revision=revision, allow_download=allow_download)
    config = read_config(folder / "config.json")
    entries, warnings = _read_shards(folder)
    tensors, extras = _classify(entries, config)
    _verify_tensors(tensors, config)
    if config.mtp_num_hidden_layers and not extras.get("mtp"):
        warnings.append(f"config.json: {config.mtp_num_hidden_layers} MTP layers are declared, no mtp tensor is there")
    if config.tie_word_embeddings and "lm_head.weight" in tensors:
        warnings += _drop_tied_head(folder, tensors)
    snapshot = Snapshot(
        folder=folder,
        origin=origin,
        config=config,
        tensors=tensors,
        extras=extras,
        warnings=(*config.warnings, *warnings),
    )
    shifted = _shifted_norms(snapshot)
    return snapshot if shifted is None else _with_warning(snapshot, shifted)


def required_tensors(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of every tensor the text model needs."""
    D, I = config.hidden_size, config.intermediate_size  # noqa: E741 - the axis's usual letter
    yield "embed_tokens.weight", (config.vocab_size, D)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", (config.vocab_size, D)
    yield "norm.weight", (D,)
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    linear_keys = config.linear_num_key_heads * config.linear_key_head_dim
    Hv = config.linear_num_value_heads
    linear_values = Hv * config.linear_value_head_dim
    channels = 2 * linear_keys + linear_values
    full = {
        "self_attn.q_proj.weight": (2 * queries, D),  # queries and their gates
        "self_attn.k_proj.weight": (keys, D),
        "self_attn.v_proj.weight": (keys, D),
        "self_attn.o_proj.weight": (D, queries),
        "self_attn.q_norm.weight": (config.head_dim,),
        "self_attn.k_norm.weight": (config.head_dim,),
    }
    linear = {
        "linear_attn.in_proj_qkv.weight": (channels, D),
        "linear_attn.in_proj_z.weight": (linear_values, D),
        "linear_attn.in_proj_a.weight": (Hv, D),
        "linear_attn.in_proj_b.weight": (Hv, D),
        "linear_attn.conv1d.weight": (channels, 1, config.linear_conv_kernel_dim),
        "linear_attn.A_log": (Hv,),
        "linear_attn.dt_bias": (Hv,),
        "linear_attn.norm.weight": (config.linear_value_head_dim,),
        "linear_attn.out_proj.weight": (D, linear_values),
    }
    shared = {
        "input_layernorm.weight": (D,),
        "post_attention_layernorm.weight": (D,),
        "mlp.gate_proj.weight": (I, D),
        "mlp.up_proj.weight": (I, D),
        "mlp.down_proj.weight": (D, I),
    }
    for layer, kind in enumerate(config.layer_types):
        for name, shape in {**shared, **(full if kind == FULL else linear)}.items():
            yield f"layers.{layer}.{name}", shape


def read_bits(folder: Path, entry: TensorEntry) -> npt.NDArray[np.generic]:
    """Map a tensor's elements, flat; BF16 comes as uint16."""
    kind = {"BF16": "<u2", "F32": "<f4"}[entry.dtype]
    count = (entry.stop - entry.start) // np.dtype(kind).itemsize
    return np.memmap(folder / entry.file, dtype=kind, mode="r", offset=entry.start, shape=(count,))


def _read_shards(folder: Path) -> tuple[list[TensorEntry], list[str]]:
    present = sorted(path.name for path in folder.glob("*.safetensors"))
    index = folder / INDEX
    if not index.exists():
        if len(present) != 1:
            raise SnapshotError(
                f"{folder.name}: expected {INDEX} or a single safetensors file, got {len(present)} files"
                f"{_unfinished(folder)}"
            )
        return list(read_entries(folder / present[0])), []
    form = read_object(index)
    weight_map, warnings = form.get("weight_map"), []
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise SnapshotError(f"{INDEX}: expected a weight_map of tensor to file, got {type(weight_map).__name__}")
    named = sorted(set(weight_map.values()))
    for name in named:
        if "/" in name or "\\" in name or not name.endswith(".safetensors"):
            raise SnapshotError(f"{INDEX}: expected names of safetensors files in the folder, got {name!r}")
        if not (folder / name).is_file():
            raise SnapshotError(f"{name}: expected the shard that {INDEX} names, got no such file{_unfinished(folder)}")
    stray = sorted(set(present) - set(named))
    if stray:
        raise SnapshotError(f"{stray[0]}: expected only shards that {INDEX} names, got one it does not")
    entries = [entry for name in named for entry in read_entries(folder / name)]
    found = {entry.name: entry.file for entry in entries}
    for tensor, file in weight_map.items():
        if found.get(tensor) != file:
            place = f"it in {found[tensor]}" if tensor in found else "no such tensor"
            raise SnapshotError(f"{INDEX}: expected {tensor} in {file}, got {place}")
    if len(entries) != len(weight_map):
        extra = next(entry for entry in entries if weight_map.get(entry.name) != entry.file)
        raise SnapshotError(f"{extra.file}: expected only tensors that {INDEX} names, got {extra.name}")
    total = form.get("metadata", {}).get("total_size") if isinstance(form.get("metadata"), dict) else None
    size = sum(entry.stop - entry.start for entry in entries)
    if total is not None and total != size:
        warnings.append(f"{INDEX}: total_size is {total}, the shards hold {size} bytes of tensors")
    return entries, warnings


def _unfinished(folder: Path) -> str:
    """Name a download that was cut off, in the folder or in the hub cache's blobs beside it."""
    places = (folder, folder.parent.parent / "blobs") if folder.parent.name == "snapshots" else (folder,)
    found = sorted(path.name for place in places if place.is_dir() for path in place.glob("*.incomplete"))
    return f" (unfinished download: {found[0]})" if found else ""


def _classify(entries: Iterable[TensorEntry], config: ModelConfig) -> tuple[dict[str, TensorEntry], dict[str, int]]:
    """Sort every tensor of the checkpoint into the text model or another known part; refuse what is neither."""
    required = {name for name, _ in required_tensors(config)} | {"lm_head.weight"}
    tensors: dict[str, TensorEntry] = {}
    extras: Counter[str] = Counter()
    for entry in entries:
        part = next((part for part, marks in _OTHER_PARTS.items() if entry.name.startswith(marks)), None)
        if part is not None:
            extras[part] += 1
            continue
        prefix = next((prefix for prefix in _PREFIXES if entry.name.startswith(prefix)), "")
        name = entry.name.removeprefix(prefix)
        if name not in required or (not prefix and name != "lm_head.weight"):
            hint = " (the source is not BF16)" if "scale" in name else ""
            raise SnapshotError(
                f"{entry.file}: expected tensors of the config's text model, vision or MTP, got {entry.name}{hint}"
            )
        if name in tensors:
            raise SnapshotError(f"{entry.file}: expected {name} once, got {tensors[name].name} and {entry.name}")
        tensors[name] = entry
    return tensors, dict(extras)


def _verify_tensors(tensors: Mapping[str, TensorEntry], config: ModelConfig) -> None:
    for name, shape in required_tensors(config):
        entry = tensors.get(name)
        if entry is None:
            raise SnapshotError(f"{name}: expected the tensor in a shard, got none (config.json asks for it)")
        if entry.shape != shape:
            raise SnapshotError(
                f"{entry.file}: expected {entry.name} of shape {list(shape)} by config.json, got {list(entry.shape)}"
            )
    for name, entry in tensors.items():
        if entry.dtype != "BF16" and not (entry.dtype == "F32" and _MAY_BE_F32.search(name)):
            raise SnapshotError(
                f"{entry.file}: expected {entry.name} in BF16, got {entry.dtype}; the source is not BF16"
            )


def _drop_tied_head(folder: Path, tensors: dict[str, TensorEntry]) -> list[str]:
    head, table = tensors.pop("lm_head.weight"), tensors["embed_tokens.weight"]
    if head.shape != table.shape or not np.array_equal(read_bits(folder, head), read_bits(folder, table)):
        raise SnapshotError(
            f"{head.file}: expected no lm_head.weight, or one equal to the embedding (tie_word_embeddings), got another"
        )
    return [f"{head.file}: lm_head.weight repeats the tied embedding"]


def _shifted_norms(snapshot: Snapshot) -> str | None:
    """Say when norm weights look as if 1 had been added: released ones are stored as w of 1 + w, near 0."""
    means = [
        float(widen_bits(read_bits(snapshot.folder, entry)).mean())
        for name, entry in snapshot.tensors.items()
        if name.endswith(("layernorm.weight", "q_norm.weight", "k_norm.weight"))
    ]
    median = float(np.median(means))
    if median < _SHIFTED_MEAN:
        return None
    return (
        f"norm weights: their mean is {median:.2f} in the median layer, where a released checkpoint stores w of 1 + w"
        " near 0; this looks like a re-saved checkpoint with 1 added"
    )


def _with_warning(snapshot: Snapshot, warning: str) -> Snapshot:
    fields = {name: getattr(snapshot, name) for name in Snapshot.__slots__}
    return Snapshot(**{**fields, "warnings": (*snapshot.warnings, warning)})


def widen_bits(bits: npt.NDArray[np.generic]) -> npt.NDArray[np.float32]:
    """Return the float32 values of stored elements, exactly; BF16 comes as uint16."""
    if bits.dtype == np.uint16:
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return np.asarray(bits, dtype=np.float32)
