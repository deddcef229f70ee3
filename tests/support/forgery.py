"""What somebody would do who changes a run folder and knows its form."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from receipts.canonical import canonical_bytes
from receipts.chain import FILES, SUMS, USES
from receipts.policy import Policy
from receipts.report import Report
from receipts.verdict import decide
from support.run_folder import POLICY


def reseal(folder: Path) -> None:
    """Write SHA256SUMS anew."""
    lines = [f"{hashlib.sha256((folder / n).read_bytes()).hexdigest()}  {n}\n" for n in sorted(FILES)]
    (folder / SUMS).write_text("".join(lines))


def forge(folder: Path, name: str, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change a receipt, and make every digest, the verdict and SHA256SUMS anew."""
    forms = {file: json.loads((folder / file).read_bytes()) for file in USES}
    edit(forms[name])
    policy = Policy.parse(POLICY)
    digests = {"policy.toml": policy.sha256}
    for file, used in USES.items():  # what is used stands before what uses it
        if file == "verdict.json":
            report = Report.from_dict(forms["report.json"])
            verdict = decide(report, policy, report_sha256=digests["report.json"], policy_sha256=digests["policy.toml"])
            forms[file] = verdict.to_dict()
        elif used:
            forms[file]["uses"] = {other: digests[other] for other in used}
        data = canonical_bytes(forms[file])
        (folder / file).write_bytes(data)
        digests[file] = hashlib.sha256(data).hexdigest()
    reseal(folder)
