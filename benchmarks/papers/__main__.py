"""Prints what the cost model predicts for the papers' experiments, beside what the papers report. Nothing is measured.

python -m benchmarks.papers                     all of them; EmbRace's takes minutes
python -m benchmarks.papers zen omnireduce
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence

from benchmarks.papers import embrace, omnireduce, zen

Printed = tuple[str, Sequence[str], Iterable[Sequence[str]], str]
"""Title, columns, lines, and what to know of them."""


def of_zen() -> Printed:
    """Zen's settings, one a line."""
    rows = list(zen.rows())
    columns = (
        "model",
        "machines",
        "Gb/s",
        "AllReduce ms",
        *rows[0].speedups,
        "published",
        "predicted / published",
        "union",
        "implied",
    )
    lines = []
    for row in rows:
        speedups = [f"{speedup:.2f}" for speedup in row.speedups.values()]
        published = ("", "")
        if row.published is not None:
            published = f"{row.published:.2f}", f"{row.speedups['zen'] / row.published:.2f}"
        implied = "" if row.implied is None else f"{row.implied:.1f}"
        lines.append(
            [
                row.model,
                str(row.machines),
                str(row.gbit),
                f"{row.allreduce_ms:.0f}",
                *speedups,
                *published,
                f"{row.union:.1f}",
                implied,
            ]
        )
    return (
        "Zen (OSDI 2025): time of AllReduce over each strategy's, predicted",
        columns,
        lines,
        "Predicted by embrace_fx.cost on data sheets (V100). The papers give densities, not which rows machines have "
        "in common. Ids are drawn from Zipf's law, or all alike. `union`: how many times as many elements all machines "
        "have as one, of Zipf's law; `implied`: the same for which the paper's own formula, T_BP, comes to what it "
        "reports. AllReduce is taken to use the whole link; what a machine's own devices do before and after is left "
        "out on both sides.",
    )


def of_omnireduce() -> Printed:
    """OmniReduce's densities, one a line."""
    lines = [
        [
            str(row.workers),
            f"{row.density:g}",
            f"{row.speedup:.2f}",
            f"{row.by_bytes:.2f}",
            "" if row.published is None else f"{row.published:.2f}",
            "" if row.published is None else f"{row.speedup / row.published:.2f}",
        ]
        for row in omnireduce.rows()
    ]
    return (
        "OmniReduce (SIGCOMM 2021): time of AllReduce over OmniReduce's, 100 MiB at 100 Gb/s, predicted",
        ("workers", "blocks not zero", "predicted", "by bytes alone", "published", "predicted / published"),
        lines,
        "Predicted by embrace_fx.cost on data sheets (V100); blocks lie at random. What is published is one figure, at "
        "99 % sparsity.",
    )


def of_embrace() -> Printed:
    """EmbRace's settings, one a line."""
    rows = list(embrace.rows())
    lines = [
        [row.model, row.cluster, str(row.gpus)]
        + [f"{row.step_ms[name]:.1f}" for name in embrace.SYSTEMS]
        + [row.best, f"{row.speedup:.2f}", f"{row.over_slowest:.2f}"]
        for row in rows
    ]
    best, slowest = max(row.speedup for row in rows), max(row.over_slowest for row in rows)
    return (
        "EmbRace (ICPP 2022): a step in ms, predicted",
        ("model", "GPU", "GPUs", *embrace.SYSTEMS, "best baseline", "over EmbRace", "slowest over EmbRace"),
        lines,
        f"Predicted by embrace_fx on data sheets, {embrace.GPUS_PER_MACHINE} GPUs a machine, {embrace.GBIT} Gb/s "
        f"between them. Published is the largest ratio of all settings. Over the best baseline: predicted {best:.2f}, "
        f"published {embrace.PUBLISHED_BEST:.2f} ({best / embrace.PUBLISHED_BEST:.2f} of it); over the slowest: "
        f"predicted {slowest:.2f}, published {embrace.PUBLISHED_ANY:.2f} ({slowest / embrace.PUBLISHED_ANY:.2f} of "
        "it).",
    )


PAPERS: dict[str, Callable[[], Printed]] = {"zen": of_zen, "omnireduce": of_omnireduce, "embrace": of_embrace}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("papers", nargs="*", metavar="paper", help=f"of {', '.join(PAPERS)}; all where none is named")
    asked = parser.parse_args().papers or list(PAPERS)
    if unknown := [name for name in asked if name not in PAPERS]:
        parser.error(f"expected papers of {', '.join(PAPERS)}, found {', '.join(unknown)}")
    for name in asked:
        title, columns, lines, about = PAPERS[name]()
        print(f"## {title}\n")
        for line in (columns, ["---"] * len(columns), *lines):
            print("|", " | ".join(line), "|")
        print(f"\n{about}\n", flush=True)


if __name__ == "__main__":
    main()
