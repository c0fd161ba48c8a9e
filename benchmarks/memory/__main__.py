"""`python -m benchmarks.memory`: what models hold under memory budgets, beside what else saves memory.

    python -m benchmarks.memory                bytes, counted and predicted, of all models, systems and budgets
    python -m benchmarks.memory --model bert   of one model
    python -m benchmarks.memory --times        times, too: steps that take turns, of a machine that does nothing else
    python -m benchmarks.memory --batches      larger batches in the bytes that eager mode needs, counted
    python -m benchmarks.memory --paper        predictions at paper size, on the meta device

What the output directory has is not done again: a run that was stopped goes on.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.memory import report
from benchmarks.memory.cells import LARGER, PAPER, WORKLOADS, Cell, cells

DEVICE_BYTES = 24 * 2**30
"""What a step may hold where the largest batch is asked for: a device of 40 GB, less parameters and their state."""


@click.command(help=__doc__)
@click.option("--model", "models", multiple=True, type=click.Choice([*WORKLOADS, *PAPER]), help="by default all")
@click.option("--times", is_flag=True, help="measure times")
@click.option("--batches", is_flag=True, help="larger batches in the same bytes")
@click.option("--paper", is_flag=True, help="predictions at paper size")
@click.option("--output", type=click.Path(path_type=Path), default=Path("build/memory"), show_default=True)
def main(models: tuple[str, ...], times: bool, batches: bool, paper: bool, output: Path) -> None:
    torch.set_num_threads(1)
    output.mkdir(parents=True, exist_ok=True)
    if paper:
        _predict(_Known(output / "paper.json"), models or tuple(PAPER))
        return
    if batches:
        _batches(_Known(output / "batches.json"), models or tuple(LARGER))
        return
    known = _Known(output / "cells.json")
    wanted = cells(models or tuple(WORKLOADS))
    for model, of_model in groupby(wanted, key=lambda cell: cell.model):
        _count(known, model, list(of_model))
    if times:
        _time(known, wanted)
    page = report.table(wanted, known.found)
    (output / "memory.md").write_text(page)
    click.echo(page)


class _Known:
    """The results so far, stored in a file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.found: dict[str, dict[str, Any]] = json.loads(file.read_text()) if file.exists() else {}

    def add(self, model: str, what: str, find: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Computes a result by `find` if it is not known yet, and stores it. An error is stored as a result, too."""
        key = f"{model} | {what}"
        if key in self.found:
            return self.found[key]
        try:
            self.found[key] = find()
        except (RuntimeError, ValueError) as error:
            self.found[key] = {"error": str(error)}
        self._file.write_text(json.dumps(self.found, indent=1))
        click.echo(f"{key}: {self.found[key]}", err=True)
        return self.found[key]


def _count(known: _Known, model: str, wanted: list[Cell]) -> None:
    from benchmarks.memory.measure import count, gradients  # noqa: PLC0415  (imports all of torch's compiler)

    if all(cell.key in known.found for cell in wanted):
        return
    expected = gradients(Cell(model, "embrace_fx"))
    for cell in wanted:
        known.add(model, cell.what, lambda cell=cell: count(cell, expected))  # type: ignore[misc]


def _time(known: _Known, wanted: list[Cell]) -> None:
    from benchmarks.memory.measure import times  # noqa: PLC0415

    for model, of_model in groupby(wanted, key=lambda cell: cell.model):
        timed = [cell for cell in of_model if "error" not in known.found[cell.key]]
        known.add(model, "times", lambda timed=timed: dict(times(timed)))  # type: ignore[misc]


def _batches(known: _Known, models: tuple[str, ...]) -> None:
    from benchmarks.memory.measure import larger_batches  # noqa: PLC0415

    for model in models:
        known.add(model, "larger batches", lambda model=model: larger_batches(model))  # type: ignore[misc]


def _predict(known: _Known, models: tuple[str, ...]) -> None:
    from benchmarks.memory.predict import predicted  # noqa: PLC0415

    for model in models:
        predicted(PAPER[model], DEVICE_BYTES, partial(known.add, model))
    click.echo(report.predictions(known.found))


if __name__ == "__main__":
    main()
