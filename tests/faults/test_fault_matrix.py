"""Every planted fault is caught, localised and named; clean files of every type raise no alarm."""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest

from support.fault_matrix import CLEAN, FAULTS, run_clean, run_fault

pytestmark = pytest.mark.slow
NAMES = [fault.name for fault in FAULTS]


@pytest.fixture(scope="module")
def found(tmp_path_factory, request):
    """What comes out for each fault and clean file that was selected, run side by side."""
    folder = str(tmp_path_factory.mktemp("faults"))
    chosen = [item.callspec.params for item in request.session.items if item.path == request.path]
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        faults = {p["name"]: pool.submit(run_fault, p["name"], folder) for p in chosen if "name" in p}
        clean = {p["kind"]: pool.submit(run_clean, p["kind"]) for p in chosen if "kind" in p}
        return {name: future.result() for name, future in {**faults, **clean}.items()}


@pytest.mark.parametrize("name", NAMES)
def test_the_fault_is_caught_localised_and_named(found, name):
    fault, got = FAULTS[NAMES.index(name)], found[name]
    said = "\n".join((got.verdict, *got.sentences, *map(str, got.culprits)))
    assert got.caught(fault), said
    assert got.localised(fault), said
    assert got.named(fault), said


@pytest.mark.parametrize("kind", CLEAN)
def test_a_clean_file_raises_no_alarm(found, kind):
    got = found[kind]
    assert got.findings == (), got.findings
    assert got.culprits == ()
    assert got.verdict == "PASS", got.sentences
