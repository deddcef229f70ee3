"""The device the teacher runs on: the only module that knows Metal, CUDA and CPU apart.

Importing it starts MLX, the one way the teacher may start it: with true F32 products, a setting that MLX reads from
the environment once, and with a fast BLAS loaded before MLX's library binds its products. Everything else takes `mx`
from here.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from receipts.errors import EngineMissingError
from teacher.backend.blas import Blas, load_fast_blas

os.environ["MLX_ENABLE_TF32"] = "0"  # `precision` measures that it took effect
_BLAS = load_fast_blas()
try:
    import mlx.core as mx
except ImportError as error:
    raise EngineMissingError(
        f"teacher: expected the package mlx, got '{error}' (install source-teacher[teacher])"
    ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Identity and limits of the device.

    Attributes:
        backend: "metal", "cuda" or "cpu".
        name: what the device calls itself.
        registry_id: Metal's registry id, None where there is none.
        identity: stable identity where there is no registry id: GPU uuid, or the processor's model name.
        max_buffer_bytes: largest single buffer, None when the device states no limit.
        memory_bytes: memory of the device, 0 when unknown.
        blas: library behind CPU products.
        mlx_version: version of MLX.
    """

    backend: str
    name: str
    registry_id: int | None
    identity: str
    max_buffer_bytes: int | None
    memory_bytes: int
    blas: Blas
    mlx_version: str


@functools.cache
def current_device() -> Device:
    """Return the device that MLX runs on by default."""
    backend = _backend()
    info: dict[str, Any] = dict(mx.device_info())
    if backend == "cpu":
        name = identity = _processor_name()
        registry_id = None
    else:
        name = str(info.get("device_name", backend))
        registry_id = _metal_registry_id() if backend == "metal" else None
        identity = _cuda_uuid() if backend == "cuda" else name
    return Device(
        backend=backend,
        name=name,
        registry_id=registry_id,
        identity=identity,
        max_buffer_bytes=int(info["max_buffer_length"]) if "max_buffer_length" in info else None,
        memory_bytes=int(info.get("memory_size", 0)),
        blas=_BLAS if backend == "cpu" else Blas(name="none"),
        mlx_version=importlib.metadata.version("mlx"),
    )


def drain() -> None:
    """Wait until the device has finished everything that was submitted."""
    mx.synchronize()


def _backend() -> str:
    if mx.default_device().type == mx.DeviceType.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def _processor_name() -> str:
    if sys.platform == "darwin":
        done = subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=False)
        return done.stdout.strip() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.lower().startswith(("model name", "cpu model")):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _cuda_uuid() -> str:
    done = subprocess.run(
        ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"], capture_output=True, text=True, check=False
    )
    lines = done.stdout.split() if done.returncode == 0 else []
    return lines[0] if lines else "cuda"


def _metal_registry_id() -> int | None:
    """Ask Metal for the default device's registry id through the Objective-C runtime; MLX does not expose it."""
    try:
        metal = ctypes.CDLL("/System/Library/Frameworks/Metal.framework/Metal")
        objc = ctypes.CDLL("/usr/lib/libobjc.dylib")
    except OSError:
        return None
    metal.MTLCreateSystemDefaultDevice.restype = ctypes.c_void_p
    objc.sel_registerName.restype = ctypes.c_void_p
    objc.sel_registerName.argtypes = [ctypes.c_char_p]
    device = metal.MTLCreateSystemDefaultDevice()
    if not device:
        return None
    send = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p)(("objc_msgSend", objc))
    return int(send(device, objc.sel_registerName(b"registryID")))
