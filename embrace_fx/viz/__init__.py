"""Draws a predicted `Schedule` and a measured `Timeline` to files, in the format of the suffix.

    .html   a page that works offline: lanes per rank, predicted and measured, with hover, zoom and metrics
    .json   Chrome trace event format, for Perfetto
    .svg    a still picture
    .dot    the step graph: possible overlap

All metrics come from `embrace_fx.vocabulary.schedule.diagnose`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rich.table import Table

from embrace_fx.viz import dot, page, svg, trace
from embrace_fx.viz.picture import Picture
from embrace_fx.vocabulary.picture_facts import PictureFacts
from embrace_fx.vocabulary.plan_text import fit_to_terminal
from embrace_fx.vocabulary.schedule import Schedule, Timeline

__all__ = ["DrawnSchedule", "DrawnTimeline", "save"]

SUFFIXES = (".html", ".json", ".svg", ".dot")
"""The supported suffixes of pictures."""


def save(
    path: str | os.PathLike[str],
    *,
    schedule: Schedule | None = None,
    timeline: Timeline | None = None,
    background: PictureFacts | None = None,
) -> None:
    """Draws a prediction (`schedule`), a measurement (`timeline`), or both (the prediction above the measurement) to a
    file. The suffix of `path` determines the format.

    Creates missing folders of `path`.

    Args:
        path: ends in `.html`, `.json`, `.svg` or `.dot`.
        background: facts shown beside the picture: where tables are, DDP's step time, step times on other numbers of
            ranks.

    Raises:
        ValueError: the suffix is unknown, there is nothing to draw, a timeline has no spans, or a `.dot` has no
            schedule.
    """
    target = Path(path)
    suffix = target.suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(
            f"save(): {target.name!r} has no suffix of a supported format. Pass a path that ends in "
            f"{', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}."
        )
    picture = Picture(schedule, timeline, background)
    if suffix == ".dot":
        if schedule is None:
            raise ValueError(
                "save(): a .dot file shows the dependencies between operations, which a timeline does not have. Save "
                "model.schedule instead."
            )
        text = dot.render(schedule)
    else:
        text = {".html": page.render, ".json": trace.render, ".svg": svg.render}[suffix](picture)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")


@dataclass(frozen=True)
class DrawnSchedule(Schedule):
    """A schedule that prints as its metrics and can be saved as a picture.

    Attributes:
        background: function that computes the facts shown beside the picture, or None.
    """

    background: Callable[[], PictureFacts] | None = field(default=None, compare=False, repr=False)

    @classmethod
    def from_schedule(cls, schedule: Schedule, background: Callable[[], PictureFacts] | None = None) -> DrawnSchedule:
        """Returns a copy of a schedule that can be drawn.

        Args:
            background: function that computes the facts shown beside the picture, or None.
        """
        return cls(**vars(schedule), background=background)

    def save(self, path: str | os.PathLike[str], *, timeline: Timeline | None = None) -> None:
        """Draws the schedule to a file. See `embrace_fx.viz.save`.

        Args:
            path: ends in `.html`, `.json`, `.svg` or `.dot`.
            timeline: a measurement to draw below the schedule, or None.
        """
        save(path, schedule=self, timeline=timeline, background=self.background() if self.background else None)

    def __str__(self) -> str:
        return _metrics_table(Picture(self, None))

    def _repr_html_(self) -> str:
        """Returns the schedule as an SVG picture, which notebooks show."""
        return svg.render(Picture(self, None))


@dataclass(frozen=True)
class DrawnTimeline(Timeline):
    """A measured timeline that prints as its metrics and can be saved as a picture.

    Attributes:
        schedule: the prediction drawn above the timeline, or None.
        background: function that computes the facts shown beside the picture, or None.
    """

    schedule: Schedule | None = None
    background: Callable[[], PictureFacts] | None = field(default=None, compare=False, repr=False)

    @classmethod
    def from_timeline(
        cls, timeline: Timeline, schedule: Schedule | None, background: Callable[[], PictureFacts] | None = None
    ) -> DrawnTimeline:
        """Returns a copy of a timeline that can be drawn.

        Args:
            schedule: the prediction to draw above the timeline, or None.
            background: function that computes the facts shown beside the picture, or None.
        """
        return cls(**vars(timeline), schedule=schedule, background=background)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Draws the timeline to a file, below the prediction if there is one. See `embrace_fx.viz.save`."""
        background = self.background() if self.background else None
        save(path, schedule=self.schedule, timeline=self, background=background)

    def __str__(self) -> str:
        return _metrics_table(Picture(self.schedule, self))

    def _repr_html_(self) -> str:
        """Returns the timeline as an SVG picture, which notebooks show."""
        return svg.render(Picture(self.schedule, self))


def _metrics_table(picture: Picture) -> str:
    """Returns the metrics of a picture as a text table. The prediction and the measurement have a column each."""
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
    why = () if picture.why is None else (str(picture.why),)
    return fit_to_terminal(f"{picture.title}; {picture.subtitle}", text, *why, widest=120)
