"""The lab's pictures: step times of a block, speedups, scaling and ablation over blocks, all as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from benchmarks.lab.choice import OWN
from benchmarks.lab.results import Row
from benchmarks.lab.settings import ABLATION, REPLICAS, SHARDED

WIDTH, LEFT, RIGHT, BAR, GAP, TOP = 860, 210, 110, 20, 8, 44
COMPUTE, EXPOSED, FLOOR, INK, FAINT = "#7a9cc6", "#e08a4f", "#b03a48", "#222", "#888"
COLORS = ("#7a9cc6", "#8fb573", "#c9a24b", "#b05f8a")


def pictures(found: Mapping[str, Any]) -> dict[str, str]:
    """File name -> picture; of each model one timeline, and one with more ranks, or several on a host."""
    drawn: dict[str, str] = {}
    shown: dict[tuple[str, int], int] = {}
    for block in found["blocks"]:
        name = block["stem"]
        drawn[f"{name}.svg"] = step_times(block)
        place = (block["model"], block["per_host"])
        if block["picture"] and block["ranks"] > shown.get(place, 0):
            drawn[f"{name}-timeline.svg"] = block["picture"]
            shown[place] = block["ranks"]
    for name, title, under, groups in (
        ("speedup.svg", f"Step of the best other system over that of {OWN}", "times; more is better", _speedups(found)),
        ("scaling.svg", "Exposed communication", "milliseconds per step; less is better", _scaling(found)),
        ("ablation.svg", "Step of the hybrid alone over that of", "times; more is better", _ablation(found)),
    ):
        if groups:
            drawn[name] = grouped_bars(title, under, groups)
    return drawn


def step_times(block: Mapping[str, Any]) -> str:
    """Bars of the step times: what is not exposed, then what is; whiskers from the fastest to the slowest round.

    The dashed line is the limit.
    """
    rows, limit = block["rows"], block["floors"]["limit_ms"]
    longest = max(row.step_ms.max for row in rows)
    scale = (WIDTH - LEFT - RIGHT) / longest
    bottom = TOP + len(rows) * (BAR + GAP)
    parts = _begin(block["title"], "milliseconds per step, median of rounds; less is better", bottom + 46)
    for i, row in enumerate(rows):
        parts += _bar(row, TOP + i * (BAR + GAP), scale)
    if limit is not None and limit <= longest:
        at = LEFT + limit * scale
        parts.append(
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{TOP - 4}" y2="{bottom}" stroke="{FLOOR}" stroke-dasharray="4 3">'
            f"<title>limit: {block['floors']['limited_by']}</title></line>"
        )
    legend = ((COMPUTE, "the same without communication"), (EXPOSED, "exposed communication"), (FLOOR, "limit"))
    return "\n".join([*parts, *_legend(legend, bottom), "</svg>"]) + "\n"


def _bar(row: Row, y: int, scale: float) -> list[str]:
    whole = row.step_ms.median * scale
    exposed = min(whole, max(0.0, row.exposed_ms.median * scale)) if row.exposed_ms else 0.0
    compute = whole - exposed
    low, high, middle = LEFT + row.step_ms.min * scale, LEFT + row.step_ms.max * scale, y + BAR / 2
    return [
        f'<text x="{LEFT - 8}" y="{y + 15}" text-anchor="end">{escape(row.system)}</text>',
        f'<rect x="{LEFT}" y="{y}" width="{compute:.1f}" height="{BAR}" fill="{COMPUTE}"/>',
        f'<rect x="{LEFT + compute:.1f}" y="{y}" width="{exposed:.1f}" height="{BAR}" fill="{EXPOSED}"/>',
        f'<path d="M{low:.1f} {middle}H{high:.1f}M{low:.1f} {middle - 4}v8M{high:.1f} {middle - 4}v8" '
        f'stroke="{INK}" fill="none"/>',
        f'<text x="{max(high, LEFT + whole) + 6:.1f}" y="{y + 15}">{row.step_ms.median:,.0f}</text>',
    ]


# -- over blocks -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Bars that belong together: (name, value)."""

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
    """Horizontal bars in groups, a colour for each name."""
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
