"""Counts of what a working set has done."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counts:
    """Counts of a working set: steps; rows looked up, brought there, waited for, read and written; most at once."""

    steps: int = 0
    asked: int = 0
    brought: int = 0
    missed: int = 0
    read: int = 0
    written: int = 0
    most: int = 0
