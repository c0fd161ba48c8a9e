"""The figures of a picture as text, predicted and measured beside each other."""

from __future__ import annotations

import io

from rich.console import Console
from rich.table import Table

from embrace_fx.viz.picture import Picture


def render(picture: Picture) -> str:
    """A table of the diagnostics, a column per panel and, of two, their ratio."""
    text = Table()
    text.add_column("per step")
    for panel in picture.panels:
        text.add_column(panel.status, justify="right")
    columns = [{figure.label: figure for figure in panel.figures()} for panel in picture.panels]
    if len(columns) > 1:
        text.add_column("measured / predicted", justify="right")
    for label in dict.fromkeys(label for column in columns for label in column):
        cells = [str(column[label]) if label in column else "" for column in columns]
        if len(columns) > 1:
            predicted, measured = (column[label].value if label in column else 0.0 for column in columns)
            cells.append(f"{measured / predicted:.2f}" if predicted else "")
        text.add_row(label, *cells)
    out = io.StringIO()
    console = Console(file=out, width=120, no_color=True)
    console.print(f"{picture.title}; {picture.subtitle}", highlight=False, markup=False)
    console.print(text)
    return out.getvalue()
