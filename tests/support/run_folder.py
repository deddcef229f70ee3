"""A small run folder made from values alone, without an engine."""

from pathlib import Path
from typing import Any

from receipts.cache_plan import CacheSizes, make_receipt, plan_cache
from receipts.canonical import canonical_bytes
from receipts.chain import RunWriter
from receipts.comparison import Bucket, Comparison, PaddedRows, Stats, Where
from receipts.digest import sha256_bytes
from receipts.manifest import FileEntry, SnapshotManifest
from receipts.policy import Policy
from receipts.report import Report, TokenizerParity
from receipts.verdict import decide

POLICY = b"""
schema = "source-teacher/policy/v1"
name = "small"
reason = "a test"
[floor]
max_share = 0.1
max_kl_nats_mean = 1e-6
reason = "a test"
[sample]
min_positions = 5
min_examples = 2
standard_errors = 2.0
reason = "a test"
[tokenizer]
require = "match"
reason = "a test"
[[limit]]
quantity = "candidate.kl_nats.mean"
max = 0.01
reason = "a test"
[[limit]]
quantity = "candidate.top1_agreement"
min = 0.8
reason = "a test"
"""
CALLS = ((3, 1), (2,))


def stats(mean: float, *, stderr: float | None = None, count: int = 6) -> Stats:
    """A quantity whose every figure follows from its mean."""
    return Stats(
        count=count, mean=mean, stderr=mean / 10 if stderr is None else stderr, median=mean / 2, p90=mean * 2,
        p95=mean * 3, p99=mean * 4, p999=mean * 5, max=mean * 6, max_at=Where(example=1, position=1),
    )  # fmt: skip


def comparison(mean: float = 0.001, **changes: Any) -> Comparison:
    """Two sides that differ by a mean KLD, over the two examples of CALLS."""
    bucket = Bucket(label="first", positions=4, kl_nats_mean=mean, kl_nats_max=mean * 6, top1_agreement=1.0)
    other = Bucket(label="second", positions=2, kl_nats_mean=mean, kl_nats_max=mean, top1_agreement=1.0)
    values: dict[str, Any] = {
        "expected": "teacher", "actual": "candidate", "positions": 6, "examples": 2, "nonfinite_rows": 0,
        "first_nonfinite": None, "constant_rows": 0, "kl_nats": stats(mean), "reverse_kl_nats": stats(mean),
        "top1_agreement": 1.0, "topk_agreement": ((5, 0.99), (10, 0.98)), "expected_top_rank": stats(0.01),
        "observed_probability_change": stats(0.0), "observed_nll_expected": 2.5, "observed_nll_actual": 2.51,
        "nmse_centred": mean / 10, "max_abs_centred": 0.5, "max_abs_centred_at": Where(example=0, position=2),
        "padded": PaddedRows(
            count=3, max_abs_difference=0.1, expected_argmax_in_padding=0, actual_argmax_in_padding=0
        ),
        "kl_histogram": ((0.0, 2), (0.001, 4)),
        "by_position": (bucket,), "by_example": (bucket, other), "by_call_shape": (bucket, other),
    }  # fmt: skip
    return Comparison(**{**values, **changes})


def report(**changes: Any) -> Report:
    """A report that the policy passes."""
    values: dict[str, Any] = {
        "vocabulary_rows": 100, "real_vocabulary": 97, "floor": comparison(1e-11, actual="pytorch-f32"),
        "reference_bf16": None, "candidate": comparison(), "spread": (comparison(1e-4, actual="candidate decode"),),
        "tokenizer": TokenizerParity(status="match", texts=3, tokens=20, first_difference=None), "notes": (),
        "audit": None, "diagnosis": None, "worst": (), "uses": {},
    }  # fmt: skip
    return Report(**{**values, **changes})


def write_run(target: Path, *, changed: dict[str, Any] | None = None) -> Path:
    """Write a whole run folder; `changed` replaces fields of the report."""
    sizes = CacheSizes(
        num_hidden_layers=2, layer_types=("linear_attention", "full_attention"), num_key_value_heads=1, head_dim=8,
        linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=4, linear_value_head_dim=6,
        linear_conv_kernel_dim=4, max_position_embeddings=64, dense=True, intermediate_size=16,
    )  # fmt: skip
    plan = plan_cache(sizes, 8)
    receipt = make_receipt(
        plan, device_name="a processor", device_registry_id=None, device_identity="a processor",
        actual_payload_bytes=sum(record.byte_len for record in plan.buffer_records), fresh_semantic_state=True,
    )  # fmt: skip
    manifest = SnapshotManifest(entries=(FileEntry(path="config.json", size_bytes=2, sha256="ab" * 32),))
    graph_policy = {"schema": "source-teacher/graph-policy/v1", "tf32": "0"}
    graph_sha256 = sha256_bytes(canonical_bytes(graph_policy)).hex
    receipts: dict[str, Any] = {
        "plan.json": {
            "examples": [
                {"name": f"e{i}", "token_ids": list(range(sum(calls))), "calls": list(calls)}
                for i, calls in enumerate(CALLS)
            ]
        },
        "snapshot.json": {"origin": {"name": "tiny", "revision": None, "commit": None}, "manifest": manifest.to_dict()},
        "candidate.json": {"file": {"name": "tiny.gguf", "size_bytes": 9, "sha256": "cd" * 32}, "engine": "llama_cpp"},
        "reference.json": {"float32": {"engine": "transformers"}},
        "cache.json": {"receipt": receipt.to_dict()},
    }
    with RunWriter(target) as writer:
        digests = {}

        def add(name: str, value: dict[str, Any]) -> None:
            digests[name] = writer.add(name, {"schema": f"source-teacher/{name.removesuffix('.json')}/v1", **value})

        for name, value in receipts.items():
            add(name, value)
        calls = [
            {
                "example": i, "call": j, "position": sum(calls[:j]), "rows": rows, "width": 100,
                "teacher_sha256": f"{i}{j}" * 32, "reference_sha256": "12" * 32, "candidate_sha256": "34" * 32,
                "graph_policy_sha256": graph_sha256,
            }
            for i, calls in enumerate(CALLS)
            for j, rows in enumerate(calls)
        ]  # fmt: skip
        uses = {name: digests[name] for name in ("plan.json", "cache.json")}
        add("calls.json", {"uses": uses, "calls": calls, "graph_policy": graph_policy})
        measured = report(uses=dict(digests), **(changed or {}))
        report_sha256 = writer.add("report.json", measured.to_dict())
        policy = Policy.parse(POLICY)
        writer.add_bytes("policy.toml", POLICY)
        verdict = decide(measured, policy, report_sha256=report_sha256, policy_sha256=policy.sha256)
        writer.add("verdict.json", verdict.to_dict())
        add("host.json", {"started": "2026-01-01T00:00:00+00:00", "finished": "2026-01-01T00:01:00+00:00",
                          "system": "Linux"})  # fmt: skip
        return writer.finish()
