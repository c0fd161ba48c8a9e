"""Prints what the cost model predicts for the papers' experiments, beside what the papers report. Nothing is measured.

python -m benchmarks.papers
"""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from benchmarks.papers import zen


def table(rows: list[zen.Row]) -> Table:
    """Zen's settings, one a line."""
    found = Table(title="Zen (OSDI 2025): time of AllReduce over each strategy's, predicted", title_style="")
    for column in (
        "model",
        "machines",
        "Gb/s",
        "AllReduce ms",
        *rows[0].speedups,
        "published",
        "predicted / published",
    ):
        found.add_column(column, justify="left" if column == "model" else "right")
    for row in rows:
        speedups = [f"{speedup:.2f}" for speedup in row.speedups.values()]
        published = ("", "")
        if row.published is not None:
            published = f"{row.published:.2f}", f"{row.speedups['zen'] / row.published:.2f}"
        found.add_row(row.model, str(row.machines), str(row.gbit), f"{row.allreduce_ms:.0f}", *speedups, *published)
    return found


def main() -> None:
    console = Console(width=140)
    console.print(table(list(zen.rows())))
    console.print(
        "Predicted by embrace_fx.cost on data sheets (V100), ids drawn from Zipf's law: the papers give densities, not "
        "which rows machines have in common. AllReduce is taken to use the whole link; what a machine's own devices "
        "do before and after is left out on both sides; both raise ratios above a testbed's."
    )


if __name__ == "__main__":
    main()
