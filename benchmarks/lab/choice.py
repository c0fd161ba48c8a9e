"""What the planner chose, beside each strategy forced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

from benchmarks.lab.rounds import Rounds, Spread, paired

OWN = "embrace_2d"
CHOICE_TARGET, PREDICTION_TARGET = 1.05, 0.2

Plans = Mapping[str, Mapping[str, str]]
"""System -> parameter -> strategy."""


@dataclass(frozen=True)
class Choice:
    """Compares the planner's choice with the plans that can be forced.

    Attributes:
        twins: forced systems that have the chosen plan, and so are further measurements of it.
        twin: the fastest of them, and `to_twin`, `OWN`'s step over its own: what two measurements of one plan differ
            by. None without twins.
        other: the fastest system of another plan, and `to_other`, a step of the chosen plan, the mean over `OWN` and
            twins, over its own.
    """

    twins: tuple[str, ...]
    twin: str | None
    to_twin: Spread | None
    other: str | None
    to_other: Spread | None


def choice(cells: Mapping[str, Rounds], plans: Plans) -> Choice:
    """Returns the comparison of `OWN` with the forced systems among `cells`."""
    forced = [system for system in cells if system.startswith("forced_")]
    twins = tuple(system for system in forced if plans[system] == plans[OWN])

    def fastest(systems: Sequence[str]) -> str | None:
        return min(systems, key=lambda s: median(each.step_ms for each in cells[s].values()), default=None)

    twin, other = fastest(twins), fastest([system for system in forced if system not in twins])
    to_twin = paired(cells[OWN], cells[twin], lambda a, b: a / b) if twin else None
    return Choice(twins, twin, to_twin, other, to_other(cells, twins, other) if other else None)


def to_other(cells: Mapping[str, Rounds], twins: Sequence[str], other: str) -> Spread | None:
    """Returns a step of the chosen plan (the mean of `OWN` and its twins) divided by a step of another plan."""
    ratios = []
    for number, measured in cells[OWN].items():
        of_round = {system: cells[system].get(number) for system in (*twins, other)}
        together = {system: each for system, each in of_round.items() if each and each.is_with(measured)}
        if other in together:
            chosen = [measured, *(each for system, each in together.items() if system != other)]
            ratios.append(mean(each.step_ms for each in chosen) / together[other].step_ms)
    return Spread.of(ratios)
