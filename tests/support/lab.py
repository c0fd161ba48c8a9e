"""The lab's options and measurements, as tests give them."""

from __future__ import annotations

import argparse

from benchmarks.lab.cell import Measured


def options(**given: object) -> argparse.Namespace:
    names = (
        "models",
        "groups",
        "systems",
        "rounds",
        "ranks",
        "rates_mbit",
        "slow",
        "ratios",
        "turn_ms",
        "size",
        "optimizer",
        "timeout_s",
    )
    return argparse.Namespace(**{**dict.fromkeys(names), "setting": "full", **given})


def measured(step_ms: float, sent_bytes: float = 100.0) -> Measured:
    return Measured(step_ms, (step_ms,), sent_bytes, 8.0, 2.0, 0.5, peak_bytes=300, start_bytes=200)
