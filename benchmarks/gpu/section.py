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
    """The sizes of what is measured.

    Attributes:
        model: size of the lab's models where time is measured.
        rows, columns: of the kernels' table, which each kernel moves once.
        repeats: the number of calls of a kernel.
        steps, rounds: the number of steps in a turn of training, and the number of turns of each system.
        processes: the number of processes that share the GPU.
        ranks, gigabits: the numbers of ranks and the link speeds of the emulated fabric, the most informative first.
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
        found: the file of JSON lines, written during the section, so that an interrupted section keeps its results.
        directory: the folder for files that belong to the results.
        seconds: the time limit of the section.
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
        """Returns whether there is time left for a measurement. Logs the measurement if it is left out."""
        if not self.device.is_real or self.left_s() > seconds:
            return True
        self.add(kind="left out", what=what, why=f"{self.left_s():.0f} s left, {seconds:.0f} s needed")
        return False


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Returns the median of the ratios of figures that were measured in turn."""
    ratios = sorted(a / b for a, b in zip(numerators, denominators, strict=True))
    return ratios[len(ratios) // 2]
