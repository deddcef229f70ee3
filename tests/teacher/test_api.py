"""The README's Python is run as it stands."""

import importlib.util
import re
import subprocess
import sys

import pytest
from conftest import ROOT

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)


def run_block(code, tmp_path):
    # The paths of the README are those of the project's folder; what it writes goes elsewhere.
    code = code.replace('"golden/', f'"{ROOT}/golden/').replace('"runs/api"', f'"{tmp_path}/api"')
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={"PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "PATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("xllamacpp") is None, reason="needs the package xllamacpp (llama.cpp)")
def test_five_lines_verify_a_file(tmp_path):
    assert run_block(BLOCKS[0], tmp_path).startswith("PASS all 7 limits of policy q8_0")
    assert (tmp_path / "api" / "verdict.json").is_file()


def test_session_and_replay_are_a_few_lines(tmp_path):
    assert run_block(BLOCKS[1] + "print(logits.shape, hidden.shape)", tmp_path) == "(1, 2048) (3, 256)\n"


def test_every_public_name_is_there():
    import teacher.api

    assert all(hasattr(teacher.api, name) for name in teacher.api.__all__)
