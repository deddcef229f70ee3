import argparse
import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from junitparser import Error, Failure, JUnitXml, Skipped

from receipts.chain import SUMS, verify_run
from receipts.comparison import Bucket
from receipts.diagnosis import Contrast
from receipts.errors import HarnessError, OutputError
from receipts.verdict import Check
from support.findings import (
    HOSTILE,
    WRONG_LAYER,
    audit,
    cells,
    diagnosis,
    everything,
    localisation,
    tensor,
    worst,
)
from support.run_folder import comparison, report, write_run
from teacher.cli import _parser, main
from teacher.report import charts
from teacher.report.documents import write_documents
from teacher.report.html import render_html
from teacher.report.junit import render_junit
from teacher.report.markdown import render_markdown
from teacher.report.plain_text import printable

ROOT = Path(__file__).parents[3]
TEMPLATES = ROOT / "ci" / "templates"
DOCUMENTS = {"--html", "--junit", "--markdown"}


class Page(HTMLParser):
    """What a browser would see: tags with attributes, and the text of the page outside of styles."""

    def __init__(self, source):
        super().__init__()
        self.tags, self.words, self._style = [], [], False
        self.feed(source)
        self.close()
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._style = tag == "style"

    def handle_endtag(self, tag):
        self._style = False

    def handle_data(self, data):
        if not self._style:
            self.words.append(data)

    def values(self, name):
        return [attributes[name] for _, attributes in self.tags if name in attributes]


@pytest.fixture(scope="module")
def rich(tmp_path_factory):
    return verify_run(write_run(tmp_path_factory.mktemp("rich") / "run", changed=everything()))


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    return verify_run(write_run(tmp_path_factory.mktemp("bare") / "run"))


@pytest.fixture(scope="module")
def page(rich):
    return render_html(rich)


def with_report(run, **changes):
    return replace(run, report=replace(run.report, **changes))


def with_checks(run, *outcomes):
    checks = tuple(
        Check(quantity=f"candidate.{outcome}", bound="max", limit=1.0, value=None, floor=None, outcome=outcome,
              sentence=f"it is {outcome}")
        for outcome in outcomes
    )  # fmt: skip
    return replace(run, verdict=replace(run.verdict, checks=checks))


def test_a_page_asks_for_nothing_from_elsewhere(page):
    parsed = Page(page)
    for value in [*parsed.values("src"), *parsed.values("href")]:
        assert value.startswith("#"), value
    assert not {tag for tag, _ in parsed.tags} & {"script", "link", "iframe", "object", "img", "base", "form"}
    assert "@import" not in page
    assert re.findall(r"url\((?!#)", page) == []
    assert "default-src 'none'" in parsed.values("content")[-1]


def test_a_strangers_words_are_shown_and_never_run(page):
    assert "<script" not in page.lower()
    assert not [name for _, attributes in Page(page).tags for name in attributes if name.startswith("on")]
    assert page.count("&lt;script&gt;") > 10
    assert printable(HOSTILE) in Page(page).text
    assert not re.search("[\x00-\x08\x0b-\x1f\u202a-\u202e]", page)


def test_every_finding_stands_in_the_page(rich, page):
    text = Page(page).text
    for sentence in (*rich.report.diagnosis.sentences, *rich.report.audit.sentences, *rich.report.notes):
        assert printable(sentence) in text
    for contrast in rich.report.diagnosis.cells.contrasts:
        assert contrast.sentence in text
    root, gguf = rich.receipts["snapshot.json"]["manifest"]["root_sha256"], rich.receipts["candidate.json"]["file"]
    for digest in (*rich.digests.values(), rich.run_sha256, root, gguf["sha256"]):
        assert digest in text
    assert rich.verdict.reason in text


def test_more_findings_than_fit_are_folded_and_not_lost(rich):
    many = tuple(tensor(f"blk.0.t{i}", layer=0, kind=f"t{i}", verdict="wrong") for i in range(120))
    text = Page(render_html(with_report(rich, audit=replace(audit(), tensors=many)))).text
    for found in many:
        assert found.sentence in text


def test_a_page_is_the_same_twice(rich, page):
    assert render_html(rich) == page


def test_a_page_is_the_same_in_another_process_whatever_its_settings(rich, page, tmp_path):
    (tmp_path / "matplotlibrc").write_text("font.size: 20\nsvg.fonttype: path\ntext.usetex: True\n")
    folder = write_run(tmp_path / "run", changed=everything())
    script = (
        "import sys; from pathlib import Path; from receipts.chain import verify_run;"
        "from teacher.report.html import render_html;"
        "sys.stdout.buffer.write(render_html(verify_run(Path(sys.argv[1]))).encode())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder)], cwd=ROOT, capture_output=True, check=True,
        env={"PYTHONPATH": str(ROOT), "MATPLOTLIBRC": str(tmp_path), "PYTHONHASHSEED": "7"},
    )  # fmt: skip
    assert done.stdout.decode() == page


