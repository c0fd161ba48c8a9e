"""What the planner chose, beside each strategy forced: in one measurement, in two, and in the latest of several.

    python -m benchmarks.lab.choice FIRST.json.xz SECOND.json.xz  two results of `python -m benchmarks.lab strategies`
    python -m benchmarks.lab.choice --latest A.json.xz B.json.xz ..  of each setting, the last file that has it

Of several plans that take about as long, the fastest of a measurement is so by chance as well: what the chosen one is
behind it by is more than it would be another time. So the fastest other plan of each measurement is looked at in the
other one, whose systems were opened anew. Where the planner chose otherwise the second time, that says nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.lab.cell import Measured
from benchmarks.lab.kept import Round
from benchmarks.lab.rounds import Rounds, Spread, paired
from benchmarks.records import read_record

OWN = "embrace_2d"
CHOICE_TARGET, PREDICTION_TARGET = 1.05, 0.2

Plans = Mapping[str, Mapping[str, str]]
"""System -> parameter -> strategy."""


@dataclass(frozen=True)
class Choice:
    """What the planner chose, beside what can be forced.

    Attributes:
        twins: forced systems whose plan is the chosen one: further measurements of it.
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
    """Of `OWN` and the forced systems among `cells`."""
    forced = [system for system in cells if system.startswith("forced_")]
    twins = tuple(system for system in forced if plans[system] == plans[OWN])

    def fastest(systems: Sequence[str]) -> str | None:
        return min(systems, key=lambda s: median(each.step_ms for each in cells[s].values()), default=None)

    twin, other = fastest(twins), fastest([system for system in forced if system not in twins])
    to_twin = paired(cells[OWN], cells[twin], lambda a, b: a / b) if twin else None
    return Choice(twins, twin, to_twin, other, to_other(cells, twins, other) if other else None)


def to_other(cells: Mapping[str, Rounds], twins: Sequence[str], other: str) -> Spread | None:
    """A step of the chosen plan, the mean over `OWN` and twins, over that of another one."""
    ratios = []
    for number, measured in cells[OWN].items():
        of_round = {system: cells[system].get(number) for system in (*twins, other)}
        together = {system: each for system, each in of_round.items() if each and each.is_with(measured)}
        if other in together:
            chosen = [measured, *(each for system, each in together.items() if system != other)]
            ratios.append(mean(each.step_ms for each in chosen) / together[other].step_ms)
    return Spread.of(ratios)


@dataclass(frozen=True)
class _Measurement:
    """One setting of one file of results.

    Attributes:
        predicted: of `OWN`, over its measured step.
    """

    cells: Mapping[str, Rounds]
    plans: Plans
    predicted: float

    @property
    def choice(self) -> Choice:
        return choice(self.cells, self.plans)

    def over(self, other: str | None) -> float | None:
        """The chosen plan's step over that of a system of another plan."""
        if other is None or other not in self.cells or other in self.choice.twins:
            return None
        spread = to_other(self.cells, self.choice.twins, other)
        return spread.median if spread is not None else None


def _read(file: Path) -> dict[str, _Measurement]:
    found: dict[str, Any] = read_record(file)
    return {
        f"{block['model']}, {block['ranks']} ranks, {block['rate_mbit']:g} Mb/s": _Measurement(
            {system: _rounds(rounds) for system, rounds in block["rounds"].items()},
            {row["system"]: row["plan"] for row in block["rows"]},
            next(row["predicted"]["median"] for row in block["rows"] if row["system"] == OWN),
        )
        for block in found["blocks"]
        if block["choice"] is not None
    }


def _rounds(rounds: Mapping[str, Mapping[str, Any]]) -> Rounds:
    return {
        int(number): Round({"run": each["run"]}, tuple(Measured.of(rank) for rank in each["ranks"]))
        for number, each in rounds.items()
    }


def compared(first: Path, second: Path) -> str:
    """The settings that both files have, as a table."""
    before, after = _read(first), _read(second)
    lines = [
        f"The chosen plan's step over that of another plan, first in `{first.name}`, then in `{second.name}`. Crossed: "
        "over the plan that was the fastest other one in the other file, the geometric mean of both.",
        "",
        f"| setting | first: fastest other | ratio | then | ratio | crossed | at most {CHOICE_TARGET} |",
        "|---|---|---|---|---|---|---|",
    ]
    for title in (title for title in before if title in after):
        one, two = before[title], after[title]
        here, there = one.choice.other, two.choice.other
        same = one.plans[OWN] == two.plans[OWN]
        both = (two.over(here), one.over(there)) if same else (None, None)
        crossed = sqrt(both[0] * both[1]) if both[0] is not None and both[1] is not None else None
        judged = crossed if crossed is not None else two.over(there)
        met = "-" if judged is None else _met(judged <= CHOICE_TARGET)
        told = _text(crossed) if same else "another plan was chosen"
        lines.append(
            f"| {title} | {here} | {_text(one.over(here))} | {there} | {_text(two.over(there))} | {told} | {met} |"
        )
    return "\n".join(lines)


def latest(files: Sequence[Path]) -> str:
    """Every setting of the files, from the last one that has it, as a table."""
    found = {title: (file, each) for file in files for title, each in _read(file).items()}
    missed = {"ratio": 0, "prediction": 0}
    within = f"within {PREDICTION_TARGET:.0%}"
    lines = [
        "Each setting from the last of these files that has it: "
        + ", ".join(f"({number}) `{file.name}`" for number, file in enumerate(files, 1))
        + ". The chosen plan's step over that of the fastest other plan, and `auto`'s predicted step over its own.",
        "",
        f"| setting | file | fastest other | ratio | at most {CHOICE_TARGET} | predicted | {within} |",
        "|---|---|---|---|---|---|---|",
    ]
    for title in sorted(found, key=_order):
        file, each = found[title]
        other = each.choice.other
        ratio = each.over(other)
        fast, close = ratio is None or ratio <= CHOICE_TARGET, abs(each.predicted - 1) <= PREDICTION_TARGET
        missed["ratio"] += not fast
        missed["prediction"] += not close
        lines.append(
            f"| {title} | {files.index(file) + 1} | {other} | {_text(ratio)} | {_met(fast)} | {each.predicted:.2f} | "
            f"{_met(close)} |"
        )
    fast_ones, close_ones = (f"{len(found) - number} of {len(found)}" for number in missed.values())
    return "\n".join([*lines, "", f"At most {CHOICE_TARGET} times: {fast_ones}; predicted {within}: {close_ones}."])


def _order(title: str) -> tuple[float, int, str]:
    """Of "lm, 8 ranks, 200 Mb/s": by rate, ranks and model."""
    model, ranks, rate = title.split(", ")
    return float(rate.split()[0]), -int(ranks.split()[0]), model


def _met(met: bool) -> str:
    return "yes" if met else "**no**"


def _text(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


if __name__ == "__main__":
    if sys.argv[1] == "--latest":
        print(latest([Path(file) for file in sys.argv[2:]]))
    else:
        print(compared(*map(Path, sys.argv[1:3])))
