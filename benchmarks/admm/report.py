"""Trainings as a page, a picture and JSON."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from statistics import mean, stdev
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.admm.methods import EVERY, METHODS
from benchmarks.admm.tasks import TASKS

if TYPE_CHECKING:
    from benchmarks.admm.__main__ import Key

Outcomes = Mapping["Key", Mapping[str, Any]]

SHARE = 0.95
COLORS = {"ADMM": "#b03a48", "SGD": "#888888", "momentum": "#7a9cc6", "Adagrad": "#8fb573", "Adam": "#c9a24b"}
WIDTH, PANEL, HEIGHT, LEFT, TOP = 900, 270, 190, 46, 62


def of(
    outcomes: Outcomes, task: str, method: str, scale: float | None = None, start: str | None = None
) -> list[Mapping[str, Any]]:
    """Returns the outcomes of a method on a task over all seeds, for one scale or all, and for one start or all."""
    return [
        o
        for key, o in outcomes.items()
        if key[:2] == (task, method) and scale in {None, key.scale} and start in {None, key.start}
    ]


def best_optimizer(outcomes: Outcomes, task: str) -> tuple[str, str, float]:
    """Returns (method, start, accuracy) of the optimizer with the highest mean accuracy over seeds at scale 1."""
    means = {
        (method, start): mean(o["accuracy"] for o in found)
        for method in METHODS[1:]
        for start in ("given", "rescaled")
        if (found := of(outcomes, task, method, 1.0, start))
    }
    method, start = max(means, key=lambda each: means[each])
    return method, start, means[method, start]


def write_stability(folder: Path, outcomes: Outcomes, *, epochs: int) -> None:
    """Writes admm-stability.md, .svg and .json."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.joinpath("admm-stability.md").write_text(_page(outcomes, epochs), encoding="utf-8")
    folder.joinpath("admm-stability.svg").write_text(_picture(outcomes, epochs), encoding="utf-8")
    rows = [{"key": key, **outcome} for key, outcome in outcomes.items()]
    found = {"environment": environment(), "date": today(), "epochs": epochs, "trainings": rows}
    folder.joinpath("admm-stability.json").write_text(json.dumps(rounded(found)) + "\n", encoding="utf-8")


