"""`python -m benchmarks.memory`: peaks and times of models under memory budgets, beside what else saves memory.

    python -m benchmarks.memory --quick        three models, budgets 0.7 and 0.5
    python -m benchmarks.memory                all models, budgets 0.9, 0.7, 0.5, 0.4
    python -m benchmarks.memory --paper        predictions at paper size, on the meta device
    python -m benchmarks.memory --one CELL     one cell, in this process

Cells that the output directory has are not measured again: a run that was stopped goes on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import click

from benchmarks.memory.cells import BUDGETS, PAPER, QUICK, WORKLOADS, Cell, cells
from benchmarks.memory.report import table

RESULT = "RESULT "
DEVICE_BYTES = 24 * 2**30
"""What a step may hold where the largest batch is asked for: a device of 40 GB, less parameters and their state."""


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="three models and two budgets")
@click.option("--paper", is_flag=True, help="predictions at paper size")
@click.option("--one", default=None, hidden=True)
@click.option("--output", type=click.Path(path_type=Path), default=Path("build/memory"), show_default=True)
def main(quick: bool, paper: bool, one: str | None, output: Path) -> None:
    if one is not None:
        from benchmarks.memory.measure import run  # noqa: PLC0415  (imports all of torch's compiler)

        model, system, budget = one.split(" | ")
        print(RESULT + json.dumps(run(Cell(model, system, None if budget == "None" else float(budget)))))
        return
    output.mkdir(parents=True, exist_ok=True)
    if paper:
        _predict(output)
        return
    file = output / "cells.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    wanted = cells(QUICK if quick else tuple(WORKLOADS), (0.7, 0.5) if quick else BUDGETS)
    for cell in wanted:
        if cell.key not in known:
            known[cell.key] = _measured(cell)
            file.write_text(json.dumps(known, indent=1))
    page = table([cell for cell in wanted if cell.key in known], known)
    (output / "memory.md").write_text(page)
    click.echo(page)


def _measured(cell: Cell) -> dict[str, object]:
    """A cell, in a process of its own whose allocator gives back what is freed."""
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
    }
    command = [sys.executable, "-m", "benchmarks.memory", "--one", cell.key]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(RESULT)]
    if lines:
        found: dict[str, object] = json.loads(lines[0].removeprefix(RESULT))
        click.echo(f"{cell.key}: {found['median_ms']:.0f} ms", err=True)
        return found
    error = (done.stderr.strip().splitlines() or ["no output"])[-1]
    click.echo(f"{cell.key}: {error}", err=True)
    return {"error": error}


def _predict(output: Path) -> None:
    from benchmarks.memory.predict import graph_of, largest_batch, under  # noqa: PLC0415

    file = output / "paper.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    for name, workload in PAPER.items():
        graph = None
        for budget in BUDGETS:
            key = f"{name} | {budget}"
            if key in known:
                continue
            graph = graph or graph_of(workload)
            try:
                found = under(graph, budget)
                for what in ("everything", "peak"):
                    found[f"largest_batch_{what}"] = largest_batch(
                        workload.batch_size, found[f"{what}_bytes"], DEVICE_BYTES
                    )
                known[key] = found
            except ValueError as error:
                known[key] = {"error": str(error)}
            file.write_text(json.dumps(known, indent=1))
            click.echo(f"{key}: {known[key]}")


if __name__ == "__main__":
    main()
