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

    def told(self, record_bytes: int) -> str:
        """Tells of them in a report; a row's record has so many bytes."""
        found, waited = (n / max(self.asked, 1) for n in (self.asked - self.brought, self.missed))
        read, written = (n * record_bytes / max(self.steps, 1) / 2**20 for n in (self.read, self.written))
        return (
            f"{found:.1%} of the rows looked up were there, {waited:.1%} were waited for; {read:,.3f} MiB read and "
            f"{written:,.3f} written a step"
        )
