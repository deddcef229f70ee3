"""The fault matrix: each fault planted in a copy of the golden GGUF, in an engine, in the teacher or in PyTorch.

A fault says what must come out: the verdict, where it is, and what caused it. `run_fault` does what a user does: it
verifies, with the four cells, the localisation and the state checks, on a plan short enough to run all of them.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from receipts.errors import HarnessError
from support.gguf_tools import edit_gguf, tensor_of
from teacher.audit.mapping import SourceTensor, expected_rows, map_tensors
from teacher.gguf.file import read_gguf
from teacher.plans.plan import load_plan
from teacher.sides.roster import Side, Sides
from teacher.snapshot.folder import read_snapshot
from teacher.verification import Options, run_verification

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "golden"
SNAPSHOT = GOLDEN / "qwen35-tiny"
BASE, PLAIN = (GOLDEN / "gguf" / f"qwen35-tiny-{kind}.gguf" for kind in ("Q8_0", "BF16"))
CLEAN = ("BF16", "Q8_0", "Q6_K", "Q4_K_M", "Q4_0", "tied-Q8_0")
ENGINES, REFERENCE = "support.faulty_engines", "support.faulty_reference"
EVERY = slice(None)
OPTIONS = Options(threads=1, spread=())

Values = Callable[[str], np.ndarray]
Edit = Callable[[Path, Path], Path]
"""Writes a faulty copy of a GGUF."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault.

    Attributes:
        name: for people.
        edit: plants it in a GGUF; None where it is none of the file's.
        options: settings of the run that plant it elsewhere.
        verdict: what must come out: "FAIL", "INCONCLUSIVE", or the class of the error that refuses the input.
        place, cause: patterns that one sentence must hold, both.
        layer: what the replay must find first: part, layer and operation (None is any); None where it need not.
        in_both: whether a converter puts it into an unquantized file as well, so that llama.cpp can be asked.
    """

    name: str
    edit: Edit | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    verdict: str = "FAIL"
    place: str
    cause: str
    layer: tuple[str, int | None, str | None] | None = None
    in_both: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What came out.

    Attributes:
        verdict: the status, or the class of the error.
        sentences: everything that was said.
        findings: what was said of causes.
        culprits: (part, layer, operation) of everything out of its band.
        seconds: of the run.
    """

    verdict: str
    sentences: tuple[str, ...]
    findings: tuple[str, ...]
    culprits: tuple[tuple[str, int | None, str | None], ...]
    seconds: float

    def caught(self, fault: Fault) -> bool:
        """Say whether the verdict is the right one."""
        return self.verdict == fault.verdict

    def localised(self, fault: Fault) -> bool:
        """Say whether a sentence holds the place, and the replay found the layer it should."""
        wanted = fault.layer
        if wanted is not None:
            first = next((one for one in self.culprits if one[0] == wanted[0]), None)
            if first is None or first[1] != wanted[1] or wanted[2] not in (None, first[2]):
                return False
        return any(re.search(fault.place, sentence) for sentence in self.sentences)

    def named(self, fault: Fault) -> bool:
        """Say whether the sentence with the place names the cause."""
        return any(re.search(fault.place, one) and re.search(fault.cause, one) for one in self.sentences)


def write_plan(folder: Path) -> Path:
    """Write four short examples with calls of their own; the third begins like the first."""
    plan = load_plan(None, SNAPSHOT, vocabulary_rows=2048, max_sequence_tokens=4096, call_shape="prefill")
    ids = [example.token_ids for example in plan.examples if len(example.token_ids) >= 100][:4]
    lines = [ids[0][:96], ids[1][:96], (*ids[0][:40], *ids[2][:56]), ids[3][:80]]
    path = folder / "plan.jsonl"
    path.write_text(
        "".join(
            json.dumps({"name": f"example-{i}", "token_ids": list(line), "calls": [len(line) - 17, 1, 16]}) + "\n"
            for i, line in enumerate(lines)
        )
    )
    return path


def write_policy(folder: Path) -> Path:
    """Write the shipped policy of the faults' base, content with a short plan."""
    text = (ROOT / "ci" / "policies" / "q8_0.toml").read_text()
    text = re.sub(r"min_positions = \d+", "min_positions = 300", text)
    path = folder / "q8_0.toml"
    path.write_text(re.sub(r"min_examples = \d+", "min_examples = 4", text))
    return path


