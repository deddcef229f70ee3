"""A checked run as JUnit XML: the policy's checks, the file's tensors and the model's layers as test cases.

A check that fails is a failure; one that could not be decided or is invalid is an error of that type. What was not
measured is a skipped case that says so. Names of cases stay the same from run to run, so that a CI shows a history.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TypeVar

from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite

from receipts.chain import RunCheck
from receipts.diagnosis import Diagnosis
from receipts.findings import Audit
from receipts.verdict import Check
from teacher.report.plain_text import limit, printable, receipt_text, seconds

Result = TypeVar("Result", Failure, Error, Skipped)
_OUTSIDE = "outside the layers"


def render_junit(run: RunCheck) -> str:
    """Return the XML of a run.

    Args:
        run: what `receipts.chain.verify_run` found in a run folder.
    """
    report = run.report
    policy = TestSuite(f"policy {printable(run.verdict.policy)}")
    policy.add_property("verdict", run.verdict.status)
    policy.add_property("reason", printable(run.verdict.reason))
    policy.add_property("run_sha256", run.run_sha256)
    policy.add_property("gguf_sha256", receipt_text(run, "candidate.json", "file", "sha256"))
    document = JUnitXml("source-teacher")
    for suite, cases in (
        (policy, map(_check, run.verdict.checks)),
        (TestSuite("tensor audit"), _audited(report.audit)),
        (TestSuite("localisation"), _localised(report.diagnosis)),
        (TestSuite("engines"), _engines(report.diagnosis)),
    ):
        suite.add_testcases(list(cases))
        document.append(suite)
    document.update_statistics()
    took = seconds(run)
    if took is not None:  # the engines ran for all checks together
        policy.time = document.time = round(took, 3)
    return document.tostring().decode()


def _case(name: str, group: str, *results: Failure | Error | Skipped) -> TestCase:
    case = TestCase(printable(name), classname=group)
    case.result = list(results)
    return case


def _result(kind: type[Result], type_: str, sentences: list[str]) -> Result:
    """Return one result for all sentences, as readers of JUnit show the first of a case alone."""
    more = f" (and {len(sentences) - 1} more)" if len(sentences) > 1 else ""
    result = kind(message=printable(sentences[0]) + more, type_=type_)
    result.text = "\n".join(printable(sentence) for sentence in sentences)
    return result


def _check(check: Check) -> TestCase:
    name = f"{check.quantity} {limit(check.bound, check.limit)}"
    if check.outcome == "pass":
        return _case(name, "policy")
    if check.outcome == "fail":
        return _case(name, "policy", _result(Failure, "FAIL", [check.sentence]))
    return _case(name, "policy", _result(Error, check.outcome.upper(), [check.sentence]))


def _audited(audit: Audit | None) -> Iterable[TestCase]:
    """Yield a case for each tensor, by layer, and one for each finding on keys and types."""
    if audit is None:
        yield _case("tensor audit", "tensors", Skipped("the tensor audit could not be made"))
        return
    width = len(str(max((tensor.layer for tensor in audit.tensors if tensor.layer is not None), default=0)))
    for tensor in audit.tensors:
        group = _OUTSIDE if tensor.layer is None else f"layer {tensor.layer:0{width}}"
        faulty = tensor.verdict in ("worse", "wrong")
        yield _case(tensor.name, group, *([_result(Failure, tensor.verdict, [tensor.sentence])] if faulty else []))
    for key in audit.metadata:
        yield _case(key.key, "keys", _result(Failure, key.kind, [key.sentence]))
    for matrix in audit.types_of("below"):  # a type finer than the label is no fault
        yield _case(matrix.name, "types", _result(Failure, "below", [matrix.sentence]))


def _localised(diagnosis: Diagnosis | None) -> Iterable[TestCase]:
    """Yield a case for each layer, and one for what lies outside, failed by their culprits."""
    found = None if diagnosis is None else diagnosis.localisation
    if found is None:
        yield _case("localisation", "layers", Skipped("the localisation was not asked for or not possible"))
        return
    sentences: dict[int | None, list[str]] = defaultdict(list)
    parts: dict[int | None, str] = {}
    for culprit in found.culprits:
        sentences[culprit.layer].append(culprit.sentence)
        parts.setdefault(culprit.layer, culprit.part)
    layers = sorted({layer.layer for layer in found.layers} | {layer for layer in sentences if layer is not None})
    width = len(str(max(layers, default=0)))
    for layer in (*layers, None):
        name = _OUTSIDE if layer is None else f"layer {layer:0{width}}"
        results = [_result(Failure, parts[layer], sentences[layer])] if layer in sentences else []
        yield _case(name, "layers", *results)


def _engines(diagnosis: Diagnosis | None) -> Iterable[TestCase]:
    """Yield a case for each finding on an engine as a whole."""
    if diagnosis is None:
        yield _case("engines", "engines", Skipped("the diagnosis was not asked for"))
        return
    found, decided = diagnosis.localisation, diagnosis.arbitration
    for name, sentences in (
        ("three-way check", [] if decided is None else [decided.sentence]),
        ("streams in float32", [] if found is None else list(found.rounding)),
        ("state between calls and examples", list(diagnosis.state)),
    ):
        yield _case(name, "engines", *([_result(Failure, "found", sentences)] if sentences else []))
