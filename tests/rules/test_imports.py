import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECEIPTS = sorted(f"receipts.{path.stem}" for path in (ROOT / "receipts").glob("*.py") if path.stem != "__init__")
ENGINES = {"mlx", "torch", "numpy", "teacher", "transformers", "gguf", "rich"}
SCRIPT = """
import importlib, sys
for name in sys.argv[1].split(","):
    importlib.import_module(name)
print(",".join(sorted({name.split(".")[0] for name in sys.modules})))
"""


def loaded_by(modules, path=ROOT):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, ",".join(modules)], cwd=path, capture_output=True, text=True, check=True,
        env={"PYTHONPATH": f"{path}:{ROOT}"},
    )  # fmt: skip
    return set(done.stdout.strip().split(","))


def test_an_auditor_needs_no_engine():
    assert not loaded_by(RECEIPTS) & ENGINES


def test_the_rule_above_can_fail(tmp_path):
    (tmp_path / "hasty.py").write_text("import receipts.chain\nimport numpy\n")
    assert loaded_by(["hasty"], tmp_path) & ENGINES == {"numpy"}


@pytest.mark.parametrize(
    "module", ["teacher.sides.reference", "teacher.candidates.llama_cpp", "teacher.process.worker"]
)
def test_a_peer_never_loads_mlx_into_its_process(module):
    assert "mlx" not in loaded_by([module])


@pytest.mark.parametrize("module", ["teacher.sides.teacher_source", "teacher.api"])
def test_the_teacher_never_loads_torch_into_its_process(module):
    assert "torch" not in loaded_by([module])


def test_the_command_line_loads_no_engine_before_it_needs_one():
    assert not loaded_by(["teacher.cli"]) & {"mlx", "torch"}


def test_an_install_without_engines_says_what_teacher_needs(tmp_path):
    (tmp_path / "rich.py").write_text("raise ModuleNotFoundError('no rich here', name='rich')\n")
    done = subprocess.run(
        [sys.executable, "-m", "teacher", "--help"], cwd=ROOT, capture_output=True, text=True, check=False,
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}"},
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("teacher: expected the package rich, got none")
