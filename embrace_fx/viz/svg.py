"""Draws a picture as `.svg`, for papers, READMEs and notebooks, and the ranks' lanes for the HTML page.

An `.svg` file is 900 px wide and self-contained. It shows the last two windows: a prediction's rank, or as many of a
measurement's first ranks as are legible. Colours follow the reader's light or dark scheme, on the picture's own
background. On a page, each rank is an element, whose parts the page's script moves when it is zoomed, panned or
resized.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from embrace_fx.viz.descriptions import HoverTexts, name
from embrace_fx.viz.palette import DARK, LIGHT, PAINTS, Theme, lane_paint, paint
from embrace_fx.viz.picture import MIB, Gap, Panel, Phase, Picture, labels
from embrace_fx.vocabulary.operation_id import Lane
from embrace_fx.vocabulary.schedule import Span, Wait

WIDTH = 900
MOST_RANKS = 4
LEFT, RIGHT = 128, 14
"""Margins. The left one has the names of lanes."""
ROW, _GAP, _RANK_GAP = 15, 2, 9
_MEMORY = 26
"""Height of the memory line."""
_PHASES = 14
"""Height of the names of phases."""
CHARACTER = 6.0
"""Mean width of a character at the labels' size, 10 px."""
_LINE = 150
"""Maximum characters of a line of metrics."""


def render(picture: Picture) -> str:
    """Draws a picture (the timelines of a schedule, a measurement or both) and returns the text of the SVG file."""
    body = list(_sections(picture))
    description = f'<desc id="desc">{escape("; ".join(_metrics_line(panel) for panel in picture.panels))}</desc>'
    lines = [line for part in body for line in part.lines]
    return svg_document(
        picture.title, WIDTH, math.ceil(body[-1].bottom), [description, svg_definitions(picture)], lines
    )


def svg_document(title: str, width: int, height: int, head: Sequence[str], lines: Sequence[str]) -> str:
    """Returns the text of an SVG file with this title and size (in pixels). Its colours follow the reader's light or
    dark mode.

    Args:
        head: SVG elements that come before the background, such as `<defs>`, as lines of text.
        lines: SVG elements drawn on the background, as lines of text.
    """
    labels = "title desc" if head else "title"
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'style="max-width:100%;height:auto" '  # shrinks the picture on a narrow screen
            f'viewBox="0 0 {width} {height}" role="img" aria-labelledby="{labels}">',
            f'<title id="title">{escape(title)}</title>',
            f"<style>{style_sheet(LIGHT)}@media (prefers-color-scheme:dark){{{_colour_rules(DARK)}}}</style>",
            *head,
            f'<rect class="page" width="{width}" height="{height}"/>',
            *lines,
            "</svg>",
            "",
        )
    )


def rank_strips(picture: Picture, panel: Panel) -> Iterator[str]:
    """Yields, for the HTML page, an `<svg>` element as text for each rank of a panel (the predicted or the measured
    timeline). The page's script moves the operations in it when the reader zooms.
    """
    low, high = (
        edge(getattr(s, at) for s in panel.timeline.spans) for edge, at in ((min, "start_ms"), (max, "end_ms"))
    )
    axis, facts = _Axis(panel.origin_ms, low - panel.origin_ms, high - panel.origin_ms, live=True), HoverTexts(picture)
    for rank in panel.ranks:
        strip = _rank_section(panel, rank, axis, 2, facts)
        yield "\n".join(
            (
                f'<svg class="strip-of" data-rank="{rank}" height="{math.ceil(strip.bottom + _RANK_GAP)}">',
                *strip.lines,
                "</svg>",
            )
        )


@dataclass(frozen=True)
class _Section:
    """A part of the picture that has been drawn, such as the legend or the timeline of one rank.

    Attributes:
        lines: its SVG elements, as lines of text.
        bottom: the y coordinate of its bottom edge.
    """

    lines: list[str]
    bottom: float


