"""Draws a picture as `.html`: an interactive page in one file that works offline.

`page.html` is filled with `page.css`, the scripts, the colours of `palette`, the strips of `svg`, and facts as JSON.
Its content security policy forbids loading anything.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from html import escape
from importlib import resources
from string import Template
from typing import Any

from embrace_fx.viz import svg
from embrace_fx.viz.palette import DARK, LIGHT, PAINTS, Theme
from embrace_fx.viz.picture import Metric, Panel, Picture
from embrace_fx.vocabulary.plan_text import readable_bytes
from embrace_fx.vocabulary.schedule import Operation

_SCRIPTS = ("page.js", "input.js", "around.js", "figures.js")
"""Concatenated to one script in this order: the first has the state, the last starts it."""
_PLAIN = ("page", "strip", "line", "faint", "text", "critical")

GLOSSARY: Mapping[str, str] = {
    "window": "from the start of one backward to the start of the next: the picture shows two in a row",
    "compute": "the rank's processor at work: backward, forward, the optimizer, and what the training loop does itself",
    "backward": "gradients computed, from the loss to the first layer",
    "forward": "the model computed, from the batch to the loss, rows looked up and put together included",
    "optimizer": "the optimizer's step, and updates of tables and buckets in the next forward",
    "your code": "what the training loop does between the calls: losses, clipping, logging",
    "loader": "the next batch is read; without model.lookahead(loader), all from the optimizer's step to the next call",
    "ids": "ranks exchange the ids of the next batch",
    "embedding": "rows of sharded tables, and their gradients, on their way between ranks",
    "dense": "gradients of all other parameters, reduced in buckets",
    "delayed": "gradients of rows that the next batch does not read: they are sent when nothing else is",
    "storage": "rows of tables larger than memory, read from their storage and written back",
    "prior": "gradients of rows that the next batch reads: they are sent first",
    "early rows": "rows of the next batch that this step does not change: they are fetched before it ends",
    "wait": "compute waits for communication; its color is that of the communication",
    "exposed": "the time of all waits of a class: communication that nothing hides",
    "busy": "the time that a class uses the link, hidden or not",
    "overlap ratio": "the share of communication that compute hides: 1 is all of it",
    "between operations": "when nothing of the schedule runs: Python and autograd",
    "critical path": "the operations that decide the length of a step: only shortening these shortens it",
    "memory held": "memory of values that wait for their reader: buckets, and rows that have arrived",
    "alone": "how long an operation takes on an idle processor or link",
    "DDP": "DistributedDataParallel, estimated: the same compute, and an AllReduce of every gradient, those of tables "
    "after the backward",
}
"""Explanations of a picture's terms, for its page."""


