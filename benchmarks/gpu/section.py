"""What a section is given, and how it hands back what it finds."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.device import Device


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
        model: size of the lab's models where time is measured.
        rows, columns: of the kernels' table, which each kernel moves once.
        repeats: calls of a kernel.
        steps, rounds: of a training window, and how often the systems take turns.
        processes: how many share the GPU.
        ranks, gigabits: of the emulated fabric, the most telling first.
    """

    model: str = "paper"
    rows: int = 1_000_000
    columns: int = 512
    repeats: int = 20
    steps: int = 5
    rounds: int = 3
    processes: tuple[int, ...] = (2, 4)
    ranks: tuple[int, ...] = (16, 8, 4)
    gigabits: tuple[int, ...] = (100, 25)


DRY = Sizes("tiny", rows=64, columns=16, repeats=2, steps=1, rounds=1, processes=(2,), ranks=(4,), gigabits=(100,))


@dataclass
class Context:
    """One run of one section.

    Attributes:
        found: JSON lines, written as they are found: what a section that is cut off has found by then is kept.
        directory: for files that belong to the results.
        seconds: until the section is cut off.
    """

    device: Device
    sizes: Sizes
    found: Path
    directory: Path
    seconds: float
    started: float = field(default_factory=time.monotonic)

    def add(self, **row: Any) -> None:
        with self.found.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def left_s(self) -> float:
        return self.seconds - (time.monotonic() - self.started)

    def affords(self, seconds: float, what: str) -> bool:
        """Whether there is time left for something; what is left out is told."""
        if not self.device.is_real or self.left_s() > seconds:
            return True
        self.add(kind="left out", what=what, why=f"{self.left_s():.0f} s left, {seconds:.0f} s needed")
        return False


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Median of the ratios of figures that were taken in turn."""
    ratios = sorted(a / b for a, b in zip(numerators, denominators, strict=True))
    return ratios[len(ratios) // 2]