@dataclass(frozen=True)
class _Axis:
    """The time axis: converts times in ms to x coordinates of the picture.

    Attributes:
        origin_ms: the time that the axis shows as 0.
        start_ms, end_ms: the range that the axis shows, in ms since `origin_ms`.
        live: True for the HTML page, whose script moves elements when the reader zooms. False for an SVG file.
    """

    origin_ms: float
    start_ms: float
    end_ms: float
    live: bool = False

    def __call__(self, time_ms: float) -> float:
        share = (time_ms - self.origin_ms - self.start_ms) / (self.end_ms - self.start_ms)
        return round(LEFT + (WIDTH - LEFT - RIGHT) * min(max(share, 0.0), 1.0), 2)

    def shows(self, item: Span | Wait | Gap | Phase) -> bool:
        """Returns whether any part of an item is in the time range of the axis. Always returns True for the HTML page,
        which the reader can scroll.
        """
        return self.live or (self(item.end_ms) > LEFT and self(item.start_ms) < WIDTH - RIGHT)

    def rectangle(self, item: Span | Wait | Gap) -> str:
        """Returns the SVG attributes x and width for an item, wide enough to be visible even if it is very short."""
        left = self(item.start_ms)
        return f'x="{left}" width="{max(self(item.end_ms) - left - 0.5, 0.5):.2f}"'

    def data_times(self, start_ms: float, end_ms: float, **more: object) -> str:
        """Returns the attributes of an SVG element from which the script of the HTML page places it: `data-s` and
        `data-e` (start and end in ms), and one `data-` attribute for each of `more`. Returns "" for an SVG file, which
        has no script.
        """
        values = {"s": f"{start_ms:.4f}", "e": f"{end_ms:.4f}", **more} if self.live else {}
        return "".join(f' data-{key}="{escape(str(value))}"' for key, value in values.items())


def _sections(picture: Picture) -> Iterator[_Section]:
    """Yields the sections of the picture from top to bottom."""
    yield _Section([_svg_text(14, 26, picture.title, "title"), _svg_text(14, 43, picture.subtitle, "faint")], 43)
    legend = _legend_section(picture, 62)
    yield legend
    top, facts = legend.bottom + 14, HoverTexts(picture)
    # Give all panels the same origin and scale, so that they can be compared.
    starts, ends = zip(*(panel.shown_ms for panel in picture.panels), strict=True)
    for panel in picture.panels:
        part = _panel_section(panel, _Axis(panel.origin_ms, min(starts), max(ends)), top, facts)
        yield part
        top = part.bottom + 12
    yield _Section([], top - 10)


def _legend_section(picture: Picture, top: float) -> _Section:
    """Returns the legend of a picture, wrapped into lines. `top` is the y coordinate of its first line."""
    lines: list[str] = []
    x = 14.0
    for kind, of_paint, meaning in picture.legend():
        width = 18 + CHARACTER * len(meaning) + 10
        if x + width > WIDTH:
            x, top = 14.0, top + 17
        looks = {
            "paint": f'class="f-{of_paint}"',
            "wait": f'fill="url(#h-{of_paint})" class="s-{of_paint}"',
            "gap": 'class="gap"',
            "path": 'class="critical"',
        }
        lines.append(f'<rect x="{x}" y="{top - 9}" width="13" height="10" {looks[kind]}/>')
        lines.append(_svg_text(x + 18, top, meaning))
        x += width
    return _Section(lines, top)


def _panel_section(panel: Panel, axis: _Axis, top: float, facts: HoverTexts) -> _Section:
    """Returns the section of a panel (the predicted or the measured timeline): heading, metrics, the lanes of each
    rank, and the time axis. A lane has the bars of compute, or of one kind of communication or copies.

    Args:
        axis: the time axis.
        top: the y coordinate of the section's top edge.
        facts: the texts shown on hover.
    """
    ranks = panel.ranks[:MOST_RANKS]
    some = f", first {len(ranks)} ranks" if len(ranks) < len(panel.ranks) else ""
    summary = textwrap.wrap(_metrics_line(panel), _LINE)
    lines = [
        _svg_text(14, top + 12, f"{panel.status.capitalize()}{some}", "heading"),
        *(_svg_text(14, top + 28 + 13 * k, line, "faint") for k, line in enumerate(summary)),
    ]
    y = top + 25 + 13 * len(summary)
    for rank in ranks:
        strip = _rank_section(panel, rank, axis, y, facts)
        lines += strip.lines
        y = strip.bottom + _RANK_GAP
    lines += _ticks(axis, y - _RANK_GAP + 5)
    return _Section(lines, y - _RANK_GAP + 22)