def render(picture: Picture) -> str:
    """Returns a picture as an HTML page."""
    files = resources.files("embrace_fx.viz")
    page = Template(files.joinpath("page.html").read_text(encoding="utf-8"))
    # A "<" inside a script element could close it.
    data = json.dumps(_script_data(picture), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return page.substitute(
        title=escape(picture.title),
        subtitle=escape(picture.subtitle),
        colours=_colour_rules(),
        style=svg.style_sheet(_NAMED) + files.joinpath("page.css").read_text(encoding="utf-8"),
        definitions=svg.svg_definitions(picture),
        panels="\n".join(_section(picture, panel) for panel in picture.panels),
        data=data,
        script="\n".join(files.joinpath(name).read_text(encoding="utf-8") for name in _SCRIPTS),
    )


_NAMED = Theme(
    **{name: f"var(--{name})" for name in _PLAIN},
    fill={name: f"var(--fill-{name})" for name in PAINTS},
    ink={name: f"var(--ink-{name})" for name in PAINTS},
)
"""Colours as CSS variables, which follow the reader's scheme and the page's button."""


def _section(picture: Picture, panel: Panel) -> str:
    """Returns one panel of a picture (the predicted or the measured timeline) as an HTML section."""
    status = panel.status
    return "\n".join(
        (
            f'<section class="panel" id="{status}" tabindex="0" role="application" aria-roledescription="timeline" '
            f'aria-label="{status} timeline" aria-describedby="hint">',
            f"<h2>{status.capitalize()}</h2>",
            *svg.rank_strips(picture, panel),
            '<svg class="ticks" height="22"></svg>',
            "</section>",
        )
    )


def _colour_rules() -> str:
    """Returns the CSS rules that set the page's colours in light and in dark mode."""
    dark = _colour_variables(DARK)
    return (
        f":root {{ color-scheme: light; {_colour_variables(LIGHT)} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root:not([data-theme=light]) {{ color-scheme: dark; {dark} }} }}\n"
        f":root[data-theme=dark] {{ color-scheme: dark; {dark} }}"
    )


def _colour_variables(theme: Theme) -> str:
    """Returns declarations of CSS variables for the colours of a theme."""
    values = {name: getattr(theme, name) for name in _PLAIN}
    values |= {f"fill-{name}": theme.fill[name] for name in PAINTS}
    values |= {f"ink-{name}": theme.ink[name] for name in PAINTS}
    return " ".join(f"--{name}: {value};" for name, value in values.items())


def _script_data(picture: Picture) -> dict[str, Any]:
    """Returns the data of a picture that the page's script reads, as a dict of values for JSON."""
    schedule = picture.schedule
    return {
        "left": svg.LEFT,
        "right": svg.RIGHT,
        "row": svg.ROW,
        "character": svg.CHARACTER,
        "legend": list(picture.legend()),
        "dependences": [asdict(d) for d in schedule.steps.dependences] if schedule else [],
        "panels": [_panel_data(panel) for panel in picture.panels],
        "operations": list(_operation_data(picture)),
        "bars": [
            {"name": bar.name, "total": bar.total_ms, "parts": [_metric_data(part) for part in bar.parts]}
            for bar in picture.bars()
        ],
        "why": None if picture.why is None else asdict(picture.why),
        "ratios": picture.ratios(),
        "glossary": GLOSSARY,
        "background": None if picture.background is None else asdict(picture.background),
    }


def _panel_data(panel: Panel) -> dict[str, Any]:
    """Returns the data of a panel that the page's script reads, as a dict of values for JSON."""
    return {
        "status": panel.status,
        "ranks": panel.ranks,
        "windows": [{"number": w, "start": round(start_ms, 4)} for w, start_ms in panel.starts_ms.items()],
        "hasPath": bool(panel.critical_path),
        "figures": [_metric_data(figure) for figure in panel.figures()],
    }


def _operation_data(picture: Picture) -> Iterator[dict[str, Any]]:
    """Yields, for each operation of a picture, the data that the page's script reads: the operation's fields, its sent
    bytes as text, and a list of its median time over steps and ranks in each panel. The time is None if a panel does
    not show the operation.
    """
    operations: dict[str, Operation] = {}
    taken: list[dict[str, list[float]]] = []
    for panel in picture.panels:
        runs: defaultdict[tuple[str, int, int], float] = defaultdict(float)
        for span in sorted(panel.timeline.spans, key=lambda span: span.start_ms):
            operations.setdefault(span.operation.name, span.operation)
            # Add up spans, because waits may divide an operation into several.
            runs[span.operation.name, span.window, span.rank] += span.end_ms - span.start_ms
        of_panel: defaultdict[str, list[float]] = defaultdict(list)
        for (name, *_), took_ms in runs.items():
            of_panel[name].append(took_ms)
        taken.append(of_panel)
    for name, operation in operations.items():
        medians = [statistics.median(each[name]) if name in each else None for each in taken]
        sends = "" if operation.is_compute else readable_bytes(operation.sent_bytes)
        yield {**asdict(operation), "sends": sends, "times": medians}


def _metric_data(figure: Metric) -> dict[str, Any]:
    """Returns the data of a metric (`figure`) that the page's script reads, as a dict of values for JSON."""
    return {**asdict(figure), "text": str(figure)}