def test_ids_of_charts_do_not_meet(page):
    ids = Page(page).values("id")
    assert len(ids) == len(set(ids))
    assert {value[1:] for value in Page(page).values("href")} <= set(ids)
    assert {found[5:-1] for found in re.findall(r"url\(#[^)]*\)", page)} <= set(ids)


def test_a_page_says_why_a_part_is_missing(bare, rich):
    text = Page(render_html(bare)).text
    assert "No diagnosis: it was not asked for." in text
    assert "No tensor audit: it could not be made" in text
    assert "No positions were recorded." in text
    assert "What is wrong" not in text
    part = replace(diagnosis(), cells=None, localisation=None, arbitration=None)
    text = Page(render_html(with_report(rich, diagnosis=part, spread=()))).text
    assert "The four cells were not measured." in text
    assert "No localisation: it was not asked for, or the engine shows no layers." in text
    assert "No spread: the candidate ran at one call shape." in text


def test_a_page_of_a_candidate_without_a_finite_row(bare):
    none = {"kl_nats": None, "by_position": (), "by_example": (), "by_call_shape": (), "kl_histogram": ()}
    text = Page(render_html(with_report(bare, candidate=comparison(nonfinite_rows=6, **none)))).text
    assert "candidate: no finite row" in text


def test_a_receipt_without_the_fields_that_nothing_is_decided_by(bare):
    receipts = {**bare.receipts, "host.json": {}, "candidate.json": {"file": 3}, "snapshot.json": {"origin": None}}
    run = replace(bare, receipts=receipts)
    assert "– against –" in Page(render_html(run)).text  # noqa: RUF001 (the dash of a missing value)
    assert render_junit(run)
    assert render_markdown(run)


@pytest.mark.parametrize("layers", [1, 64, 600])
def test_charts_of_any_depth(layers):
    trace = localisation(layers)
    for svg in (charts.layer_errors(trace), charts.operation_errors(trace), charts.tensor_margins(audit(layers))):
        assert svg.startswith("<svg")
    assert ("the first 512 of 600 layers" in charts.layer_errors(trace)) == (layers == 600)


def test_charts_of_values_that_have_no_place_on_their_axis():
    trace = localisation()
    empty = tuple(
        replace(
            layer, reference=None, weights=0.0, candidate=1e308, alone_reference=5e-324, alone_weights=0.0,
            alone_reachable=0.0, alone_engine=None,
        )
        for layer in trace.layers
    )  # fmt: skip
    svg = charts.layer_errors(replace(trace, layers=empty, culprits=()))
    assert "PyTorch: not measured" in svg
    assert "weights of the GGUF: 0 everywhere" in svg
    nothing = tuple(replace(error, weights=0.0, reachable=0.0, engine=None) for error in trace.operations)
    assert charts.operation_errors(replace(trace, operations=nothing)).startswith("<svg")
    extreme = tuple(replace(error, weights=1e308, reachable=5e-324) for error in trace.operations)
    assert charts.operation_errors(replace(trace, operations=extreme)).startswith("<svg")
    zero = Bucket(label=HOSTILE, positions=1, kl_nats_mean=0.0, kl_nats_max=1e308, top1_agreement=1.0)
    odd = report(candidate=comparison(by_position=(zero,), kl_histogram=((1e308, 1), (5e-324, 2), (-1.0, 1))))
    assert "candidate, mean: 0 everywhere" in charts.kld_by_position(odd)
    assert charts.kld_distribution(odd).startswith("<svg")


def test_a_chart_shows_a_strangers_label_as_text():
    trace = localisation()
    named = tuple(replace(error, operation=f"{HOSTILE}{error.operation}") for error in trace.operations)
    odd = replace(audit(), tensors=tuple(tensor(f"t{i}", layer=i, kind=HOSTILE[i:]) for i in range(40)))
    for svg in (charts.operation_errors(replace(trace, operations=named)), charts.tensor_margins(odd)):
        assert "<script" not in svg
        assert "&lt;script&gt;" in svg


def test_junit_has_a_case_for_each_check_tensor_and_layer(rich):
    policy, tensors, layers, engines = JUnitXml.fromstring(render_junit(rich))
    assert (policy.tests, policy.failures, policy.errors) == (6, 2, 0)
    found = rich.report.audit
    assert (tensors.tests, tensors.failures) == (len(found.tensors) + 3, 5)  # one wrong, one worse, two keys, a type
    assert {case.classname for case in tensors if isinstance_any(case, Failure)} == {
        "layer 5", "layer 2", "keys", "types"
    }  # fmt: skip
    assert (layers.tests, layers.failures) == (9, 3)
    failed = {case.name: case.result[0].type for case in layers if case.result}
    assert failed == {"layer 2": "weights", f"layer {WRONG_LAYER}": "engine", "outside the layers": "engine"}
    assert [(case.name, bool(case.result)) for case in engines] == [
        ("three-way check", True), ("streams in float32", False), ("state between calls and examples", True)
    ]  # fmt: skip
    assert {one.name: one.value for one in policy.properties()}["run_sha256"] == rich.run_sha256