def _rank_section(panel: Panel, rank: int, axis: _Axis, top: float, facts: HoverTexts) -> _Section:
    """Returns the section with the lanes of one rank. A lane has the bars of compute, or of one kind of communication
    or copies. The first rank also shows memory, names of phases and the critical path.

    Args:
        panel: the predicted or the measured timeline, which contains the rank.
        axis: the time axis.
        top: the y coordinate of the section's top edge.
        facts: the texts shown on hover.
    """
    is_first = rank == panel.ranks[0]
    phases = [phase for phase in panel.phases if phase.rank == rank and axis.shows(phase)]
    lines: list[str] = []
    if is_first:
        line = _memory_section(panel, rank, axis, top)
        top = line.bottom + _PHASES
        lines += [*line.lines, *_phase_names(phases, axis, top - 6)]
    lines.append(_svg_text(14, top + 11, f"rank {rank}", "rank"))
    critical = panel.critical_spans if is_first else ()
    framed, place, y = {id(span) for span in critical}, dict[int, float](), top
    for lane in panel.lanes:
        lines.append(_svg_text(LEFT - 18, y + 11, lane, "lane"))
        lines.append(f'<rect x="{LEFT - 13}" y="{y + 4}" width="7" height="7" class="f-{lane_paint(lane)}"/>')
        first_y = y
        for row in panel.rows[rank, lane]:
            lines.append(f'<rect x="{LEFT}" y="{y}" width="{WIDTH - LEFT - RIGHT}" height="{ROW}" class="strip"/>')
            for span in row:
                place[id(span)] = y
                if axis.shows(span):
                    lines.append(
                        _with_hover_text(
                            span, _span_bar(span, axis, y, framed=id(span) in framed), y, panel, axis, facts
                        )
                    )
            y += ROW + _GAP
        if lane == "compute":
            gaps: list[Wait | Gap] = [*panel.gaps_of(rank), *panel.waits_of(rank)]
            lines += [
                _with_hover_text(gap, _wait_bar(gap, axis, first_y), first_y, panel, axis, facts)
                for gap in gaps
                if axis.shows(gap)
            ]
    bottom = y - _GAP
    lines += _boundaries(phases, axis, top - (_PHASES + 2 if is_first else 4), bottom + 2)
    lines += _arrows([span for span in critical if axis.shows(span)], axis, place)
    return _Section(lines, bottom)


def _memory_section(panel: Panel, rank: int, axis: _Axis, top: float) -> _Section:
    """Returns the section that shows the memory of a rank as a line over time. The section is empty if the timeline has
    no memory values for the rank.

    Args:
        panel: the predicted or the measured timeline.
        axis: the time axis.
        top: the y coordinate of the section's top edge.
    """
    points = [p for p in panel.timeline.memory if p.rank == rank]
    if not points:
        return _Section([], top)
    shown = [p for p in points if axis(p.at_ms) > LEFT] or points
    low, high = min(p.held_bytes for p in shown), max(p.held_bytes for p in shown)
    base = min(low, 0) if panel.status == "predicted" else low
    corners: list[tuple[float, float]] = []
    for point, following in pairwise([*points, points[-1]]):
        height = top + _MEMORY - (max(point.held_bytes, base) - base) / max(high - base, MIB / 10) * _MEMORY
        corners += [(point.at_ms, round(height, 1)), (following.at_ms, round(height, 1))]
    times = f' data-t="{" ".join(f"{at_ms:.4f}" for at_ms, _ in corners)}"' if axis.live else ""
    drawn = " ".join(f"{axis(at_ms)},{y}" for at_ms, y in corners)
    low_mib, high_mib = (round(each / MIB, 1) + 0.0 for each in (base, high))  # adding 0.0 avoids "-0.0"
    low_high = f"{low_mib:,.1f} to {high_mib:,.1f} MiB"
    return _Section(
        [
            _svg_text(LEFT - 18, top + _MEMORY / 2 - 2, "memory", "lane"),
            _svg_text(LEFT - 18, top + _MEMORY / 2 + 11, low_high, "lane"),
            f'<g><title>memory: from {low_high}</title><polyline class="memory" points="{drawn}"{times}/></g>',
        ],
        top + _MEMORY + 8,
    )


