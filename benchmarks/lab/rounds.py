"""Figures over rounds: medians, and ratios of what was measured in one round of one run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.lab.kept import Round

Rounds = Mapping[int, Round]


@dataclass(frozen=True)
class Spread:
    """Median over rounds, with the smallest and the largest."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        return cls(median(values), min(values), max(values)) if values else None

    def text(self, digits: int = 0) -> str:
        return f"{self.median:,.{digits}f} ({self.min:,.{digits}f} to {self.max:,.{digits}f})"


def paired(rounds: Rounds, others: Rounds, combine: Callable[[float, float], float]) -> Spread | None:
    """Over the rounds that both have of one run."""
    both = [(rounds[r], others[r]) for r in rounds if r in others]
    return Spread.of([combine(own.step_ms, other.step_ms) for own, other in both if own.is_with(other)])
