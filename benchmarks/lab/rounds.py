"""Figures over rounds: medians, and ratios of what was measured in one round of one run."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from benchmarks.lab.kept import Round

Rounds = Mapping[int, Round]


@dataclass(frozen=True)
class Spread:
    """The median over rounds, with the smallest and the largest value."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        return cls(median(values), min(values), max(values)) if values else None

    def text(self, digits: int = 0) -> str:
        return f"{self.median:,.{digits}f} ({self.min:,.{digits}f} to {self.max:,.{digits}f})"


@dataclass(frozen=True)
class Target:
    """A requested figure: `value` must be at most or at least `wanted`, unless it is only shown.

    `value` is None if it has not been measured.
    """

    model: str
    what: str
    wanted: float | None
    at_most: bool
    value: Spread | None

    @property
    def met(self) -> bool | None:
        if self.wanted is None or self.value is None:
            return None
        return self.value.median <= self.wanted if self.at_most else self.value.median >= self.wanted


def paired(rounds: Rounds, others: Rounds, combine: Callable[[float, float], float]) -> Spread | None:
    """Combines values of the rounds that two systems have in the same run, and returns their spread."""
    both = [(rounds[r], others[r]) for r in rounds if r in others]
    return Spread.of([combine(own.step_ms, other.step_ms) for own, other in both if own.is_with(other)])


def perceived(rounds: Rounds, slow: float) -> Rounds:
    """The rounds of ranks whose time goes `slow` times slower, in the time that they perceive.

    Processor time stays what it was. How busy the cores were is then that of the ranks' own processes: other work of
    the machine hardly touches ranks that sleep.
    """
    if slow == 1.0:
        return rounds
    found = {}
    for number, each in rounds.items():
        cpu_ms = sum(rank.main_cpu_ms + rank.other_cpu_ms for rank in each.ranks)
        busy = cpu_ms / (each.step_ms * (os.cpu_count() or 1))
        ranks = tuple(
            replace(
                rank,
                step_ms=rank.step_ms / slow,
                each_step_ms=tuple(ms / slow for ms in rank.each_step_ms),
                cores_busy=busy,
            )
            for rank in each.ranks
        )
        found[number] = replace(each, ranks=ranks)
    return found
