"""Prints the figures of a picture, predicted and measured beside each other."""

from __future__ import annotations

import io

from rich.console import Console
from rich.table import Table

from embrace_fx.viz.picture import Picture
from embrace_fx.vocabulary.plan_text import terminal_width


def render(picture: Picture) -> str:
    """Prints a table of the diagnostics, with a column per panel and, for two panels, their ratio."""
    text = Table()
    text.add_column("per step")
    for panel in picture.panels:
        text.add_column(panel.status, justify="right")
    columns = [{figure.label: figure for figure in panel.figures()} for panel in picture.panels]
    ratios = picture.ratios()
    if ratios:
        text.add_column("measured / predicted", justify="right")
    for label in dict.fromkeys(label for column in reversed(columns) for label in column):
        cells = [str(column[label]) if label in column else "" for column in columns]
        text.add_row(label, *cells, *([ratios[label]] if ratios else []))
    out = io.StringIO()
    console = Console(file=out, width=min(120, terminal_width()), no_color=True)
    console.print(f"{picture.title}; {picture.subtitle}", highlight=False, markup=False)
    console.print(text)
    if picture.why is not None:
        console.print(str(picture.why), highlight=False, markup=False)
    return out.getvalue()
