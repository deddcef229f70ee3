"""Run the fault matrix and print it: what is caught, localised and named, and what llama.cpp's own KLD sees."""

import argparse
import json
import math
import multiprocessing
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.fault_matrix import CLEAN, FAULTS, engines_own_kld, run_clean, run_fault

SEEN = 2.0  # times the clean pair's KLD; less than that is lost among the differences between honest files


def main() -> int:
    """Run it; exit code 4 when a fault is missed or a clean file raises an alarm."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="faults and clean files whose name holds it")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    faults = [fault for fault in FAULTS if arguments.only in fault.name]
    clean = [kind for kind in CLEAN if arguments.only in f"clean {kind}"]
    with tempfile.TemporaryDirectory() as folder:
        found = run_all([fault.name for fault in faults], clean, folder)
    base = found["kld", None]
    rows = []
    for fault in faults:
        got, own = found["fault", fault.name], found["kld", fault.name]
        rows.append({
            "fault": fault.name, "verdict": got.verdict, "caught": got.caught(fault),
            "localised": got.localised(fault), "named": got.named(fault),
            "engines_own_kl_nats": None if own is None or math.isinf(own) else own,
            "engines_own_sees": None if own is None else own > SEEN * base, "seconds": got.seconds,
        })  # fmt: skip
    alarms = {kind: (found["clean", kind].verdict, *found["clean", kind].findings) for kind in clean}
    quiet = [kind for kind, said in alarms.items() if said == ("PASS",)]
    if arguments.json:
        print(json.dumps({"faults": rows, "clean": alarms, "engines_own_kl_nats_clean": base}))
    else:
        show(rows, alarms, quiet, base)
    whole = all(row["caught"] and row["localised"] and row["named"] for row in rows)
    return 0 if whole and len(quiet) == len(clean) else 4


def run_all(faults, clean, folder):
    """Return what came out, by ("fault", name), ("clean", kind) and ("kld", name)."""
    found = {}
    with (
        ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool,
        Progress(console=Console(stderr=True)) as progress,
    ):
        jobs = {pool.submit(run_fault, name, folder): ("fault", name) for name in faults}
        jobs |= {pool.submit(engines_own_kld, name, folder): ("kld", name) for name in (None, *faults)}
        jobs |= {pool.submit(run_clean, kind): ("clean", kind) for kind in clean}
        task = progress.add_task("faults and clean files", total=len(jobs))
        for job in as_completed(jobs):
            found[jobs[job]] = job.result()
            progress.advance(task)
    return found


def show(rows, alarms, quiet, base):
    """Print the matrix."""
    console = Console(width=None if sys.stdout.isatty() else 140)
    table = Table(title="planted faults", title_justify="left")
    for name in ("fault", "verdict", "caught", "localised", "cause named", "llama.cpp: Q8_0 against BF16 GGUF"):
        table.add_column(name)
    for row in rows:
        own = row["engines_own_kl_nats"]
        seen = "-"
        if row["engines_own_sees"] is not None:
            amount = "no finite row, or refused" if own is None else f"{own:.2g} nats"
            seen = f"{amount}: {'seen' if row['engines_own_sees'] else 'not seen'}"
        table.add_row(
            row["fault"], row["verdict"], *("yes" if row[key] else "NO" for key in ("caught", "localised", "named")),
            seen,
        )  # fmt: skip
    console.print(table)
    for kind, (verdict, *findings) in alarms.items():
        console.print(f"clean {kind}: {verdict}, {len(findings)} false alarms", markup=False)
        for finding in findings:
            console.print(f"  {finding}", markup=False)
    asked = [row for row in rows if row["engines_own_sees"] is not None]
    counts = [sum(row[key] for row in rows) for key in ("caught", "localised", "named")]
    console.print(
        f"{len(rows)} faults: {counts[0]} caught, {counts[1]} localised, {counts[2]} named; {len(quiet)} of"
        f" {len(alarms)} clean files without an alarm; llama.cpp's own KLD (clean: {base:.2g} nats) sees"
        f" {sum(row['engines_own_sees'] for row in asked)} of the {len(asked)} faults that its base shares"
    )


if __name__ == "__main__":
    sys.exit(main())
