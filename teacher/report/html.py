"""A checked run as one HTML page that needs nothing else: no network, no script, no font of its own.

Tokens, names and notes are a stranger's words: the template escapes all of them, characters that cannot be seen are
spelled out, and the page forbids scripts by its own policy. The same receipts give the same bytes with one version of
Matplotlib.
"""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from receipts.chain import RunCheck
from receipts.comparison import Comparison
from receipts.findings import Audit, TensorFinding
from receipts.report import Report
from teacher.report.plain_text import (
    DASH,
    decibels,
    limit,
    nats,
    place,
    printable,
    printable_end,
    receipt_text,
    seconds,
    share,
    short,
)

_LONGEST_CONTEXT = 2000
_CANDIDATE = ("engine", "package", "package_version", "ggml_version", "model")
_REFERENCE = ("engine", "transformers_version", "torch_version", "device", "dtype")


def render_html(run: RunCheck) -> str:
    """Return the page of a run.

    Args:
        run: what `receipts.chain.verify_run` found in a run folder.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "nats": nats, "short": short, "decibels": decibels, "share": share, "text": printable,
        "context": lambda text: printable_end(text, _LONGEST_CONTEXT), "place": lambda where: place(run, where),
    }  # fmt: skip
    report = run.report
    return environment.get_template("report.html.jinja").render(
        run=run,
        gguf=receipt_text(run, "candidate.json", "file", "name"),
        snapshot=receipt_text(run, "snapshot.json", "origin", "name"),
        report=report,
        verdict=run.verdict,
        limit=limit,
        charts=_charts(report),
        comparisons=_comparisons(report),
        outside=() if report.audit is None else [tensor for tensor in report.audit.tensors if tensor.layer is None],
        faults=_faults(report.audit),
        counts=_counts(report.audit),
        inputs=_inputs(run),
        host=_host(run),
    )


def _charts(report: Report) -> dict[str, Markup]:
    """Return the charts that there is data for."""
    from teacher.report import charts  # matplotlib takes a second to load

    found = {"positions": charts.kld_by_position(report), "distribution": charts.kld_distribution(report)}
    trace = None if report.diagnosis is None else report.diagnosis.localisation
    if trace is not None and trace.layers:
        found["layers"] = charts.layer_errors(trace)
    if trace is not None and trace.operations:
        found["operations"] = charts.operation_errors(trace)
    if report.audit is not None and any(tensor.layer is not None for tensor in report.audit.tensors):
        found["tensors"] = charts.tensor_margins(report.audit)
    return {name: Markup(svg) for name, svg in found.items()}  # built element by element, texts escaped


def _comparisons(report: Report) -> list[tuple[str, Comparison]]:
    """Return (what it is, comparison) of every pair of sides."""
    found = [("floor", report.floor), ("BF16, for scale", report.reference_bf16), ("candidate", report.candidate)]
    found += [("spread", one) for one in report.spread]
    return [(name, one) for name, one in found if one is not None]


def _faults(audit: Audit | None) -> tuple[TensorFinding, ...]:
    """Return the tensors that are not as good as their types allow, the worst first."""
    return () if audit is None else (*audit.of_verdict("wrong"), *audit.of_verdict("worse"))


def _counts(audit: Audit | None) -> str:
    if audit is None:
        return DASH
    words = (("exact", "exact"), ("as_good", "as good as their types allow"), ("worse", "worse"), ("wrong", "wrong"))
    counts = ", ".join(f"{len(audit.of_verdict(verdict))} {word}" for verdict, word in words)
    return f"{len(audit.tensors)} tensors: {counts}"


def _inputs(run: RunCheck) -> list[tuple[str, str]]:
    """Return (name, value) of what was run, by digest where it has one."""
    tokenizer = run.report.tokenizer
    parity = f"{tokenizer.status.replace('_', ' ')} ({tokenizer.texts} texts, {tokenizer.tokens} tokens)"
    if tokenizer.first_difference is not None:
        parity += f": {printable(tokenizer.first_difference)}"
    return [
        ("snapshot", receipt_text(run, "snapshot.json", "origin", "name")),
        ("snapshot commit", receipt_text(run, "snapshot.json", "origin", "commit")),
        ("snapshot root sha256", receipt_text(run, "snapshot.json", "manifest", "root_sha256")),
        ("GGUF", receipt_text(run, "candidate.json", "file", "name")),
        ("GGUF bytes", receipt_text(run, "candidate.json", "file", "size_bytes")),
        ("GGUF sha256", receipt_text(run, "candidate.json", "file", "sha256")),
        ("candidate engine", _description(run, ("candidate.json", "description"), _CANDIDATE)),
        ("reference engine", _description(run, ("reference.json", "float32"), _REFERENCE)),
        ("tokenizers", parity),
        ("vocabulary", f"{run.report.real_vocabulary} tokens in {run.report.vocabulary_rows} rows of logits"),
        ("policy", printable(run.verdict.policy)),
        ("run sha256", run.run_sha256),
    ]


def _description(run: RunCheck, path: tuple[str, ...], keys: tuple[str, ...]) -> str:
    """Return the fields of an engine's description that name it."""
    found = [receipt_text(run, *path, key) for key in keys]
    return ", ".join(text for text in found if text != DASH) or receipt_text(run, path[0], "engine")


def _host(run: RunCheck) -> list[tuple[str, str]]:
    took = seconds(run)
    return [
        ("started", receipt_text(run, "host.json", "started")),
        ("finished", receipt_text(run, "host.json", "finished")),
        ("seconds in comparisons", DASH if took is None else f"{took:.0f}"),
        ("system", receipt_text(run, "host.json", "system")),
    ]
