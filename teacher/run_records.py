"""The receipts of a verification that no class of its own makes: plain values, each with its schema."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from teacher.sides.roster import Sides


def candidate_record(files: Mapping[str, Mapping[str, Any]], engine: str, sides: Sides) -> dict[str, Any]:
    """Return candidate.json: the files, by their role, and what the engine says of itself."""
    return {
        "schema": "source-teacher/candidate/v1",
        **files,
        "engine": engine,
        "description": sides.descriptions["candidate"],
    }


def reference_record(sides: Sides) -> dict[str, Any]:
    """Return reference.json."""
    return {
        "schema": "source-teacher/reference/v1",
        "float32": sides.descriptions["pytorch-f32"],
        "bfloat16": sides.descriptions.get("pytorch-bf16"),
    }


def cache_record(teacher: Mapping[str, Any]) -> dict[str, Any]:
    """Return cache.json from what the teacher's replay recorded."""
    return {"schema": "source-teacher/cache/v1", "receipt": teacher["cache_receipt"]}


def calls_record(sides: Sides, teacher: Mapping[str, Any], digests: Mapping[str, str]) -> dict[str, Any]:
    """Return calls.json: the digest of every call's logits on every side.

    Args:
        sides: what ran.
        teacher: what the teacher's replay recorded.
        digests: name of each earlier receipt -> its SHA-256.
    """
    columns = (sides.digests["teacher"], sides.digests["pytorch-f32"], sides.digests["candidate"])
    calls = [
        {
            "example": expected.example,
            "call": expected.call,
            "position": expected.position,
            "rows": expected.rows,
            "width": expected.width,
            "teacher_sha256": expected.sha256,
            "reference_sha256": reference.sha256,
            "candidate_sha256": actual.sha256,
            "graph_policy_sha256": teacher["graph_policy_sha256"],
        }
        for expected, reference, actual in zip(*columns, strict=True)
    ]
    return {
        "schema": "source-teacher/calls/v1",
        "uses": {name: digests[name] for name in ("plan.json", "cache.json")},
        "teacher": sides.descriptions["teacher"],
        "graph_policy": teacher["graph_policy"],
        "hidden_sha256": teacher["hidden_sha256"],
        "calls": calls,
    }


def host_record(sides: Sides, started: datetime) -> dict[str, Any]:
    """Return host.json: when and where, and what it cost; nothing is decided by it."""
    return {
        "schema": "source-teacher/host/v1",
        "started": started.isoformat(timespec="seconds"),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": platform.node(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "seconds": {name: round(value, 2) for name, value in sides.seconds.items()},
        "peak_memory_bytes": sides.peak_bytes,
    }
