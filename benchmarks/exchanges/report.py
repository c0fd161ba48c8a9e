"""From measured exchanges to tables and a picture.

Legend
    cell    one system on one case for one round, on all ranks: the median of its runs
    to dense    time of the dense AllReduce over the system's, of the same round and case; more is better
    bound   the bytes of the values that the system must send, and the time they take on a link (`least_bytes`)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from statistics import mean, median
from typing import Any

from benchmarks.exchanges.cases import CASES, SYSTEMS, Case, least_bytes, picked
from benchmarks.exchanges.rank import cluster_of
from benchmarks.lab.rounds import Spread

DENSE = "allreduce"
Cells = Mapping[tuple[int, str, str], Mapping[str, Any]]
"""By round, case and system."""


@dataclass(frozen=True)
class Row:
    """One system on one case.

    Attributes:
        ms: the time of an exchange on the slowest rank.
        to_dense: None where the dense AllReduce was not measured in the same rounds.
        sent_bytes: the bytes that a rank sends, counted by its network interface, averaged over ranks and rounds.
        bytes_to_bound, ms_to_bound: over the least bytes, and over their time at the rate of a bare transfer.
        imbalance: the bytes of the rank that sends the most, divided by the mean over ranks.
        cpu_ms: of all ranks together over the machine's cores: what the exchange would take with no wire at all.
        predicted_ms: the time that the formulas predict for the probed links and processors.
        handling_ms: the part of `predicted_ms` that processors take.
        picked: whether the planner chooses this system under "auto".
    """

    case: str
    system: str
    rounds: int
    ms: Spread
    to_dense: Spread | None
    sent_bytes: float
    bytes_to_bound: float
    ms_to_bound: float
    imbalance: float
    cpu_ms: float
    predicted_ms: float
    handling_ms: float
    picked: bool


def summarise(cells: Cells, configuration: Mapping[str, Any]) -> list[Row]:
    """Returns a row for every case and system that has a measured round."""
    ranks, cluster = configuration["ranks"], cluster_of(configuration["cluster"])
    bytes_per_ms = median(configuration["network"]["transfer_mbit"]) * 1e3 / 8
    rows = []
    for case in (Case(case.kind, case.density, configuration["divisor"]) for case in CASES):
        if not any(name == case.name for _, name, _ in cells):
            continue
        sparsity = case.sparsity(ranks)
        choice = picked(case, [case.ids(rank) for rank in range(ranks)], cluster)
        dense = {r: _ms(cell) for (r, name, system), cell in cells.items() if (name, system) == (case.name, DENSE)}
        for system in SYSTEMS.values():
            found = {r: cell for (r, name, s), cell in cells.items() if (name, s) == (case.name, system.name)}
            if not found:
                continue
            ms = Spread.of([_ms(cell) for cell in found.values()])
            assert ms is not None
            bound, predicted = least_bytes(system.name, sparsity), system.predict(sparsity, cluster)
            sent = mean(mean(cell["sent_bytes"]) for cell in found.values())
            rows.append(
                Row(
                    case.name,
                    system.name,
                    len(found),
                    ms,
                    Spread.of([dense[r] / _ms(cell) for r, cell in found.items() if r in dense]),
                    sent,
                    sent / bound,
                    ms.median / (bound / bytes_per_ms),
                    mean(max(cell["sent_bytes"]) / mean(cell["sent_bytes"]) for cell in found.values()),
                    mean(sum(cell["cpu_s"]) for cell in found.values()) * 1e3 / configuration["cores"],
                    predicted.time_ms(cluster),
                    predicted.work.time_ms(cluster),
                    system.name == choice,
                )
            )
    return rows


def _ms(cell: Mapping[str, Any]) -> float:
    seconds: list[float] = cell["seconds"]
    return median(seconds) * 1e3


def markdown(rows: Sequence[Row], configuration: Mapping[str, Any], picture: str = "") -> str:
    """Returns the results as a page in Markdown."""
    network = configuration["network"]
    limited = (
        f"{configuration['ranks']} ranks, each on a host of its own (network namespaces), "
        f"{configuration['rate_mbit']:g} Mb/s each way; a bare transfer reaches "
        f"{median(network['transfer_mbit']):.0f} Mb/s"
        if network["shaped"]
        else f"{configuration['ranks']} ranks on the loopback interface WITHOUT a limit, because: {network['reason']}"
    )
    divided = f" / {configuration['divisor']}" if configuration["divisor"] > 1 else ""
    lines = [
        f"# Sparse exchanges beside the dense AllReduce, {configuration['date']}",
        "",
        f"Measured: `{configuration['command']}`, gradients of 100 MiB{divided}, float32, in place. {limited}. "
        f"torch {configuration['torch']}, Python {configuration['python']}, {configuration['cores']} cores, one thread "
        "per rank. How to read this: README.md.",
    ]
    if not configuration["complete"]:
        lines += ["", "**Partial:** not every round of every system has been measured."]
    if picture:
        lines += ["", f"![times faster than the dense AllReduce]({picture})"]
    lines += ["", "## Times faster than the dense AllReduce", "", *_speedups(rows), "", "## All figures", ""]
    return "\n".join([*lines, *_figures(rows)]) + "\n"


def _speedups(rows: Sequence[Row]) -> list[str]:
    systems = [system for system in SYSTEMS if any(row.system == system for row in rows)]
    lines = [f"| case | {' | '.join(systems)} |", "|---" * (len(systems) + 1) + "|"]
    for case in dict.fromkeys(row.case for row in rows):
        of_case = {row.system: row for row in rows if row.case == case}
        texts = []
        for system in systems:
            row = of_case.get(system)
            text = f"{row.to_dense.median:.2f}" if row and row.to_dense else "-"
            texts.append(f"**{text}**" if row and row.picked else text)
        lines.append(f"| {case} | {' | '.join(texts)} |")
    return [*lines, "", 'In bold: what the planner picks under "auto".']


def _figures(rows: Sequence[Row]) -> list[str]:
    lines = [
        "| case | system | rounds | ms | to dense | sent MB | to bound | ms to bound | imbalance | CPU ms "
        "| predicted ms | of that handling | predicted / measured |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.case} | {row.system}{' (auto)' if row.picked else ''} | {row.rounds} | {row.ms.text()} "
        f"| {row.to_dense.text(2) if row.to_dense else '-'} | {row.sent_bytes / 1e6:.2f} | {row.bytes_to_bound:.3f} "
        f"| {row.ms_to_bound:.2f} | {row.imbalance:.2f} | {row.cpu_ms:.0f} | {row.predicted_ms:.0f} "
        f"| {row.handling_ms:.0f} | {row.predicted_ms / row.ms.median:.2f} |"
        for row in rows
    ]
    return lines


# -- picture -----------------------------------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, TOP, PANEL = 900, 420, 50, 56, 380
COLOURS = dict(zip(SYSTEMS, ("#222", "#7a9cc6", "#e08a4f", "#2f8f5b", "#9ccaa8", "#b03a48"), strict=True))


def svg(rows: Sequence[Row], configuration: Mapping[str, Any]) -> str:
    """Times faster than the dense AllReduce over density, both in powers: a panel for each kind of zeros."""
    with_ratio = [row for row in rows if row.to_dense]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="11" fill="#222">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="18" font-size="14" font-weight="bold">Times faster than the dense AllReduce, '
        f"{configuration['ranks']} ranks, {configuration['rate_mbit']:g} Mb/s</text>",
    ]
    speeds = [row.to_dense.median for row in with_ratio if row.to_dense] or [1.0]
    low, high = math.log2(min(speeds)) - 0.3, math.log2(max(*speeds, 2.0)) + 0.3
    for index, (kind, title) in enumerate((("blocks", "random blocks of 256"), ("zipf", "Zipf rows of 512"))):
        x0 = LEFT + index * (PANEL + 60)
        parts += _panel(kind, title, [row for row in with_ratio if row.case.startswith(kind)], x0, low, high)
    for i, (system, colour) in enumerate(COLOURS.items()):
        x = LEFT + i * 135
        parts.append(f'<rect x="{x}" y="{HEIGHT - 18}" width="12" height="4" fill="{colour}"/>')
        parts.append(f'<text x="{x + 17}" y="{HEIGHT - 12}">{escape(system)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(kind: str, title: str, rows: Sequence[Row], x0: float, low: float, high: float) -> list[str]:
    bottom = HEIGHT - 60

    def x(density: float) -> float:
        return x0 + PANEL * (1 + math.log10(density) / 2)

    def y(speed: float) -> float:
        return bottom - (bottom - TOP) * (math.log2(speed) - low) / (high - low)

    parts = [f'<text x="{x0}" y="{TOP - 14}" font-weight="bold">{title}; density of a rank</text>']
    for power in range(math.ceil(low), math.floor(high) + 1):
        at = y(2.0**power)
        stroke = "#666" if power == 0 else "#ddd"
        parts.append(f'<line x1="{x0}" x2="{x0 + PANEL}" y1="{at:.1f}" y2="{at:.1f}" stroke="{stroke}"/>')
        parts.append(f'<text x="{x0 - 6}" y="{at + 4:.1f}" text-anchor="end">{2.0**power:g}</text>')
    parts += [
        f'<text x="{x(density):.1f}" y="{bottom + 16}" text-anchor="middle">{density:g}</text>'
        for density in (0.01, 0.02, 0.04, 0.1, 0.2, 0.4, 1.0)
    ]
    density_of = {case.name: case.density for case in CASES if case.kind == kind}
    for system, colour in COLOURS.items():
        points = sorted(
            (x(density_of[row.case]), y(row.to_dense.median)) for row in rows if row.system == system and row.to_dense
        )
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{px:.1f}" cy="{py:.1f}" r="2.5" fill="{colour}"/>' for px, py in points]
    return parts
