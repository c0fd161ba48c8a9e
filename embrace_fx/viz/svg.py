"""`.svg`: a still picture for papers and a README, 900 px wide, self-contained.

It shows the last two windows: of a prediction its rank, of a measurement the first ranks, as many as are legible.
Colours follow the reader's light or dark scheme, on a ground of the picture's own.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from embrace_fx.viz.palette import DARK, LIGHT, PAINTS, Theme, lane_paint, paint
from embrace_fx.viz.picture import MIB, Panel, Phase, Picture, labels
from embrace_fx.vocabulary.operation_id import Lane
from embrace_fx.vocabulary.schedule import Span, Wait

WIDTH = 900
MOST_RANKS = 4
_LEFT, _RIGHT = 128, 14
_ROW, _GAP, _RANK_GAP = 15, 2, 9
_MEMORY = 26
"""Height of the line of held memory."""
_CHARACTER = 6.0
"""Mean width of a character at the size of the labels, 10 px."""
_LINE = 150
"""Characters of a line of figures."""


def render(picture: Picture) -> str:
    """The picture as the text of an SVG file."""
    body = list(_body(picture))
    height = math.ceil(body[-1].bottom)
    lines = [line for part in body for line in part.lines]
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
            f'style="max-width:100%;height:auto" '  # on a narrow screen all of it, smaller
            f'viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="title desc">',
            f'<title id="title">{escape(picture.title)}</title>',
            f'<desc id="desc">{escape("; ".join(_summary(panel) for panel in picture.panels))}</desc>',
            f"<style>{_style()}</style>",
            f"<defs>{''.join(_hatch(lane) for lane in picture.lanes if lane != 'compute')}</defs>",
            f'<rect class="page" width="{WIDTH}" height="{height}"/>',
            *lines,
            "</svg>",
            "",
        )
    )


@dataclass(frozen=True)
class _Part:
    """Lines of SVG, and how far down they reach."""

    lines: list[str]
    bottom: float


@dataclass(frozen=True)
class _Axis:
    """Maps a time to its x; times outside go to the border. `start_ms` and `end_ms` are counted from `origin_ms`."""

    origin_ms: float
    start_ms: float
    end_ms: float

    def __call__(self, time_ms: float) -> float:
        share = (time_ms - self.origin_ms - self.start_ms) / (self.end_ms - self.start_ms)
        return round(_LEFT + (WIDTH - _LEFT - _RIGHT) * min(max(share, 0.0), 1.0), 2)

    def shows(self, item: Span | Wait | Phase) -> bool:
        return self(item.end_ms) > _LEFT and self(item.start_ms) < WIDTH - _RIGHT


def _body(picture: Picture) -> Iterator[_Part]:
    yield _Part(
        [
            _text(14, 26, picture.title, "title"),
            _text(14, 43, picture.subtitle, "faint"),
        ],
        43,
    )
    legend = _legend(picture, 62)
    yield legend
    top = legend.bottom + 14
    # Panels begin at the same place and have the same scale, so that they can be compared.
    starts, ends = zip(*(panel.shown for panel in picture.panels), strict=True)
    for panel in picture.panels:
        part = _panel(panel, _Axis(panel.origin_ms, min(starts), max(ends)), top)
        yield part
        top = part.bottom + 12
    yield _Part([], top - 10)


def _legend(picture: Picture, top: float) -> _Part:
    used = {paint(span.operation) for panel in picture.panels for span in panel.timeline.spans}
    entries = [(f'class="f-{p}"', name) for p, name in PAINTS.items() if p in used]
    waited = next((w.lane for panel in picture.panels for w in panel.timeline.waits), None)
    if waited is not None:
        entries.append((f'fill="url(#h-{waited})" class="s-{waited}"', "wait (colour of its class)"))
    if any(panel.critical_path for panel in picture.panels):
        entries.append(('class="critical"', "critical path"))
    lines: list[str] = []
    x = 14.0
    for attributes, name in entries:
        width = 18 + _CHARACTER * len(name) + 10
        if x + width > WIDTH:
            x, top = 14.0, top + 17
        lines.append(f'<rect x="{x}" y="{top - 9}" width="13" height="10" {attributes}/>')
        lines.append(_text(x + 18, top, name))
        x += width
    return _Part(lines, top)


def _panel(panel: Panel, axis: _Axis, top: float) -> _Part:
    ranks = panel.ranks[:MOST_RANKS]
    some = f", first {len(ranks)} ranks" if len(ranks) < len(panel.ranks) else ""
    told = textwrap.wrap(_summary(panel), _LINE)
    lines = [
        _text(14, top + 12, f"{panel.status.capitalize()}{some}", "heading"),
        *(_text(14, top + 28 + 13 * k, line, "faint") for k, line in enumerate(told)),
    ]
    line = _memory(panel, ranks[0], axis, top + 25 + 13 * len(told))
    lines += line.lines
    y = line.bottom + 14
    place: dict[int, float] = {}
    for number, rank in enumerate(ranks):
        phases = [phase for phase in panel.phases if phase.rank == rank and axis.shows(phase)]
        if number == 0:
            lines += _phase_names(phases, axis, y - 6)
        strip = _rank(panel, rank, axis, y, place)
        lines += strip.lines
        lines += _boundaries(phases, axis, y - (16 if number == 0 else 4), strip.bottom + 2)
        y = strip.bottom + _RANK_GAP
    lines += _critical(panel, axis, place)
    lines += _ticks(axis, y - _RANK_GAP + 5)
    return _Part(lines, y - _RANK_GAP + 22)


def _memory(panel: Panel, rank: int, axis: _Axis, top: float) -> _Part:
    """Draws the memory of a rank as a line above its lanes; nothing where it is not known."""
    points = [p for p in panel.timeline.memory if p.rank == rank]
    if not points:
        return _Part([], top)
    shown = [p for p in points if axis(p.at_ms) > _LEFT] or points
    low, high = min(p.held_bytes for p in shown), max(p.held_bytes for p in shown)
    base = min(low, 0) if panel.status == "predicted" else low
    at, corners = top, []
    for point, following in pairwise([*points, points[-1]]):
        height = top + _MEMORY - (max(point.held_bytes, base) - base) / max(high - base, MIB / 10) * _MEMORY
        corners += [f"{axis(point.at_ms)},{height:.1f}", f"{axis(following.at_ms)},{height:.1f}"]
    name = f"memory: from {base / MIB:,.1f} to {high / MIB:,.1f} MiB"
    return _Part(
        [
            _text(_LEFT - 18, at + _MEMORY / 2 - 2, "memory", "lane"),
            _text(_LEFT - 18, at + _MEMORY / 2 + 11, f"{base / MIB:,.1f} to {high / MIB:,.1f} MiB", "lane"),
            f'<g><title>{escape(name)}</title><polyline class="memory" points="{" ".join(corners)}"/></g>',
        ],
        top + _MEMORY + 8,
    )


def _rank(panel: Panel, rank: int, axis: _Axis, top: float, place: dict[int, float]) -> _Part:
    """The lanes of a rank; enters in `place` how far down each span is, by its id."""
    lines = [_text(14, top + 11, f"rank {rank}", "rank")]
    y = top
    for lane in panel.lanes:
        lines.append(_text(_LEFT - 18, y + 11, lane, "lane"))
        lines.append(f'<rect x="{_LEFT - 13}" y="{y + 4}" width="7" height="7" class="f-{lane_paint(lane)}"/>')
        waits_y = y
        for row in panel.rows[rank, lane]:
            lines.append(f'<rect x="{_LEFT}" y="{y}" width="{WIDTH - _LEFT - _RIGHT}" height="{_ROW}" class="strip"/>')
            for span in row:
                place[id(span)] = y
                if axis.shows(span):
                    lines.append(_bar(span, axis, y))
            y += _ROW + _GAP
        if lane == "compute":
            lines += [_wait(wait, axis, waits_y) for wait in panel.waits_of(rank) if axis.shows(wait)]
    return _Part(lines, y - _GAP)


def _bar(span: Span, axis: _Axis, y: float) -> str:
    operation = span.operation
    left, width = _extent(span, axis)
    about = f"{operation.name}: {span.end_ms - span.start_ms:.3f} ms"
    if not operation.is_compute:
        about += f", {'sends' if operation.is_communication else 'copies'} {operation.sent_bytes / MIB:.2f} MiB"
    if operation.serves:
        about += f", for {', '.join(operation.serves)}"
    name = next((name for name in labels(operation) if len(name) <= (width - 4) / _CHARACTER), "")
    label = _text(left + 3, y + 11, name, f"i-{paint(operation)}") if name else ""
    return (
        f'<g><title>{escape(about)}</title><rect x="{left}" y="{y}" width="{max(width - 0.5, 0.5):.2f}" '
        f'height="{_ROW}" class="f-{paint(operation)}"/>{label}</g>'
    )


def _wait(wait: Wait, axis: _Axis, y: float) -> str:
    left, width = _extent(wait, axis)
    about = f"waits for {wait.launch} ({wait.lane}): {wait.end_ms - wait.start_ms:.3f} ms"
    return (
        f'<g><title>{escape(about)}</title><rect x="{left}" y="{y}" width="{width:.2f}" height="{_ROW}" class="page"/>'
        f'<rect x="{left + 0.5:.2f}" y="{y + 0.5}" width="{max(width - 1, 0.5):.2f}" height="{_ROW - 1}" '
        f'fill="url(#h-{wait.lane})" class="s-{wait.lane}"/></g>'
    )


def _extent(item: Span | Wait, axis: _Axis) -> tuple[float, float]:
    left = axis(item.start_ms)
    return left, max(axis(item.end_ms) - left, 0.5)


def _phase_names(phases: list[Phase], axis: _Axis, y: float) -> Iterator[str]:
    for phase in phases:
        left, right = axis(phase.start_ms), axis(phase.end_ms)
        if _CHARACTER * len(phase.label) <= right - left - 4:
            yield _text(left + 4, y, phase.label)


def _boundaries(phases: list[Phase], axis: _Axis, top: float, bottom: float) -> Iterator[str]:
    for phase in phases:
        x = axis(phase.start_ms)
        kind = "window" if phase.name == "backward" else "phase"
        yield f'<line x1="{x}" x2="{x}" y1="{top}" y2="{bottom}" class="{kind}"/>'


def _critical(panel: Panel, axis: _Axis, place: dict[int, float]) -> Iterator[str]:
    path = [span for span in panel.critical_spans if axis.shows(span)]
    for span in path:
        left, width = _extent(span, axis)
        yield (
            f'<rect x="{left + 0.75:.2f}" y="{place[id(span)] + 0.75}" width="{max(width - 2, 0.5):.2f}" '
            f'height="{_ROW - 1.5}" class="critical"/>'
        )
    for before, after in pairwise(path):
        y1, y2 = place[id(before)] + _ROW / 2, place[id(after)]
        if place[id(before)] == y2:
            continue
        down = 1 if y2 > y1 else -1
        x1, x2, y2 = axis(before.end_ms), axis(after.start_ms), y2 if down == 1 else y2 + _ROW
        turn = y1 if x2 - x1 > 5 else y1 + down * 5
        yield f'<path d="M{x1} {y1}L{x2} {turn}L{x2} {y2 - down * 4}" class="arrow"/>'
        yield f'<path d="M{x2} {y2}l-3 {-down * 5}h6z" class="head"/>'


def _ticks(axis: _Axis, y: float) -> Iterator[str]:
    span_ms = axis.end_ms - axis.start_ms
    power = 10 ** math.floor(math.log10(span_ms / 8))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= span_ms / 8)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    yield f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y}" y2="{y}" class="axis"/>'
    for k in range(math.ceil(axis.start_ms / step), math.floor(axis.end_ms / step) + 1):
        x = axis(axis.origin_ms + k * step)
        yield f'<line x1="{x}" x2="{x}" y1="{y}" y2="{y + 4}" class="axis"/>'
        if x < WIDTH - _RIGHT - 8:
            yield _text(x, y + 14, f"{k * step:.{digits}f}", "tick")
    yield _text(_LEFT - 18, y + 14, "ms", "lane")


def _summary(panel: Panel) -> str:
    figures = panel.figures()
    shown = [f for f in figures if not f.label.endswith("busy") and not (f.is_wait and f.value == 0)]
    return ", ".join(f"{figure.label} {figure}" for figure in shown)


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    attribute = f' class="{kind}"' if kind else ""
    return f'<text x="{round(x, 2)}" y="{round(y, 2)}"{attribute}>{escape(text)}</text>'


def _hatch(lane: Lane) -> str:
    return (
        f'<pattern id="h-{lane}" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        f'<rect width="2" height="5" class="f-{lane}"/></pattern>'
    )


def _style() -> str:
    fixed = (
        "text{font:10px Helvetica,Arial,'DejaVu Sans',sans-serif}"
        ".title{font-size:15px;font-weight:bold}.heading{font-size:12px;font-weight:bold}.rank{font-weight:bold}"
        ".lane{text-anchor:end}.tick{text-anchor:middle}"
        ".critical,.arrow,.memory{fill:none;stroke-width:1.5;stroke-linejoin:round}.phase{stroke-dasharray:3 3}"
        ".window{stroke-width:1.5}"
    )
    return f"{fixed}{_colours(LIGHT)}@media (prefers-color-scheme:dark){{{_colours(DARK)}}}"


def _colours(theme: Theme) -> str:
    rules = [
        f"text{{fill:{theme.text}}}.faint,.tick,.lane{{fill:{theme.faint}}}",
        f".page{{fill:{theme.page}}}.strip{{fill:{theme.strip}}}.axis,.phase{{stroke:{theme.faint}}}",
        f".window{{stroke:{theme.text}}}.critical,.arrow{{stroke:{theme.critical}}}.head{{fill:{theme.critical}}}",
        f".memory{{stroke:{theme.faint}}}",
        *(f".f-{p}{{fill:{theme.fill[p]}}}.s-{p}{{stroke:{theme.fill[p]}}}" for p in PAINTS),
        *(f".i-{p}{{fill:{theme.ink[p]}}}" for p in PAINTS),
    ]
    return "".join(rules)