def isinstance_any(case, kind):
    return any(isinstance(result, kind) for result in case.result)


def test_junit_tells_a_failure_from_what_could_not_be_decided(bare):
    policy, *_ = JUnitXml.fromstring(render_junit(with_checks(bare, "pass", "fail", "inconclusive", "invalid")))
    results = [[(type(result), result.type, result.message) for result in case.result] for case in policy]
    assert results == [
        [],
        [(Failure, "FAIL", "it is fail")],
        [(Error, "INCONCLUSIVE", "it is inconclusive")],
        [(Error, "INVALID", "it is invalid")],
    ]


def test_junit_skips_what_was_not_measured(bare):
    _, *suites = JUnitXml.fromstring(render_junit(bare))
    assert len(suites) == 3
    for suite in suites:
        assert (suite.tests, suite.skipped) == (1, 1)
        assert all(isinstance_any(case, Skipped) for case in suite)


def test_junit_takes_its_time_from_the_host(bare):
    host = {**bare.receipts["host.json"], "seconds": {"teacher against candidate": 1.5, "floor": 2}}
    document = JUnitXml.fromstring(render_junit(replace(bare, receipts={**bare.receipts, "host.json": host})))
    assert document.time == 3.5
    assert next(iter(document)).time == 3.5


def test_markdown_says_verdict_contrasts_checks_and_findings(rich):
    text = render_markdown(rich)
    assert text.startswith("## ❌ FAIL: tiny.gguf\n")
    assert "| engine | yes | engine does something | 0.0030 | 2.00e-04 |" in text
    assert "### Checks not met" in text
    assert text.count("\n- ") == len(rich.report.diagnosis.sentences) + len(rich.report.audit.sentences) + 1
    assert "<code> word2</code> 0.25" in text


def test_markdown_of_a_stranger_is_text(rich):
    text = render_markdown(rich)
    assert "<script" not in text
    assert {tag for tag, _ in Page(text).tags} == {"code", "br"}
    assert not re.search("[\x00-\x09\x0b-\x1f\u202a-\u202e]", text)
    for markup in ("`code`", "**bold**", "@somebody", "https:", "$\\frac"):
        assert markup not in text
    tables = [block.split("\n") for block in text.split("\n\n") if block.startswith("|")]
    assert len(tables) == 4
    for table in tables:
        assert len({line.count("|") for line in table}) == 1
    assert printable(HOSTILE) in Page(text).text


def test_markdown_is_short_whatever_was_found(rich):
    long = "\U000e0001" * 20_000  # each becomes 14 bytes
    contrast = Contrast(name=long, kl_nats_mean=-1e308, stderr=1e308, above_floor=True, sentence=long)
    one = tensor("t", layer=1, kind="t", verdict="wrong", cause=long[:500])
    changed = {
        "audit": replace(audit(), tensors=(one,) * 100_000),
        "diagnosis": replace(diagnosis(), cells=replace(cells(), contrasts=(contrast,) * 1000), state=(long,) * 1000),
        "worst": worst(500, long),
        "notes": (long,) * 1000,
        "candidate": comparison(expected=long, actual=long),
        "floor": comparison(expected=long, actual=long),
    }
    run = with_checks(with_report(rich, **changed), *["fail"] * 1000)
    checks = tuple(replace(check, sentence=long) for check in run.verdict.checks)
    verdict = replace(run.verdict, checks=checks, reason=long, policy=long)
    receipts = json.loads(json.dumps(dict(run.receipts)))
    receipts["candidate.json"]["file"]["name"] = long
    for example in receipts["plan.json"]["examples"]:
        example["name"] = long
    shown = replace(run, verdict=verdict, receipts=receipts)
    text = render_markdown(shown)
    assert 600_000 < len(text.encode()) < 900_000  # the case is near the bound, so that it tests it
    found = len(shown.report.diagnosis.sentences) + len(shown.report.audit.sentences)
    assert found > 101_000
    assert f"- … and {found - 50} more" in text
    assert "… and 970 more" in text


def test_documents_are_written_and_named(tmp_path):
    folder = write_run(tmp_path / "run", changed=everything())
    paths = {kind: tmp_path / f"it.{kind}" for kind in ("html", "junit", "markdown")}
    assert write_documents(folder, **paths) == tuple(paths.values())
    run = verify_run(folder)
    assert paths["html"].read_text("utf-8") == render_html(run)
    assert paths["junit"].read_text("utf-8") == render_junit(run)
    assert paths["markdown"].read_text("utf-8") == render_markdown(run)
    assert write_documents(folder, html=None, junit=None, markdown=None) == ()


