"""Pictures as files, and spans to draw."""

from __future__ import annotations

from pathlib import Path

from embrace_fx import viz
from embrace_fx.vocabulary.schedule import Operation, Schedule, Span, Timeline


def saved(folder: Path, suffix: str, schedule: Schedule | None = None, timeline: Timeline | None = None) -> str:
    path = folder / f"picture{suffix}"
    viz.save(path, schedule=schedule, timeline=timeline)
    return path.read_text(encoding="utf-8")


def compute(name: str, start: float, end: float, window: int = 0, rank: int = 0) -> Span:
    kind = name.split(maxsplit=1)[0]
    return Span(Operation(name, kind, "compute", end - start), window, rank, start, end)  # type: ignore[arg-type]