def run_fault(name: str, folder: str) -> Found:
    """Plant a fault in a new folder below `folder`, and verify."""
    fault = fault_of(name)
    with _place(folder, name) as place:
        path = BASE if fault.edit is None else fault.edit(BASE, place / BASE.name)
        options = replace(OPTIONS, **fault.options)
        return _verify(SNAPSHOT, path, options, plan=write_plan(place), policy=write_policy(place))


def run_clean(kind: str) -> Found:
    """Verify a clean file with the built-in plan and the policy shipped for its type."""
    snapshot = GOLDEN / ("qwen35-tiny-tied" if kind.startswith("tied") else "qwen35-tiny")
    return _verify(snapshot, GOLDEN / "gguf" / f"qwen35-tiny-{kind}.gguf", OPTIONS, plan=None, policy=None)


def engines_own_kld(name: str | None, folder: str) -> float | None:
    """Return the mean KLD, in nats, of the engine on the BF16 GGUF against the engine on the Q8_0, both faulty.

    It is what `llama-perplexity --kl-divergence` computes with the BF16 GGUF as its base: no source is involved. None
    for a fault that is not in both files; infinite where no row is finite; a name of None takes the clean files.
    """
    fault = None if name is None else fault_of(name)
    if fault is not None and (fault.edit is None or not fault.in_both):
        return None
    with _place(folder, f"kld {name}") as place:
        path = write_plan(place)
        plan = load_plan(path, SNAPSHOT, vocabulary_rows=2048, max_sequence_tokens=4096, call_shape="prefill")
        paths = [
            base if fault is None or fault.edit is None else fault.edit(base, place / base.name)
            for base in (PLAIN, BASE)
        ]
        limits = {"max_sequence_tokens": 128, "max_call_tokens": 128}
        pair = [Side(path.stem, "llama_cpp", {"gguf": str(path), **limits}, plan) for path in paths]
        sides = Sides(threads=1, real_vocabulary=2028, on_progress=lambda *_: None)
        try:
            found = sides.compare(*pair).kl_nats
        except HarnessError:  # llama.cpp does not load it: that is seen
            return math.inf
        return math.inf if found is None else found.mean


def fault_of(name: str) -> Fault:
    """Return the fault of a name."""
    return next(fault for fault in FAULTS if fault.name == name)


@contextmanager
def _place(folder: str, name: str) -> Iterator[Path]:
    place = Path(folder) / re.sub(r"\W+", "-", name)
    place.mkdir()
    try:
        yield place
    finally:
        shutil.rmtree(place)


def _verify(snapshot: Path, path: Path, options: Options, *, plan: Path | None, policy: Path | None) -> Found:
    """Verify a file as a user does."""
    began = time.monotonic()
    try:
        outcome = run_verification(snapshot, path, plan, policy, out=None, options=options, on_progress=lambda *_: None)
    except HarnessError as error:
        return Found(
            verdict=type(error).__name__, sentences=(str(error),), findings=(str(error),), culprits=(),
            seconds=time.monotonic() - began,
        )  # fmt: skip
    audit, diagnosis = outcome.report.audit, outcome.report.diagnosis
    located = None if diagnosis is None else diagnosis.localisation
    findings = (*(() if audit is None else audit.sentences), *(() if diagnosis is None else diagnosis.sentences))
    return Found(
        verdict=outcome.verdict.status,
        sentences=(*findings, *outcome.report.notes, outcome.verdict.reason),
        findings=findings,
        culprits=() if located is None else tuple((one.part, one.layer, one.operation) for one in located.culprits),
        seconds=time.monotonic() - began,
    )


# How faults are planted.


def tensors(change: Callable[[Values], Mapping[str, np.ndarray]], types: Mapping[str, str] | None = None) -> Edit:
    """Replace tensors; `change` is given a function from names to values."""

    def edit(base: Path, target: Path) -> Path:
        return edit_gguf(base, target, tensors=change(lambda name: tensor_of(base, name)), types=types)

    return edit


