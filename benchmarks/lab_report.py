"""From measured cells to a summary, a Markdown table and bars: what is printed, written and drawn of a lab's results.

Legend
    cell    one system training one model for one round, on all ranks
    round   every system once, in turn; ratios and exposed communication are taken within a round
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from statistics import mean, median
from typing import Any

from benchmarks.lab_cell import Measured
from benchmarks.peers import SYSTEMS

ALONE = "alone_sparse"
MIB = 2**20
NONE = "-"
LOSS_TOLERANCE = 1e-3
"""Largest relative difference of two systems' losses: they add gradients in other orders, and train few steps only."""

Rounds = Mapping[int, Sequence[Measured]]
"""Round -> what each rank measured."""


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


@dataclass(frozen=True)
class Row:
    """One system on one model.

    Attributes:
        step_ms: a step, median over ranks.
        ratio: its step over the reference system's, of the same round.
        exposed_ms: its step less that of `System.alone`, of the same round.
        sent_bytes: per step, all ranks together.
        peak_bytes, added_bytes: largest memory of a rank, and how much of it came after the rank was ready.
        loss_difference: largest relative difference of its losses from those of the first system that communicates.
        notes: what the system itself decided, on rank 0.
    """

    system: str
    rounds: int
    step_ms: Spread
    ratio: Spread | None
    exposed_ms: Spread | None
    sent_bytes: Spread
    peak_bytes: Spread
    added_bytes: Spread
    first_step_s: Spread
    loss_difference: float | None
    notes: str


def step_ms(ranks: Sequence[Measured]) -> float:
    return median(rank.step_ms for rank in ranks)


def summarize(cells: Mapping[str, Rounds], reference: str, shaped: bool) -> list[Row]:
    """A row for every system with a measured round.

    Args:
        cells: system -> its rounds.
        reference: the system that ratios are over.
        shaped: whether each rank counts its own interface; otherwise all count the same one.
    """
    of_all = sum if shaped else median
    expected = next((_losses(rounds) for system, rounds in cells.items() if rounds and SYSTEMS[system].alone), None)
    rows = []
    for system, rounds in cells.items():
        measured = list(rounds.values())
        if not measured:
            continue

        def spread(values: Any, measured: list[Sequence[Measured]] = measured) -> Spread:
            found = Spread.of([float(values(ranks)) for ranks in measured])
            assert found is not None
            return found

        alone = SYSTEMS[system].alone
        rows.append(
            Row(
                system,
                len(measured),
                spread(step_ms),
                _paired(rounds, cells.get(reference, {}), lambda own, other: own / other),
                _paired(rounds, cells.get(alone, {}), lambda own, other: own - other) if alone else None,
                spread(lambda ranks: of_all([rank.sent_bytes for rank in ranks])),
                spread(lambda ranks: max(rank.peak_bytes for rank in ranks)),
                spread(lambda ranks: max(rank.peak_bytes - rank.start_bytes for rank in ranks)),
                spread(lambda ranks: max(rank.first_step_s for rank in ranks)),
                _difference(_losses(rounds), expected) if alone and expected else None,
                measured[0][0].notes,
            )
        )
    return rows


def _paired(rounds: Rounds, others: Rounds, combine: Any) -> Spread | None:
    return Spread.of([combine(step_ms(rounds[r]), step_ms(others[r])) for r in rounds if r in others])


def _losses(rounds: Rounds) -> list[float]:
    """Mean over ranks, by step, of the first round."""
    ranks = next(iter(rounds.values()))
    return [mean(step) for step in zip(*(rank.losses for rank in ranks), strict=True)]


def _difference(losses: list[float], expected: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))


# -- text --------------------------------------------------------------------------------------------------------------


def markdown(results: Mapping[str, Any], plots: Mapping[str, str]) -> str:
    """The results as a page; `plots`: model -> file name of its picture."""
    setting, network = results["configuration"], results["network"]
    limited = (
        f"{setting['ranks']} ranks, each on a host of its own (network namespaces), {setting['rate_mbit']:g} Mb/s each "
        f"way; a bare transfer reaches {median(network['transfer_mbit']):.0f} Mb/s"
        if network["shaped"]
        else f"{setting['ranks']} ranks on the loopback interface WITHOUT a limit, because: {network['reason']}"
    )
    lines = [
        f"# Lab, {setting['name']}, {results['date']}",
        "",
        f"Measured: {limited}. Models at size `{setting['size']}`, {setting['optimizer']}; a cell is "
        f"{setting['warm_up_steps']} warm-up and {setting['steps']} measured steps in fresh processes, systems take "
        f"turns within a round. {results['machine']}; {_versions(results['versions'])}. How to read this: README.md.",
    ]
    if not results["complete"]:
        lines += ["", "**Partial:** not every round of every system has been measured."]
    for model, found in results["models"].items():
        lines += ["", f"## {model}", "", *_floor_lines(found), "", *_table(found)]
        if model in plots:
            lines += ["", f"![{model}: step times]({plots[model]})"]
        lines += [f"\n{system} did not run: {reason}" for system, reason in found["failures"].items()]
    return "\n".join(lines) + "\n"


