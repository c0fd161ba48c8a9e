"""`.html`: one file that opens offline, everything inlined, for schedules to be looked into.

`page.html` is filled with `page.css`, the scripts, the colours of `palette` and the picture as JSON. A content security
policy in it forbids the page to load anything.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from html import escape
from importlib import resources
from string import Template
from typing import Any

from embrace_fx.viz.glossary import GLOSSARY
from embrace_fx.viz.palette import DARK, LIGHT, PAINTS, Theme, paint
from embrace_fx.viz.picture import Figure, Panel, Picture, labels
from embrace_fx.vocabulary.schedule import Span, Wait

_SCRIPTS = ("page.js", "drawing.js", "words.js", "input.js", "around.js", "figures.js")
"""One script, in this order: the first has the state, the last begins."""


def render(picture: Picture) -> str:
    """The picture as the text of a page."""
    files = resources.files("embrace_fx.viz")
    page = Template(files.joinpath("page.html").read_text(encoding="utf-8"))
    # "<" in a script element could end it, whatever stands around it.
    data = json.dumps(_data(picture), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return page.substitute(
        title=escape(picture.title),
        subtitle=escape(picture.subtitle),
        colours=_colours(),
        style=files.joinpath("page.css").read_text(encoding="utf-8"),
        data=data,
        script="\n".join(files.joinpath(name).read_text(encoding="utf-8") for name in _SCRIPTS),
    )


def _colours() -> str:
    dark = _variables(DARK)
    return (
        f":root {{ color-scheme: light; {_variables(LIGHT)} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root:not([data-theme=light]) {{ color-scheme: dark; {dark} }} }}\n"
        f":root[data-theme=dark] {{ color-scheme: dark; {dark} }}"
    )


def _variables(theme: Theme) -> str:
    single = ("page", "strip", "line", "faint", "text", "critical")
    values = {name: getattr(theme, name) for name in single}
    values |= {f"fill-{name}": theme.fill[name] for name in PAINTS}
    values |= {f"ink-{name}": theme.ink[name] for name in PAINTS}
    return " ".join(f"--{name}: {value};" for name, value in values.items())


def _data(picture: Picture) -> dict[str, Any]:
    schedule = picture.schedule
    return {
        "lanes": picture.lanes,
        "paints": PAINTS,
        "launchOrder": schedule.launch_order if schedule else [],
        "dependences": [asdict(d) for d in schedule.steps.dependences] if schedule else [],
        "panels": [_panel(panel) for panel in picture.panels],
        "bars": [
            {"name": bar.name, "total": bar.total_ms, "parts": [_figure(part) for part in bar.parts]}
            for bar in picture.bars()
        ],
        "why": None if picture.why is None else asdict(picture.why),
        "ratios": picture.ratios(),
        "glossary": GLOSSARY,
        "background": None if picture.background is None else asdict(picture.background),
    }


def _panel(panel: Panel) -> dict[str, Any]:
    operations = {span.operation: None for span in panel.timeline.spans}
    number = {operation: k for k, operation in enumerate(operations)}
    spans: list[dict[str, Any]] = []
    place: dict[int, int] = {}
    for rows in panel.rows.values():
        for row, row_spans in enumerate(rows):
            for span in row_spans:
                place[id(span)] = len(spans)
                spans.append({"op": number[span.operation], "row": row, **_times(span)})
    return {
        "status": panel.status,
        "ranks": panel.ranks,
        "windows": [{"number": w, "start": _rounded(panel.window_start_ms(w))} for w in panel.windows],
        "rows": [{"rank": rank, "lane": lane, "count": len(rows)} for (rank, lane), rows in panel.rows.items()],
        "operations": [{**asdict(o), "paint": paint(o), "labels": labels(o)} for o in operations],
        "spans": spans,
        "waits": [{"launch": w.launch, "lane": w.lane, **_times(w)} for w in panel.timeline.waits],
        "phases": [
            {"label": p.label, "rank": p.rank, "name": p.name, "start": _rounded(p.start_ms), "end": _rounded(p.end_ms)}
            for p in panel.phases
        ],
        "critical": [place[id(span)] for span in panel.critical_spans],
        "figures": [_figure(figure) for figure in panel.figures()],
    }


def _figure(figure: Figure) -> dict[str, Any]:
    return {**asdict(figure), "text": str(figure)}


def _times(item: Span | Wait) -> dict[str, float | int]:
    return {
        "window": item.window,
        "rank": item.rank,
        "start": _rounded(item.start_ms),
        "end": _rounded(item.end_ms),
    }


def _rounded(time_ms: float) -> float:
    return round(time_ms, 4)
