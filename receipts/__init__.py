"""Receipts: what was claimed, checked and decided. Needs no engine."""