def one(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Edit:
    """Change one tensor's values."""
    return tensors(lambda values: {name: change(values(name))})


def keys(**changes: Any) -> Edit:
    """Change metadata; two underscores stand for a dot."""
    named = {name.replace("__", "."): value for name, value in changes.items()}
    return lambda base, target: edit_gguf(base, target, metadata=named)


def edited_list(key: str, change: Callable[[list[Any]], list[Any]]) -> Edit:
    """Change a list in the metadata."""
    return lambda base, target: edit_gguf(base, target, metadata={key: change(list(read_gguf(base).metadata[key]))})


def block(name: str, data: list[int]) -> Edit:
    """Write bytes over the scale of one Q8_0 block."""

    def edit(base: Path, target: Path) -> Path:
        shutil.copyfile(base, target)
        found = {tensor.name: tensor for tensor in gguf.GGUFReader(target, "r+").tensors}
        found[name].data[3, 0 : len(data)] = data
        found[name].data.flush()
        return target

    return edit


def remade(name: str, **left_out: Any) -> Edit:
    """Write a tensor as the converter makes it of its source, but for the parts of its map that are replaced."""

    def change(values: np.ndarray) -> np.ndarray:
        snapshot = read_snapshot(SNAPSHOT)
        mapping = next(one for one in map_tensors(snapshot.config) if one.name == name)
        source = SourceTensor(snapshot, mapping.source)
        return expected_rows(source, replace(mapping, **left_out), EVERY).reshape(values.shape)

    return one(name, change)


def raw(name: str) -> Edit:
    """Write the source's values, in the converter's order, without the converter's arithmetic."""
    return remade(name, function="plain")


def unordered(name: str) -> Edit:
    """Write a tensor in the source's order of value heads."""
    return remade(name, rows=None, columns=None)


def all_norms(values: Values) -> dict[str, np.ndarray]:
    """Take the +1 from every norm of the residual stream."""
    names = [f"blk.{layer}.{kind}.weight" for layer in range(8) for kind in ("attn_norm", "post_attention_norm")]
    return {name: values(name) - 1 for name in (*names, "output_norm.weight")}


def swapped_norms(values: Values) -> dict[str, np.ndarray]:
    """Exchange query and key norm of layer 3."""
    query, key = "blk.3.attn_q_norm.weight", "blk.3.attn_k_norm.weight"
    return {query: values(key), key: values(query)}


def halves(values: np.ndarray) -> np.ndarray:
    """Put all queries before all gates, where each head has its query and then its gate."""
    heads = values.reshape(4, 2, 64, -1)
    return np.concatenate([heads[:, 0], heads[:, 1]]).reshape(values.shape)


def swapped_layers(base: Path, target: Path) -> Path:
    """Exchange layers 1 and 2."""
    names = [tensor.name for tensor in read_gguf(base).tensors if tensor.name.startswith(("blk.1.", "blk.2."))]
    other = {name: f"blk.{'2' if name[4] == '1' else '1'}{name[5:]}" for name in names}
    return edit_gguf(base, target, tensors={name: tensor_of(base, other[name]) for name in names})


def stale(values: np.ndarray) -> np.ndarray:
    """Add the noise of some more steps of training, 2 % of each value."""
    noise = np.random.default_rng(1).normal(size=values.shape).astype(np.float32)
    return values * (1 + np.float32(0.02) * noise)


def swap_merges(merges: list[Any]) -> list[Any]:
    """Exchange two merges that no text of the parity check needs in order."""
    return [*merges[:-2], merges[-1], merges[-2]]


def _conversion() -> Iterator[Fault]:
    yield Fault(
        name="ssm_a of the other sign", edit=one("blk.2.ssm_a", np.negative), place=r"blk\.2\.ssm_a",
        cause="its sign is reversed", layer=("weights", 2, "decay"),
    )  # fmt: skip
    yield Fault(
        name="A_log left raw", edit=raw("blk.4.ssm_a"), place=r"blk\.4\.ssm_a", cause="looks like A_log itself",
        layer=("weights", 4, "decay"),
    )  # fmt: skip
    yield Fault(
        name="dt_bias dropped", edit=one("blk.1.ssm_dt.bias", np.zeros_like), place=r"blk\.1\.ssm_dt\.bias",
        cause="every value is 0", layer=("weights", 1, "decay"),
    )  # fmt: skip
    yield Fault(
        name="norm without +1, one layer", edit=raw("blk.4.attn_norm.weight"), place=r"blk\.4\.attn_norm",
        cause=r"norm weight lacks \+1", layer=("weights", 4, "input norm"),
    )  # fmt: skip
    yield Fault(
        name="norm without +1, all layers", edit=tensors(all_norms), place=r"blk\.0\.attn_norm",
        cause=r"norm weight lacks \+1", layer=("weights", 0, "input norm"),
    )  # fmt: skip
    yield Fault(
        name="norm without +1, final norm", edit=raw("output_norm.weight"), place="output_norm",
        cause=r"norm weight lacks \+1", layer=("weights", None, "final norm"),
    )  # fmt: skip
    yield Fault(
        name="gated norm given +1", edit=one("blk.6.ssm_norm.weight", lambda values: values + 1),
        place=r"blk\.6\.ssm_norm", cause=r"gated norm has \+1", layer=("weights", 6, "gated norm"),
    )  # fmt: skip
    yield Fault(
        name="query and key norm swapped", edit=tensors(swapped_norms), place=r"blk\.3\.attn_q_norm",
        cause="matches attn_k_norm, expected attn_q_norm", layer=("weights", 3, "query norm"),
    )  # fmt: skip
    for kind, operation in (
        ("attn_qkv.weight", "query, key and value projection"), ("attn_gate.weight", "gate projection"),
        ("ssm_alpha.weight", "decay"), ("ssm_beta.weight", "beta"), ("ssm_conv1d.weight", "convolution"),
        ("ssm_a", "decay"), ("ssm_dt.bias", None), ("ssm_out.weight", "output projection"),
    ):  # fmt: skip
        # This model's biases are so alike that exchanging them does less to the layer than Q8_0 itself.
        layer = None if operation is None else ("weights", 5, operation)
        yield Fault(
            name=f"value heads not reordered, {kind}", edit=unordered(f"blk.5.{kind}"),
            place=rf"blk\.5\.{re.escape(kind)}", cause="value heads not reordered", layer=layer,
        )  # fmt: skip
    yield Fault(
        name="convolution taps reversed",
        edit=one("blk.0.ssm_conv1d.weight", lambda values: np.ascontiguousarray(values[:, ::-1])),
        place=r"blk\.0\.ssm_conv1d", cause="taps reversed", layer=("weights", 0, "convolution"),
    )  # fmt: skip
    yield Fault(
        name="query and gate halves not interleaved", edit=one("blk.3.attn_q.weight", halves),
        place=r"blk\.3\.attn_q\.weight", cause="stand in two halves", layer=("weights", 3, "query and gate projection"),
    )  # fmt: skip
    yield Fault(
        name="two layers swapped", edit=swapped_layers, place=r"blk\.1\.", cause="matches layer 2, expected layer 1",
        layer=("weights", 1, None),
    )  # fmt: skip
    yield Fault(
        name="a tensor of another layer",
        edit=tensors(lambda values: {"blk.6.ffn_up.weight": values("blk.7.ffn_up.weight")}),
        place=r"blk\.6\.ffn_up", cause="matches layer 7, expected layer 6",
        layer=("weights", 6, "feed-forward gate and up"),
    )  # fmt: skip
    yield Fault(
        name="a stale tensor", edit=one("blk.5.ffn_up.weight", stale), place=r"blk\.5\.ffn_up", cause="is worse",
    )  # fmt: skip
    yield Fault(
        name="embedding rows permuted", edit=one("token_embd.weight", lambda values: np.roll(values, 17, axis=0)),
        place="token_embd", cause="rows permuted", layer=("weights", None, "embedding"),
    )  # fmt: skip
    yield Fault(
        name="output head tied", edit=tensors(lambda values: {"output.weight": values("token_embd.weight")}),
        place="output.weight", cause="matches token_embd",
    )  # fmt: skip
    yield Fault(
        name="output head left out", edit=lambda base, target: edit_gguf(base, target, drop=("output.weight",)),
        verdict="GgufError", place="output.weight", cause="got none",
    )  # fmt: skip


def _metadata() -> Iterator[Fault]:
    yield Fault(
        name="rope theta", edit=keys(qwen35__rope__freq_base=10000.0), place="rope.freq_base",
        cause="got 10000", layer=("engine", 3, "rotated keys"),
    )  # fmt: skip
    yield Fault(
        name="rope dimension count", edit=keys(qwen35__rope__dimension_count=32), place="rope.dimension_count",
        cause="got 32", layer=("engine", 3, "rotated keys"),
    )  # fmt: skip
    yield Fault(
        name="rope sections", edit=keys(qwen35__rope__dimension_sections=[2, 1, 1, 0]),
        place="rope.dimension_sections", cause=r"got \[2, 1, 1",
    )  # fmt: skip
    yield Fault(
        name="epsilon 1e-5", edit=keys(qwen35__attention__layer_norm_rms_epsilon=1e-5),
        place="layer_norm_rms_epsilon", cause="got 1e-05", layer=("engine", 0, "gated norm"),
    )  # fmt: skip
    yield Fault(
        name="layer schedule shifted", edit=keys(qwen35__full_attention_interval=2), verdict="GgufError",
        place="full_attention_interval", cause="got",
    )  # fmt: skip
    yield Fault(
        name="tokenizer merges altered", edit=edited_list("tokenizer.ggml.merges", swap_merges),
        place="tokenizer.ggml.merges", cause="at merge",
    )  # fmt: skip
    yield Fault(
        name="vocabulary entries exchanged",
        edit=edited_list("tokenizer.ggml.tokens", lambda tokens: [*tokens[:300], tokens[301], tokens[300],
                                                                   *tokens[302:]]),
        verdict="PlanError", place="tokenizer.ggml.tokens", cause="at token 300",
    )  # fmt: skip
    yield Fault(
        name="chat template altered", edit=keys(tokenizer__chat_template="{{ messages[0].content }}"),
        place="tokenizer.chat_template", cause="at character",
    )  # fmt: skip
    yield Fault(
        name="eos id altered", edit=keys(tokenizer__ggml__eos_token_id=7), place="tokenizer.ggml.eos_token_id",
        cause="got 7",
    )  # fmt: skip


def _types() -> Iterator[Fault]:
    name = "blk.1.ffn_up.weight"
    yield Fault(
        name="a block's scale zeroed", edit=block(name, [0, 0]), place=r"blk\.1\.ffn_up", cause="block is all zero",
        in_both=False,
    )  # fmt: skip
    yield Fault(
        name="a block of NaN", edit=block(name, [0, 0x7E]), place=r"blk\.1\.ffn_up",
        cause="block holds NaN or infinity", in_both=False,
        layer=("weights", 1, "feed-forward gate and up"),
    )  # fmt: skip
    yield Fault(
        name="a type lower than named", edit=tensors(lambda values: {name: values(name)}, types={name: "Q4_0"}),
        place=r"blk\.1\.ffn_up", cause="is Q4_0 in a Q8_0 file", in_both=False,
    )  # fmt: skip


def _engines() -> Iterator[Fault]:
    yield Fault(
        name="cache not reset between examples", options={"engine": f"{ENGINES}:CacheNotReset"},
        place="state between examples", cause="the engine's cache is not reset",
    )  # fmt: skip
    yield Fault(
        name="convolution state off by one between calls", options={"engine": f"{ENGINES}:ConvolutionOffByOne"},
        place="linear attention layers 0", cause="carries from call to call is wrong",
        layer=("engine", 0, "convolution"),
    )  # fmt: skip
    yield Fault(
        name="prompt cache hit with a wrong state", options={"engine": f"{ENGINES}:WrongPromptCache"},
        place="'example-0', which begins with the same 40 tokens",
        cause="a prompt cache hit replays a wrong state",
    )  # fmt: skip
    yield Fault(
        name="attention scores scaled wrong", options={"engine": f"{ENGINES}:WrongScaleEngine"},
        place="layer 3", cause="the engine: .* first in its query norm", layer=("engine", 3, "query norm"),
    )  # fmt: skip
    yield Fault(
        name="TF32 in the teacher", options={"teacher": f"{ENGINES}:Tf32Teacher"}, verdict="PrecisionError",
        place="teacher product", cause="TF32",
    )  # fmt: skip
    yield Fault(
        name="teacher's residual stream rounded to BF16", options={"teacher": f"{ENGINES}:RoundedStreamTeacher"},
        verdict="INCONCLUSIVE", place="the teacher: its residual stream", cause="bfloat16 values alone",
        layer=("reference", 0, None),
    )  # fmt: skip
    yield Fault(
        name="PyTorch patched wrong", options={"reference": f"{REFERENCE}:PatchedPyTorch"}, verdict="INCONCLUSIVE",
        place="three-way check: the teacher and the F64 definition agree", cause="PyTorch is off",
        layer=("reference", 3, "key norm"),
    )  # fmt: skip


FAULTS = (*_conversion(), *_metadata(), *_types(), *_engines())