def test_the_command_writes_what_is_asked_for_and_says_where(tmp_path, capsys):
    folder = write_run(tmp_path / "run", changed=everything())
    page, summary = tmp_path / "it.html", tmp_path / "it.md"
    assert main(["report", str(folder), "--html", str(page), "--markdown", str(summary)]) == 0
    assert capsys.readouterr().out.splitlines() == [str(page), str(summary)]
    assert page.read_text("utf-8") == render_html(verify_run(folder))
    assert main(["report", str(folder), "--html", str(page), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"documents": [str(page)]}
    assert main(["report", str(folder)]) == 2
    assert "expected --html, --junit or --markdown with a file, got none" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["run/report.html", "run/../run/report.html", "run/deep/report.html", "link/x"])
def test_a_run_folder_holds_its_receipts_alone(tmp_path, place):
    folder = write_run(tmp_path / "run")
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(OutputError, match="expected a place outside"):
        write_documents(folder, html=None, junit=tmp_path / "junit.xml", markdown=tmp_path / place)
    assert not (tmp_path / "junit.xml").exists()
    verify_run(folder)


def test_two_documents_need_two_files(tmp_path):
    folder = write_run(tmp_path / "run")
    with pytest.raises(OutputError, match="a file for each document"):
        write_documents(folder, html=None, junit=tmp_path / "x", markdown=tmp_path / "x")


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    folder = write_run(tmp_path / "run")
    with pytest.raises(OutputError, match="nowhere/x"):
        write_documents(folder, html=None, junit=None, markdown=tmp_path / "nowhere" / "x")


def test_a_run_that_is_not_whole_has_no_documents(tmp_path):
    folder = write_run(tmp_path / "run")
    (folder / SUMS).write_text("")
    with pytest.raises(HarnessError, match=SUMS):
        write_documents(folder, html=None, junit=None, markdown=tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_summary_needs_neither_jinja_nor_matplotlib(tmp_path):
    folder = write_run(tmp_path / "run")
    script = (
        "import sys; from pathlib import Path; from teacher.report.documents import write_documents;"
        "write_documents(Path(sys.argv[1]), html=None, junit=None, markdown=Path(sys.argv[2]));"
        "print({'jinja2', 'matplotlib', 'junitparser', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder), str(tmp_path / "x")], cwd=ROOT, capture_output=True, text=True,
        check=True, env={"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.stdout.strip() == "set()"


def _scripts(name):
    form = yaml.safe_load((TEMPLATES / name).read_text())
    if name.startswith("github"):
        return [step["run"] for step in form["jobs"]["verify"]["steps"] if "run" in step]
    return form["model-check"]["script"]


def _commands(name, program):
    """Yield the arguments of each call of a program in a template."""
    for script in _scripts(name):
        for part in re.split(r"\|\||&&|;", script):
            words = shlex.split(part)
            if program in words:
                yield words[words.index(program) + 1 :]


def _options(parser, command):
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return set(commands.choices[command]._option_string_actions)


@pytest.mark.parametrize("name", ["github-actions.yml", "gitlab-ci.yml"])
def test_a_template_uses_options_that_there_are(name):
    (call,) = _commands(name, "teacher")
    used = {word for word in call if word.startswith("--")}
    assert used > {"--policy", "--out", *DOCUMENTS}
    assert used <= _options(_parser(), call[0])
    _parser().parse_args(call)


@pytest.mark.parametrize("name", ["github-actions.yml", "gitlab-ci.yml"])
def test_a_template_checks_the_receipts_of_the_run(name):
    (call,) = _commands(name, "receipts")
    assert call == ["verify", "run"]


def test_the_github_template_has_few_rights_and_keeps_what_it_made():
    form = yaml.safe_load((TEMPLATES / "github-actions.yml").read_text())
    assert form["permissions"] == {"contents": "read"}
    steps = form["jobs"]["verify"]["steps"]
    assert all(re.search(r"@v\d+$", step["uses"]) for step in steps if "uses" in step)
    assert not any("continue-on-error" in step for step in steps)
    (keep,) = (step for step in steps if step.get("uses", "").startswith("actions/upload-artifact"))
    assert "!cancelled()" in keep["if"]
    assert set(keep["with"]["path"].split()) == {"report.html", "junit.xml", "summary.md", "run/"}


def test_the_gitlab_template_keeps_what_it_made_and_ends_as_the_gate():
    job = yaml.safe_load((TEMPLATES / "gitlab-ci.yml").read_text())["model-check"]
    assert job["artifacts"]["when"] == "always"
    assert job["artifacts"]["reports"] == {"junit": "junit.xml"}
    assert job["script"][-1] == 'exit "$code"'