def _with_hover_text(
    item: Span | Wait | Gap, drawn: str, y: float, panel: Panel, axis: _Axis, facts: HoverTexts
) -> str:
    """Wraps the SVG of an item in an element that shows facts about the item on hover. Returns the element as text.

    Args:
        drawn: the item's SVG.
        y: the y coordinate of the item's top edge.
        panel: the timeline that contains the item.
        axis: the time axis.
        facts: the texts shown on hover.
    """
    more = {"of": name(item), "w": item.window, "y": y}
    if isinstance(item, Span):
        more["l"] = "\n".join(labels(item.operation))
    times = axis.data_times(item.start_ms, item.end_ms, **more)
    return f'<g class="item"{times}><title>{escape(facts.text(panel, item))}</title>{drawn}</g>'


def _span_bar(span: Span, axis: _Axis, y: float, *, framed: bool) -> str:
    """Returns the bar of a span, with its label if there is room.

    Args:
        axis: the time axis.
        y: the y coordinate of the bar's top edge.
        framed: whether to frame the bar, as on the critical path.
    """
    of_paint, extent = paint(span.operation), axis.rectangle(span)
    left, right = axis(span.start_ms), axis(span.end_ms)
    label = next((each for each in labels(span.operation) if len(each) <= (right - left - 4) / CHARACTER), "")
    text = _svg_text(left + 3, y + 11, label, f"i-{of_paint}") if label or axis.live else ""
    frame = f'<rect {extent} y="{y + 0.75}" height="{ROW - 1.5}" class="critical"/>' if framed else ""
    return f'<rect {extent} y="{y}" height="{ROW}" class="f-{of_paint}"/>{text}{frame}'


def _wait_bar(item: Wait | Gap, axis: _Axis, y: float) -> str:
    """Returns the SVG of a hatched bar for a wait, or of a thin line for a gap (a time in which the rank neither runs
    an operation nor waits for one). `y` is the y coordinate of the top edge of the compute lane.
    """
    extent = axis.rectangle(item)
    if isinstance(item, Gap):
        hit = f'<rect {extent} y="{y}" height="{ROW}" fill="transparent"/>'
        return f'{hit}<rect {extent} y="{y + ROW / 2 - 2}" height="4" class="gap"/>'
    return (
        f'<rect {extent} y="{y}" height="{ROW}" class="page"/>'
        f'<rect {extent} y="{y + 0.5}" height="{ROW - 1}" fill="url(#h-{item.lane})" class="s-{item.lane}"/>'
    )


def _phase_names(phases: list[Phase], axis: _Axis, y: float) -> Iterator[str]:
    """Yields an SVG text with the name of each phase, such as "forward", at the y coordinate `y`. In an SVG file,
    leaves out names that are wider than their phase.
    """
    for phase in phases:
        left, right = axis(phase.start_ms), axis(phase.end_ms)
        if axis.live or CHARACTER * len(phase.label) <= right - left - 4:
            times = axis.data_times(phase.start_ms, phase.end_ms, l=phase.label)
            yield f'<text x="{left + 4}" y="{y}"{times}>{phase.label}</text>'


def _boundaries(phases: list[Phase], axis: _Axis, top: float, bottom: float) -> Iterator[str]:
    """Yields a vertical SVG line at the start of each phase (forward or backward), between the y coordinates `top` and
    `bottom`.
    """
    for phase in phases:
        kind = "window" if phase.name == "backward" else "phase"
        yield _svg_line(axis, phase.start_ms, phase.start_ms, top, bottom, f'class="{kind}"')


def _arrows(path: Sequence[Span], axis: _Axis, place: Mapping[int, float]) -> Iterator[str]:
    """Yields an SVG arrow from the end of each operation on the critical path to the start of the next one, if their
    bars have different y coordinates.

    Args:
        path: the spans of the critical path, in order.
        axis: the time axis.
        place: `id()` of a span -> the y coordinate of its bar.
    """
    for before, after in pairwise(path):
        y1, y2 = place[id(before)], place[id(after)]
        if y1 != y2:
            end = y2 if y2 > y1 else y2 + ROW
            kind = 'class="arrow" marker-end="url(#head)"'
            yield _svg_line(axis, before.end_ms, after.start_ms, y1 + ROW / 2, end, kind)