def _versions(versions: Mapping[str, Mapping[str, str]]) -> str:
    return "; ".join(
        f"{environment}: " + ", ".join(f"{package} {version}" for package, version in packages.items())
        for environment, packages in versions.items()
    )


def _floor_lines(found: Mapping[str, Any]) -> list[str]:
    size, lowest = found["sizes"], found["floor"]
    compute = f"{lowest['compute_ms']:,.0f} ms" if lowest["compute_ms"] is not None else "not measured"
    return [
        f"{size['total_bytes'] / MIB:,.1f} MiB of parameters, {size['table_bytes'] / MIB:,.1f} of them tables "
        f"({size['table_bytes'] / size['total_bytes']:.1%}). Floors: compute alone {compute}; wire "
        f"{lowest['wire_ms']:,.0f} ms ({lowest['bytes_per_rank'] / 1e6:,.2f} MB per rank)."
    ]


def _table(found: Mapping[str, Any]) -> list[str]:
    reference = found["reference"]
    lines = [
        f"| system | rounds | step ms | step / {reference} | exposed ms | sent MB | peak MiB (added) | first step s "
        "| loss differs |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.system} | {row.rounds} | {row.step_ms.text()} | {row.ratio.text(2) if row.ratio else NONE} "
        f"| {row.exposed_ms.text() if row.exposed_ms else NONE} | {row.sent_bytes.median / 1e6:,.2f} "
        f"| {row.peak_bytes.median / MIB:,.0f} ({row.added_bytes.median / MIB:,.0f}) "
        f"| {row.first_step_s.median:.1f} | {_agreement(row.loss_difference)} |"
        for row in found["rows"]
    ]
    return lines


def _agreement(difference: float | None) -> str:
    if difference is None:
        return NONE
    return f"{difference:.0e}" if difference <= LOSS_TOLERANCE else f"**{difference:.0e}**"


def as_data(results: Mapping[str, Any]) -> dict[str, Any]:
    """The results as JSON takes them."""
    models = {
        model: {**found, "rows": [asdict(row) for row in found["rows"]]} for model, found in results["models"].items()
    }
    return {**results, "models": models}


# -- pictures ----------------------------------------------------------------------------------------------------------

WIDTH, LEFT, RIGHT, BAR, GAP, TOP = 860, 170, 110, 20, 8, 44
COMPUTE, EXPOSED, FLOOR, INK, FAINT = "#7a9cc6", "#e08a4f", "#b03a48", "#222", "#888"


def svg(model: str, found: Mapping[str, Any], title: str) -> str:
    """Bars of the step times: compute alone, then what is exposed; whiskers from the fastest to the slowest round.

    The dashed line is the larger of the two floors.
    """
    rows, lowest = found["rows"], found["floor"]
    longest = max(row.step_ms.max for row in rows)
    scale = (WIDTH - LEFT - RIGHT) / longest
    height = TOP + len(rows) * (BAR + GAP) + 46
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        f'font-size="12" fill="{INK}">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="18" font-size="14" font-weight="bold">{escape(title)}</text>',
        f'<text x="{LEFT}" y="34" fill="{FAINT}">milliseconds per step, median of rounds; less is better</text>',
    ]
    for i, row in enumerate(rows):
        parts += _bar(row, TOP + i * (BAR + GAP), scale)
    bottom = TOP + len(rows) * (BAR + GAP)
    if lowest["wire_ms"] <= longest:
        at = LEFT + max(lowest["wire_ms"], lowest["compute_ms"] or 0) * scale
        parts.append(
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{TOP - 4}" y2="{bottom}" stroke="{FLOOR}" stroke-dasharray="4 3">'
            "<title>floor: the larger of compute alone and the wire</title></line>"
        )
    legend = ((COMPUTE, "compute alone"), (EXPOSED, "exposed communication"), (FLOOR, "floor (compute or wire)"))
    for i, (color, name) in enumerate(legend):
        x = LEFT + i * 190
        parts.append(f'<rect x="{x}" y="{bottom + 14}" width="12" height="12" fill="{color}"/>')
        parts.append(f'<text x="{x + 18}" y="{bottom + 24}">{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _bar(row: Row, y: int, scale: float) -> list[str]:
    whole = row.step_ms.median * scale
    exposed = max(0.0, row.exposed_ms.median * scale) if row.exposed_ms else 0.0
    compute = max(0.0, whole - exposed)
    low, high, middle = LEFT + row.step_ms.min * scale, LEFT + row.step_ms.max * scale, y + BAR / 2
    return [
        f'<text x="{LEFT - 8}" y="{y + 15}" text-anchor="end">{escape(row.system)}</text>',
        f'<rect x="{LEFT}" y="{y}" width="{compute:.1f}" height="{BAR}" fill="{COMPUTE}"/>',
        f'<rect x="{LEFT + compute:.1f}" y="{y}" width="{exposed:.1f}" height="{BAR}" fill="{EXPOSED}"/>',
        f'<path d="M{low:.1f} {middle}H{high:.1f}M{low:.1f} {middle - 4}v8M{high:.1f} {middle - 4}v8" '
        f'stroke="{INK}" fill="none"/>',
        f'<text x="{max(high, LEFT + whole) + 6:.1f}" y="{y + 15}">{row.step_ms.median:,.0f}</text>',
    ]