def write_parallel(
    folder: Path,
    accuracies: Mapping[int, Sequence[float]],
    timed: Sequence[Mapping[str, Any]],
    target: float,
    *,
    slower: int,
    iteration_ms: float,
) -> None:
    """Writes admm-parallel.md and .json.

    Args:
        accuracies: number of ranks -> the accuracy of each seed.
        timed: for each round, the outcome of each form of training.
    """
    found = environment()
    alone = mean(accuracies[1])
    lines = [
        "# The parallel forms of ADMM",
        "",
        f"`python -m benchmarks.admm.parallel --output benchmarks/results`, {today()}, digits, torch {found['torch']}, "
        f"Python {found['python']}. Accuracies are measured. Times are of *emulated* compute: an iteration is made to "
        f"last {iteration_ms:g} ms by sleeping, {slower} times that on the slow rank; messages and waiting are real.",
        "",
        "| ranks | best test accuracy, mean | by seed | points from one process |",
        "|---|---|---|---|",
        *(_ranks_row(ranks, each, alone) for ranks, each in accuracies.items()),
        "",
        f"Wall time to test accuracy {target:.3f}, on 4 ranks with one {slower} times slower. Synchronous ranks all "
        "work; the asynchronous master does not.",
        "",
        "| round | synchronous s (iterations) | asynchronous s (updates) | asynchronous / synchronous |",
        "|---|---|---|---|",
    ]
    for number, pair in enumerate(timed, start=1):
        sync, free = pair["synchronous"], pair["asynchronous"]
        note = "" if all(o.stopped and o.stopped.startswith("accuracy") for o in pair.values()) else " (not reached)"
        lines.append(
            f"| {number} | {sync.wall_s:.1f} ({sync.iterations}) | {free.wall_s:.1f} ({free.iterations}){note} | "
            f"{free.wall_s / sync.wall_s:.2f} |"
        )
    folder.joinpath("admm-parallel.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    rounds = [{form: asdict(outcome) for form, outcome in pair.items()} for pair in timed]
    by_ranks = {str(ranks): list(each) for ranks, each in accuracies.items()}
    everything = {"environment": found, "date": today(), "iteration_ms": iteration_ms, "target": target}
    text = json.dumps(rounded(everything | {"ranks": by_ranks, "rounds": rounds}), indent=1) + "\n"
    folder.joinpath("admm-parallel.json").write_text(text, encoding="utf-8")


def _ranks_row(ranks: int, accuracies: Sequence[float], alone: float) -> str:
    by_seed, found = ", ".join(f"{accuracy:.3f}" for accuracy in accuracies), mean(accuracies)
    return f"| {ranks} | {found:.3f} | {by_seed} | {100 * (found - alone):+.1f} |"


def today() -> str:
    return datetime.now(tz=UTC).date().isoformat()


def environment() -> dict[str, str]:
    return {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}


def _page(outcomes: Outcomes, epochs: int) -> str:
    found = environment()
    lines = [
        "# ADMM next to SGD-type optimizers",
        "",
        f"`python -m benchmarks.admm --output benchmarks/results`, {today()}: {epochs} epochs in batches of 16, one "
        f"thread, torch {found['torch']}, Python {found['python']}. Accuracies are of test data, of the weights with "
        "the lowest training loss. Optimizers have the best of three learning rates at a seed that is not judged; ADMM "
        "has its defaults, chosen at seeds 1000 to 1005. *Rescaled* is an optimizer from ADMM's start, which makes all "
        "scales the same.",
        "",
        "![Accuracy over epochs](admm-stability.svg)",
        "",
    ]
    for task in TASKS:
        if not of(outcomes, task, "ADMM"):
            continue
        whose, start, best = best_optimizer(outcomes, task)
        bar = SHARE * best
        scales = sorted({key.scale for key in outcomes})
        lines += [
            f"## {task}",
            "",
            f"Best optimizer: {whose}, start {start}, {best:.3f}. *Within* counts trainings of at least {bar:.3f}, "
            f"{SHARE:.0%} of it.",
            "",
            f"| method | start | rate | {' | '.join(f'x{scale:g}' for scale in scales)} | within |",
            f"|---|---|---|{'---|' * len(scales)}---|",
        ]
        for method in METHODS:
            for start in ("given", "rescaled"):
                everything = of(outcomes, task, method, start=start)
                if everything:
                    (rate,) = {key.rate for key in outcomes if key[:3] == (task, method, start)}
                    cells = [_spread([o["accuracy"] for o in of(outcomes, task, method, s, start)]) for s in scales]
                    shown = "none" if rate is None else f"{rate:g}"
                    within = f"{sum(o['accuracy'] >= bar for o in everything)} of {len(everything)}"
                    lines.append(f"| {method} | {start} | {shown} | {' | '.join(cells)} | {within} |")
        lines += ["", _hardest(outcomes, task), ""]
    lines += ["Cells are means over seeds, with the standard deviation and the lowest."]
    return "\n".join(lines) + "\n"


def _hardest(outcomes: Outcomes, task: str) -> str:
    """Describes the seed at which ADMM is worst at scale 1, with the best optimizer's accuracy at that seed."""
    found = {key: o["accuracy"] for key, o in outcomes.items() if key.task == task and key.scale == 1.0}
    worst = min((key for key in found if key.method == "ADMM"), key=lambda key: found[key])
    there = [key for key in found if key.seed == worst.seed and key.method != "ADMM"]
    if not there:
        return f"ADMM is worst at seed {worst.seed}: {found[worst]:.3f}."
    best = max(there, key=lambda key: found[key])
    return (
        f"ADMM is worst at seed {worst.seed}: {found[worst]:.3f}, {found[worst] / found[best]:.0%} of the best "
        f"optimizer at that seed ({best.method}, start {best.start}, {found[best]:.3f})."
    )


def _spread(values: Sequence[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.3f}" if values else ""
    return f"{mean(values):.3f} ± {stdev(values):.3f} ({min(values):.3f})"


def _picture(outcomes: Outcomes, epochs: int) -> str:
    """Draws a panel per task: test accuracy over epochs at scale 1, from ADMM's start, with the range over seeds."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {TOP + HEIGHT + 50}" '
        'font-family="sans-serif" font-size="11">',
        f'<title>Test accuracy over epochs</title><rect width="{WIDTH}" height="{TOP + HEIGHT + 50}" fill="white"/>',
        '<text x="14" y="20" font-size="14" font-weight="bold">Test accuracy over epochs, rescaled start</text>',
    ]
    for k, method in enumerate(METHODS):
        parts.append(f'<rect x="{14 + 110 * k}" y="30" width="12" height="10" fill="{COLORS[method]}"/>')
        parts.append(f'<text x="{30 + 110 * k}" y="39">{escape(method)}</text>')
    for k, task in enumerate(TASKS):
        left = LEFT + k * (PANEL + 24)
        parts += _panel(outcomes, task, left, epochs)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(outcomes: Outcomes, task: str, left: float, epochs: int) -> list[str]:
    def point(number: int, accuracy: float) -> str:
        return f"{left + (number + 1) * EVERY / epochs * PANEL:.1f},{TOP + HEIGHT * (1 - accuracy):.1f}"

    parts = [f'<text x="{left}" y="{TOP - 6}" font-weight="bold">{task}</text>']
    for tenth in (0, 2, 4, 6, 8, 10):
        y = TOP + HEIGHT * (1 - tenth / 10)
        parts.append(f'<line x1="{left}" x2="{left + PANEL}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 4}" y="{y + 4}" text-anchor="end">{tenth / 10:g}</text>')
    parts.append(f'<text x="{left + PANEL}" y="{TOP + HEIGHT + 16}" text-anchor="end">{epochs} epochs</text>')
    for method in reversed(METHODS):
        curves = [outcome["curve"] for outcome in of(outcomes, task, method, 1.0, "rescaled")]
        if curves:
            steps = list(zip(*curves, strict=True))
            band = [point(n, max(v)) for n, v in enumerate(steps)]
            band += [point(n, min(v)) for n, v in reversed(list(enumerate(steps)))]
            line = " ".join(point(n, mean(v)) for n, v in enumerate(steps))
            parts.append(f'<polygon points="{" ".join(band)}" fill="{COLORS[method]}" opacity="0.18"/>')
            parts.append(f'<polyline points="{line}" fill="none" stroke="{COLORS[method]}" stroke-width="1.8"/>')
    return parts


def rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, Mapping):
        return {key: rounded(each) for key, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list | tuple) else value