def _svg_line(axis: _Axis, from_ms: float, to_ms: float, y1: float, y2: float, css_class: str) -> str:
    """Returns an SVG line from (`from_ms`, `y1`) to (`to_ms`, `y2`). The axis converts the times to x coordinates.

    Args:
        css_class: the `class` attribute, such as `class="arrow"`. Further attributes may follow in the same text.
    """
    times = axis.data_times(from_ms, to_ms)
    return f'<line x1="{axis(from_ms)}" x2="{axis(to_ms)}" y1="{y1}" y2="{y2}" {css_class}{times}/>'


def _ticks(axis: _Axis, y: float) -> Iterator[str]:
    """Yields the SVG elements of the time axis: a horizontal line at the y coordinate `y`, ticks, and their times in
    ms.
    """
    span_ms = axis.end_ms - axis.start_ms
    power = 10 ** math.floor(math.log10(span_ms / 8))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= span_ms / 8)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" class="axis"/>'
    for k in range(math.ceil(axis.start_ms / step), math.floor(axis.end_ms / step) + 1):
        x = axis(axis.origin_ms + k * step)
        yield f'<line x1="{x}" x2="{x}" y1="{y}" y2="{y + 4}" class="axis"/>'
        if x < WIDTH - RIGHT - 8:
            yield _svg_text(x, y + 14, f"{k * step:.{digits}f}", "tick")
    yield _svg_text(LEFT - 18, y + 14, "ms", "lane")


def _metrics_line(panel: Panel) -> str:
    """Returns a panel's metrics in one line."""
    figures = panel.figures()
    shown = [f for f in figures if not f.label.endswith("busy") and not (f.is_wait and f.value == 0)]
    return ", ".join(f"{figure.label} {figure}" for figure in shown)


def _svg_text(x: float, y: float, text: str, kind: str = "") -> str:
    """Returns an SVG text element at (`x`, `y`), with the CSS class `kind`."""
    attribute = f' class="{kind}"' if kind else ""
    return f'<text x="{round(x, 2)}" y="{round(y, 2)}"{attribute}>{escape(text)}</text>'


def svg_definitions(picture: Picture) -> str:
    """Returns the SVG definitions that a picture uses: hatching patterns for its lanes, and the arrow head."""
    size = 'markerUnits="userSpaceOnUse" markerWidth="7" markerHeight="6" refX="6" refY="3"'
    head = f'<marker id="head" class="head" orient="auto" {size}>'
    hatches = "".join(_hatch(lane) for lane in picture.lanes if lane != "compute")
    return f'<defs>{hatches}{head}<path d="M0 0L6 3L0 6z"/></marker></defs>'


def _hatch(lane: Lane) -> str:
    """Returns the SVG pattern, in a lane's colour, that fills the bars of waits for operations on that lane."""
    return (
        f'<pattern id="h-{lane}" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        f'<rect width="2" height="5" class="f-{lane}"/></pattern>'
    )


def style_sheet(theme: Theme) -> str:
    """Returns the CSS of a picture: fonts and lines, and the colours of one theme (light or dark)."""
    fixed = (
        "text{font:10px Helvetica,Arial,'DejaVu Sans',sans-serif}"
        ".title{font-size:15px;font-weight:bold}.heading{font-size:12px;font-weight:bold}.rank{font-weight:bold}"
        ".lane{text-anchor:end}.tick{text-anchor:middle}"
        ".critical,.arrow,.memory{fill:none;stroke-width:1.5;stroke-linejoin:round}.phase{stroke-dasharray:3 3}"
        ".window{stroke-width:1.5}.gap{fill:none;stroke-dasharray:2 2}"
    )
    return fixed + _colour_rules(theme)


def _colour_rules(theme: Theme) -> str:
    """Returns the CSS rules that set the colours of one theme (light or dark)."""
    rules = [
        f"text{{fill:{theme.text}}}.faint,.tick,.lane{{fill:{theme.faint}}}",
        f".page{{fill:{theme.page}}}.strip{{fill:{theme.strip}}}.axis,.phase,.gap,.memory{{stroke:{theme.faint}}}",
        f".window{{stroke:{theme.text}}}.critical,.arrow{{stroke:{theme.critical}}}.head{{fill:{theme.critical}}}",
        *(f".f-{p}{{fill:{theme.fill[p]}}}.s-{p}{{stroke:{theme.fill[p]}}}" for p in PAINTS),
        *(f".i-{p}{{fill:{theme.ink[p]}}}" for p in PAINTS),
    ]
    return "".join(rules)
