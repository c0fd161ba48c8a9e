"""The lab's pictures, as SVG: speedups, scaling and ablation over blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from benchmarks.lab.choice import OWN
from benchmarks.lab.settings import ABLATION, REPLICAS, SHARDED

WIDTH, LEFT, RIGHT, BAR, GAP, TOP = 860, 210, 110, 20, 8, 44
INK, FAINT = "#222", "#888"
MORE = "times; more is better"
COLORS = ("#7a9cc6", "#8fb573", "#c9a24b", "#b05f8a")


def pictures(found: Mapping[str, Any]) -> dict[str, str]:
    """Returns file name -> picture."""
    return {
        name: grouped_bars(title, under, groups)
        for name, title, under, groups in (
            ("speedup.svg", f"Step of the best other system over that of {OWN}", MORE, _speedups(found)),
            ("scaling.svg", "Exposed communication", "milliseconds per step; less is better", _scaling(found)),
            ("ablation.svg", "Step of the hybrid alone over that of", MORE, _ablation(found)),
        )
        if groups
    }


@dataclass(frozen=True)
class Group:
    """A group of bars: pairs (name, value)."""

    title: str
    bars: tuple[tuple[str, float], ...]


def _speedups(found: Mapping[str, Any]) -> list[Group]:
    groups = []
    for block in found["blocks"]:
        rows = {row.system: row for row in block["rows"] if row.ratio}
        bars = []
        for name, systems in (("DDP, Horovod", REPLICAS), ("TorchRec, PS, Parallax", SHARDED)):
            ratios = [row.ratio.median for system in systems if (row := rows.get(system)) and row.ratio]
            if ratios:
                bars.append((f"best of {name}", min(ratios)))
        if bars:
            groups.append(Group(block["title"], tuple(bars)))
    return groups


def _scaling(found: Mapping[str, Any]) -> list[Group]:
    shown = (OWN, "ddp", "ddp_sparse", "torchrec_column")
    groups = []
    for block in sorted(found["blocks"], key=lambda b: (b["model"], b["rate_mbit"], b["ranks"])):
        rows = {row.system: row for row in block["rows"]}
        bars = [(s, max(0.0, rows[s].exposed_ms.median)) for s in shown if s in rows and rows[s].exposed_ms]
        if bars:
            groups.append(Group(block["title"], tuple(bars)))
    return groups


def _ablation(found: Mapping[str, Any]) -> list[Group]:
    groups = []
    for block in found["blocks"]:
        rows = {row.system: row for row in block["rows"] if row.system in ABLATION}
        if len(rows) == len(ABLATION):
            first = rows[ABLATION[0]].step_ms.median
            bars = tuple((s.removeprefix("embrace_"), first / rows[s].step_ms.median) for s in ABLATION)
            groups.append(Group(block["title"], bars))
    return groups


def grouped_bars(title: str, under: str, groups: Sequence[Group]) -> str:
    """Draws horizontal bars in groups, with one colour for each name."""
    names = list(dict.fromkeys(name for group in groups for name, _ in group.bars))
    longest = max(value for group in groups for _, value in group.bars) or 1.0
    scale = (WIDTH - LEFT - RIGHT) / longest
    y, parts = TOP, []
    for group in groups:
        middle = y + len(group.bars) * BAR / 2 + 4
        parts.append(f'<text x="{LEFT - 8}" y="{middle:.0f}" text-anchor="end">{escape(group.title)}</text>')
        for name, value in group.bars:
            color = COLORS[names.index(name) % len(COLORS)]
            parts.append(
                f'<rect x="{LEFT}" y="{y}" width="{value * scale:.1f}" height="{BAR - 3}" fill="{color}"/>'
                f'<text x="{LEFT + value * scale + 6:.1f}" y="{y + 13}">{_number(value)}</text>'
            )
            y += BAR
        y += 2 * GAP
    legend = [(COLORS[i % len(COLORS)], name) for i, name in enumerate(names)]
    return "\n".join([*_begin(title, under, y + 46), *parts, *_legend(legend, y), "</svg>"]) + "\n"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 20 else f"{value:.2f}"


def _begin(title: str, under: str, height: float) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" font-family="sans-serif" '
        f'font-size="12" fill="{INK}">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{height:.0f}" fill="white"/>',
        f'<text x="{LEFT}" y="18" font-size="14" font-weight="bold">{escape(title)}</text>',
        f'<text x="{LEFT}" y="34" fill="{FAINT}">{escape(under)}</text>',
    ]


def _legend(entries: Sequence[tuple[str, str]], y: float) -> list[str]:
    return [
        f'<rect x="{20 + i * 215}" y="{y + 14:.0f}" width="12" height="12" fill="{color}"/>'
        f'<text x="{38 + i * 215}" y="{y + 24:.0f}">{escape(name)}</text>'
        for i, (color, name) in enumerate(entries)
    ]
