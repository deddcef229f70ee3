import shutil
from pathlib import Path

import pytest

from support.tiny_qwen35 import write_gguf, write_snapshot

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A tiny random snapshot; read only."""
    return write_snapshot(tmp_path_factory.mktemp("tiny") / "tiny")


@pytest.fixture(scope="session")
def tiny_gguf(tiny, tmp_path_factory):
    """The tiny snapshot as an F32 GGUF; read only."""
    return write_gguf(tiny, tmp_path_factory.mktemp("gguf") / "tiny-F32.gguf")


@pytest.fixture
def snapshot(tiny, tmp_path):
    """A copy of the tiny snapshot that a test may spoil."""
    return Path(shutil.copytree(tiny, tmp_path / "tiny"))


@pytest.fixture(scope="session")
def golden():
    """The folder of the shipped models."""
    return ROOT / "golden"
