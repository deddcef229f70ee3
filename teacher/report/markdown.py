"""A checked run as Markdown for the summary page of a CI job, which takes 1 MB at most.

Every text is cut and every list has an end, so that no report makes the document longer than 900 KB. Strangers'
words are written with character references, which no Markdown reader takes for markup or a link.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from receipts.chain import RunCheck
from receipts.comparison import TokenShare
from receipts.report import Report
from receipts.verdict import Verdict
from teacher.report.plain_text import (
    DASH,
    limit,
    nats,
    place,
    printable,
    printable_end,
    receipt_text,
    share,
    short,
)

# A character becomes 14 bytes at most ("\U000e0001", its backslash as a reference). These limits allow 111 sentences
# and 90 short texts, so that the document stays below 800 KB.
_MOST_CHECKS, _MOST_FINDINGS, _MOST_NOTES, _MOST_CONTRASTS = 30, 50, 20, 10
_MOST_WORST, _MOST_TOKENS = 5, 5
_SENTENCE, _TEXT = 400, 120
_MARKUP = "&<>|`*_[]{}~\\#$@:!+"
_REFERENCES = str.maketrans({character: f"&#{ord(character)};" for character in _MARKUP})
_MARKS = {"PASS": "✅", "FAIL": "❌", "INCONCLUSIVE": "❓", "INVALID": "⛔"}


def render_markdown(run: RunCheck) -> str:
    """Return the summary of a run, below 900 KB in UTF-8.

    Args:
        run: what `receipts.chain.verify_run` found in a run folder.
    """
    verdict, report = run.verdict, run.report
    gguf = receipt_text(run, "candidate.json", "file", "name")
    lines = [
        f"## {_MARKS[verdict.status]} {verdict.status}: {_text(gguf)}",
        "",
        _sentence(verdict.reason),
        "",
        f"{report.candidate.positions} positions of {report.candidate.examples} examples, policy"
        f" {_text(verdict.policy)}, run `{run.run_sha256}`",
        *_figures(report),
        *_contrasts(report),
        *_checks(verdict),
        *_list("What is wrong", _findings(report), _MOST_FINDINGS),
        *_worst(run),
        *_list("Notes", report.notes, _MOST_NOTES),
    ]
    return "\n".join(lines) + "\n"


def _sentence(text: str) -> str:
    return _escape(printable(text, _SENTENCE))


def _text(text: str) -> str:
    return _escape(printable(text, _TEXT))


def _escape(text: str) -> str:
    """Return a printable text that Markdown shows as it is, in a line, a cell or an element."""
    return text.translate(_REFERENCES).replace("www.", "www&#46;")


def _table(head: Sequence[str], right: int, rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a table whose columns from `right` on are numbers."""
    line = ["---" if index < right else "--:" for index in range(len(head))]
    return ["", *(f"| {' | '.join(cells)} |" for cells in (head, line, *rows))]


def _list(title: str, sentences: Sequence[str], most: int) -> list[str]:
    if not sentences:
        return []
    more = [f"- … and {len(sentences) - most} more"] if len(sentences) > most else []
    return ["", f"### {title}", "", *(f"- {_sentence(sentence)}" for sentence in sentences[:most]), *more]


def _figures(report: Report) -> list[str]:
    rows = []
    for one in (report.floor, report.candidate):
        stats = one.kl_nats
        parts = [DASH] * 3 if stats is None else [nats(stats.mean), nats(stats.p99), nats(stats.max)]
        agreement = DASH if stats is None else share(one.top1_agreement)
        rows.append([f"{_text(one.expected)} / {_text(one.actual)}", *parts, agreement])
    return _table(["expected / actual", "mean KLD, nats", "p99, nats", "max, nats", "top-1"], 1, rows)


def _contrasts(report: Report) -> list[str]:
    cells = None if report.diagnosis is None else report.diagnosis.cells
    if cells is None:
        return []
    rows = [
        [
            _text(one.name), "yes" if one.above_floor else "no", _sentence(one.sentence), nats(one.kl_nats_mean),
            nats(one.stderr),
        ]
        for one in cells.contrasts[:_MOST_CONTRASTS]
    ]  # fmt: skip
    head = ["contrast", "above the floor", "in words", "mean KLD, nats", "standard error, nats"]
    return ["", "### Weights or engine", *_table(head, 3, rows)]


def _checks(verdict: Verdict) -> list[str]:
    """Return the checks that are not met."""
    unmet = [check for check in verdict.checks if check.outcome != "pass"]
    if not unmet:
        return []
    rows = [
        [check.outcome, _sentence(check.sentence), short(check.value), limit(check.bound, check.limit)]
        for check in unmet[:_MOST_CHECKS]
    ]
    more = ["", f"… and {len(unmet) - _MOST_CHECKS} more"] if len(unmet) > _MOST_CHECKS else []
    return ["", "### Checks not met", *_table(["outcome", "check", "measured", "limit"], 2, rows), *more]


def _findings(report: Report) -> tuple[str, ...]:
    said = () if report.diagnosis is None else report.diagnosis.sentences
    return (*said, *(() if report.audit is None else report.audit.sentences))


def _worst(run: RunCheck) -> list[str]:
    if not run.report.worst:
        return []
    rows = [
        [
            _text(place(run, one.where)), nats(one.kl_nats), _code(printable_end(one.context, _TEXT)),
            DASH if one.following is None else _code(printable(one.following, _TEXT)),
            _top(one.expected_top), _top(one.actual_top),
        ]
        for one in run.report.worst[:_MOST_WORST]
    ]  # fmt: skip
    head = ["place", "KLD, nats", "context", "follows", "expected top", "actual top"]
    return ["", "### Worst tokens", *_table(head, len(head), rows)]


def _top(tokens: Sequence[TokenShare]) -> str:
    return "<br>".join(
        f"{_code(printable(token.text, _TEXT))} {short(token.probability)}" for token in tokens[:_MOST_TOKENS]
    )


def _code(text: str) -> str:
    return f"<code>{_escape(text)}</code>"
