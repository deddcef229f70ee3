"""Made-up findings: an audit, a diagnosis and worst positions of any size, with hostile words in them."""

from typing import Any

from receipts.comparison import Bucket, TokenShare, Where, WorstPosition
from receipts.diagnosis import (
    Arbitration,
    Cells,
    Contrast,
    Culprit,
    Diagnosis,
    EndError,
    LayerError,
    Localisation,
    OperationError,
)
from receipts.findings import Audit, MetadataFinding, TensorFinding, TypeFinding
from support.run_folder import comparison

HOSTILE = (
    "<script>alert('x')</script> | `code` $\\frac{1}$ ]]> \x1b[31m\u202e\nnext **bold** @somebody https://e.example"
)
KINDS = (
    "attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "attn_qkv", "attn_gate", "ssm_a", "ssm_conv1d", "ssm_dt",
    "ssm_norm", "ssm_out", "ffn_gate", "ffn_up", "ffn_down",
)  # fmt: skip
FULL = ("attn_q", "attn_k", "attn_v", "attn_output")
LINEAR = ("attn_qkv", "attn_gate", "ssm_a", "ssm_conv1d", "ssm_dt", "ssm_norm", "ssm_out")
OPERATIONS = (
    "attn_norm", "in_proj_qkv", "in_proj_z", "conv1d", "q", "k", "v", "log_decay", "beta", "delta_rule", "gated_norm",
    "out_proj", "post_attention_norm", "gate_proj", "up_proj", "down_proj",
)  # fmt: skip
WRONG_LAYER = 5


def tensor(name: str, *, layer: int | None, kind: str, **changes: Any) -> TensorFinding:
    """One tensor that is as good as its type allows."""
    values: dict[str, Any] = {
        "name": name, "source": f"layers.{layer}.{kind}", "layer": layer, "kind": kind, "type": "Q4_K",
        "shape": (64, 256), "sqnr_db": 24.5, "reachable_sqnr_db": 24.4, "cosine": 0.999, "max_abs_error": 0.01,
        "zeroed_blocks": 0, "nonfinite_blocks": 0, "verdict": "as_good", "cause": None,
    }  # fmt: skip
    return TensorFinding(**{**values, **changes})


def audit(layers: int = 8) -> Audit:
    """An audit that found one wrong tensor, one worse one, a key of either kind, and types of either kind."""
    tensors = [tensor("token_embd.weight", layer=None, kind="token_embd", type="Q6_K")]
    for layer in range(layers):
        for index, kind in enumerate(KINDS):
            if kind in (LINEAR if layer % 4 == 3 else FULL):
                continue
            changes: dict[str, Any] = {"sqnr_db": 24.4 + ((layer * 7 + index * 3) % 13 - 5) / 4}
            if kind in ("attn_norm", "ssm_a", "ssm_norm", "ssm_dt"):
                changes = {"type": "F32", "sqnr_db": None, "reachable_sqnr_db": None, "verdict": "exact"}
            if (layer, kind) == (WRONG_LAYER, "ssm_a"):
                changes |= {"sqnr_db": -6.0, "verdict": "wrong", "cause": "the sign of A_log is lost"}
            if (layer, kind) == (2, "ffn_down"):
                changes |= {"sqnr_db": 19.0, "verdict": "worse", "cause": None}
            tensors.append(tensor(f"blk.{layer}.{kind}.weight", layer=layer, kind=kind, **changes))
    tensors.append(tensor("output_norm.weight", layer=None, kind="output_norm", sqnr_db=None, reachable_sqnr_db=None,
                          type="F32", verdict="exact"))  # fmt: skip
    return Audit(
        file=f"tiny-{HOSTILE}.gguf",
        source_bytes=123456,
        tensors=tuple(tensors),
        metadata=(
            MetadataFinding(key="rope.freq_base", kind="math", sentence="rope.freq_base: expected 1e7, got 1e4"),
            MetadataFinding(key="chat_template", kind="usage", sentence=f"chat_template: expected x, got {HOSTILE}"),
        ),
        types=(
            TypeFinding(name="blk.1.ffn_up.weight", type="Q2_K", label="Q4_K_M", kind="below"),
            TypeFinding(name="blk.1.ffn_gate.weight", type="F32", label="Q4_K_M", kind="above"),
        ),
        notes=("a key nobody knows: general.hello",),
    )


def cells() -> Cells:
    """Four cells in which the engine does more than the weights."""
    weights = comparison(8e-4, actual="gguf weights", kl_histogram=((0.0001, 2), (0.000316228, 3), (0.001, 1)))
    engine = comparison(3e-3, expected="gguf weights", kl_histogram=((0.000316228, 1), (0.00316228, 5)))
    contrasts = (
        ("floor", 1e-11, 1e-12, False), ("weights", 8e-4, 1e-4, True), ("engine", 3e-3, 2e-4, True),
        ("conversion", None, None, False), ("total", 1e-3, None, True), ("interaction", -2e-5, 1e-5, False),
    )  # fmt: skip
    return Cells(
        weights=weights,
        engine=engine,
        conversion=None,
        contrasts=tuple(
            Contrast(name=name, kl_nats_mean=mean, stderr=stderr, above_floor=above, sentence=f"{name} does something")
            for name, mean, stderr, above in contrasts
        ),
    )


