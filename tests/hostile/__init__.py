"""Hostile input, failing disks, kills: what the converter guarantees in docs/robustness.md."""
