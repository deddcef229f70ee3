"""Receipts: what was claimed, checked and decided. Needs no engine."""

from receipts.canonical import canonical_bytes, parse_canonical
from receipts.chain import RunCheck, RunWriter, verify_run
from receipts.digest import Digest
from receipts.manifest import SnapshotManifest, build_manifest
from receipts.policy import Policy
from receipts.report import Report
from receipts.verdict import Check, Verdict, decide

__all__ = [
    "Check",
    "Digest",
    "Policy",
    "Report",
    "RunCheck",
    "RunWriter",
    "SnapshotManifest",
    "Verdict",
    "build_manifest",
    "canonical_bytes",
    "decide",
    "parse_canonical",
    "verify_run",
]
