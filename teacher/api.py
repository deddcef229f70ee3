"""The harness from Python: `verify`, and the parts it is made of.

    from teacher.api import verify

    verdict = verify("models/Qwen3.5-4B", "Qwen3.5-4B-Q8_0.gguf", plan="mine.jsonl", policy="q8_0", out="runs/mine")
    print(verdict.status, verdict.reason)

Importing this module starts MLX; do not import torch in the same process, whose products MLX's BLAS would take over.
"""

from teacher.backend.device import current_device
from teacher.compare.sides import compare_sides as compare
from teacher.model.cache import prepare_cache
from teacher.plans.call_shape import CallShape
from teacher.plans.plan import Example, Plan, load_plan
from teacher.process.streams import run_source
from teacher.run.replay import Replay, replay
from teacher.run.session import CallResult, Session
from teacher.snapshot.folder import VerifiedSnapshot, open_snapshot
from teacher.verification import Options, verify

__all__ = [
    "CallResult",
    "CallShape",
    "Example",
    "Options",
    "Plan",
    "Replay",
    "Session",
    "VerifiedSnapshot",
    "compare",
    "current_device",
    "load_plan",
    "open_snapshot",
    "prepare_cache",
    "replay",
    "run_source",
    "verify",
]