def localisation(layers: int = 8) -> Localisation:
    """A trace in which the engine errs in one layer, and the file's weights in another."""
    errors = tuple(_layer(layer) for layer in range(layers))
    operations = tuple(
        OperationError(
            layer=layer, operation=operation, weights=0.01 * (1 + index % 3), reachable=0.0 if index == 0 else 0.012,
            engine=None if index % 5 == 4 else (0.3 if layer == WRONG_LAYER and index >= 9 else 1e-6), reference=None,
        )
        for layer in (2, WRONG_LAYER)
        for index, operation in enumerate(OPERATIONS)
    )  # fmt: skip
    culprits = (
        Culprit(part="weights", layer=2, operation="down_proj", error=0.05, band=0.02,
                sentence="layer 2: the weights are off by 0.05 where 0.02 is reachable, first in down_proj"),
        Culprit(part="engine", layer=WRONG_LAYER, operation="delta_rule", error=0.3, band=1e-4,
                sentence=f"layer 5: the engine is off, first in delta_rule {HOSTILE}"),
        Culprit(part="engine", layer=None, operation=None, error=0.2, band=0.01,
                sentence="the engine's final norm is off by 0.2"),
    )  # fmt: skip
    return Localisation(
        examples=("e0",), positions=4, layers=errors, operations=operations, culprits=culprits, rounding=(),
        ends=(
            EndError(place="embedding", weights=0.004, reachable=0.003, engine=0.0, reference=0.0),
            EndError(place="final norm", weights=0.0, reachable=0.0, engine=None, reference=1e-7),
        ),
    )  # fmt: skip


def _layer(layer: int) -> LayerError:
    wrong = layer == WRONG_LAYER
    return LayerError(
        layer=layer, kind="full_attention" if layer % 4 == 3 else "linear_attention", reference=1e-6 * (1 + layer / 9),
        weights=0.01 * (1 + layer / 6), candidate=(0.3 if layer >= WRONG_LAYER else 0.012) * (1 + layer / 20),
        alone_reference=2e-7, alone_weights=0.05 if layer == 2 else 0.012 + layer % 3 / 1000, alone_reachable=0.0125,
        alone_engine=0.3 if wrong else 1e-4 * (1 + layer % 4), alone_engine_first_calls=1e-4,
        alone_engine_later_calls=0.3 if wrong else None,
    )  # fmt: skip


def diagnosis(layers: int = 8) -> Diagnosis:
    """Everything a diagnosis can hold."""
    return Diagnosis(
        cells=cells(),
        localisation=localisation(layers),
        state=("state: the second example differs from a fresh run by 0.1 nats at position 3",),
        arbitration=Arbitration(
            positions=12, teacher_kl_nats=1e-12, reference_kl_nats=2e-3, between_kl_nats=2e-3,
            sentence="arbitration: teacher and definition agree, PyTorch is off",
        ),
    )  # fmt: skip


def worst(count: int = 2, text: str = HOSTILE) -> tuple[WorstPosition, ...]:
    """Positions whose every text is hostile."""
    top = tuple(TokenShare(token_id=i, text=text if i == 1 else f" word{i}", probability=0.5 / i) for i in range(1, 6))
    return tuple(
        WorstPosition(
            where=Where(example=i % 2, position=i % 2), kl_nats=1.5 / (i + 1), context=f"The lighthouse {text} stood",
            following=None if i else text, expected_top=top, actual_top=top[::-1],
        )
        for i in range(count)
    )  # fmt: skip


def everything(layers: int = 8) -> dict[str, Any]:
    """Fields of a report that has all there can be."""
    buckets = tuple(
        Bucket(label=label, positions=2**i, kl_nats_mean=1e-3 * (1 + i), kl_nats_max=0.05 * (1 + i), top1_agreement=0.9)
        for i, label in enumerate(("0", "1", "2-3", "4-7", "8-15", "16-31", "32-63", "64-127", "128-255", "256-511"))
    )
    floor = tuple(
        Bucket(label=one.label, positions=one.positions, kl_nats_mean=1e-11, kl_nats_max=2e-10, top1_agreement=1.0)
        for one in buckets[:-1]
    )
    return {
        "audit": audit(layers),
        "diagnosis": diagnosis(layers),
        "worst": worst(),
        "floor": comparison(1e-11, actual="pytorch-f32", by_position=floor,
                            kl_histogram=((0.0, 1), (1e-12, 3), (3.16228e-12, 2))),
        "candidate": comparison(by_position=buckets,
                                kl_histogram=((0.0001, 1), (0.000316228, 2), (0.001, 2), (0.01, 1))),
        "notes": (f"a note with {HOSTILE}",),
    }  # fmt: skip
