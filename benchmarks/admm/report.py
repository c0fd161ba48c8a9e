"""Trainings as a page, a picture and JSON."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from benchmarks.admm.methods import EVERY, METHODS
from benchmarks.admm.tasks import TASKS

Outcomes = Mapping[tuple[str, str, float | None, int, float], Mapping[str, Any]]
"""By task, method, learning rate, seed, scale."""

SHARE = 0.9
COLORS = {"ADMM": "#b03a48", "SGD": "#888888", "momentum": "#7a9cc6", "Adagrad": "#8fb573", "Adam": "#c9a24b"}
WIDTH, PANEL, HEIGHT, LEFT, TOP = 900, 270, 190, 46, 62


def of(outcomes: Outcomes, task: str, method: str, scale: float | None = None) -> list[Mapping[str, Any]]:
    """The outcomes of a method on a task, over seeds, at one scale or at all."""
    return [o for key, o in outcomes.items() if key[:2] == (task, method) and scale in {None, key[4]}]


def write_stability(
    folder: Path, outcomes: Outcomes, rates: Mapping[str, Mapping[str, float | None]], *, expected: int, passes: int
) -> None:
    """Writes admm-stability.md, .svg and .json."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.joinpath("admm-stability.md").write_text(_page(outcomes, rates, expected, passes), encoding="utf-8")
    folder.joinpath("admm-stability.svg").write_text(_picture(outcomes, passes), encoding="utf-8")
    rows = [{"key": key, **outcome} for key, outcome in outcomes.items()]
    found = {"environment": environment(), "passes": passes, "rates": rates, "trainings": rows}
    folder.joinpath("admm-stability.json").write_text(json.dumps(_rounded(found)) + "\n", encoding="utf-8")


def write_parallel(
    folder: Path,
    accuracies: Mapping[int, Any],
    timed: Sequence[Mapping[str, Any]],
    target: float,
    *,
    slower: int,
    iteration_ms: float,
) -> None:
    """Writes admm-parallel.md and .json, beside the timelines.

    Args:
        accuracies: outcomes by number of ranks.
        timed: rounds of outcomes by form.
    """
    found = environment()
    alone = accuracies[1].accuracy
    lines = [
        "# The parallel forms of ADMM",
        "",
        f"`python -m benchmarks.admm.parallel --output benchmarks/results`, digits, torch {found['torch']}, Python "
        f"{found['python']}. Accuracies are measured. Times are of *emulated* compute: an iteration is made to last "
        f"{iteration_ms:g} ms by sleeping, {slower} times that on the slow rank; messages and waiting are real.",
        "",
        "| ranks | best test accuracy | points from one process |",
        "|---|---|---|",
        *(f"| {ranks} | {o.accuracy:.3f} | {100 * (o.accuracy - alone):+.1f} |" for ranks, o in accuracies.items()),
        "",
        f"Wall time to test accuracy {target:.3f}, two points below one process, on 4 ranks with one {slower} times "
        "slower. Synchronous ranks all work; the asynchronous master does not.",
        "",
        "| round | synchronous s (iterations) | asynchronous s (updates) | ratio |",
        "|---|---|---|---|",
    ]
    for number, pair in enumerate(timed, start=1):
        sync, free = pair["synchronous"], pair["asynchronous"]
        note = "" if all(o.stopped and o.stopped.startswith("accuracy") for o in pair.values()) else " (not reached)"
        lines.append(
            f"| {number} | {sync.wall_s:.1f} ({sync.iterations}) | {free.wall_s:.1f} ({free.iterations}){note} | "
            f"{sync.wall_s / free.wall_s:.2f} |"
        )
    lines += ["", "![Synchronous](admm-synchronous.svg)", "", "![Asynchronous](admm-asynchronous.svg)"]
    folder.joinpath("admm-parallel.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    rounds = [{form: asdict(outcome) for form, outcome in pair.items()} for pair in timed]
    by_ranks = {str(ranks): asdict(outcome) for ranks, outcome in accuracies.items()}
    everything = {"environment": found, "iteration_ms": iteration_ms, "target": target, "ranks": by_ranks}
    text = json.dumps(_rounded(everything | {"rounds": rounds}), indent=1) + "\n"
    folder.joinpath("admm-parallel.json").write_text(text, encoding="utf-8")


def environment() -> dict[str, str]:
    return {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}


def _page(outcomes: Outcomes, rates: Mapping[str, Mapping[str, float | None]], expected: int, passes: int) -> str:
    found = environment()
    lines = [
        "# ADMM next to SGD-type optimizers",
        "",
        f"`python -m benchmarks.admm --output benchmarks/results`, measured: {passes} passes over the training data, "
        f"one thread, torch {found['torch']}, Python {found['python']}. Accuracies are of test data, of the weights "
        "with the lowest training loss. An iteration of ADMM counts as two passes. Optimizers have the best of three "
        "learning rates at scale 1, by a seed that is not judged; ADMM has its defaults.",
        "",
    ]
    if len(outcomes) < expected:
        lines += [f"**Partial**: {len(outcomes)} of {expected} trainings.", ""]
    lines += ["![Accuracy over passes](admm-stability.svg)", ""]
    for task in TASKS:
        everything = [o["accuracy"] for method in METHODS for o in of(outcomes, task, method)]
        if not everything:
            continue
        best = max(everything)
        scales = sorted({key[4] for key in outcomes if key[0] == task})
        lines += [
            f"## {task}",
            "",
            f"Best of all trainings: {best:.3f}; *stable* is the share of seeds and scales that reach {SHARE:.0%} of "
            f"it, {SHARE * best:.3f}.",
            "",
            f"| method | rate | {' | '.join(f'x{scale:g}' for scale in scales)} | stable | s per training |",
            f"|---|---|{'---|' * len(scales)}---|---|",
        ]
        for method in METHODS:
            all_scales = of(outcomes, task, method)
            if all_scales:
                rate = rates[task].get(method)
                cells = [_spread([o["accuracy"] for o in of(outcomes, task, method, scale)]) for scale in scales]
                stable = mean(o["accuracy"] >= SHARE * best for o in all_scales)
                wall_s = mean(o["wall_s"] for o in all_scales)
                shown = "none" if rate is None else f"{rate:g}"
                lines.append(f"| {method} | {shown} | {' | '.join(cells)} | {stable:.0%} | {wall_s:.1f} |")
        lines.append("")
    lines += ["Cells are means over seeds, with the standard deviation and the lowest."]
    return "\n".join(lines) + "\n"


def _spread(values: Sequence[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.3f}" if values else ""
    return f"{mean(values):.3f} ± {stdev(values):.3f} ({min(values):.3f})"


def _picture(outcomes: Outcomes, passes: int) -> str:
    """A panel per task: test accuracy over passes at scale 1, the mean over seeds and a band from lowest to highest."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {TOP + HEIGHT + 50}" '
        'font-family="sans-serif" font-size="11">',
        f'<title>Test accuracy over passes</title><rect width="{WIDTH}" height="{TOP + HEIGHT + 50}" fill="white"/>',
        '<text x="14" y="20" font-size="14" font-weight="bold">Test accuracy over passes, initial weights x1</text>',
    ]
    for k, method in enumerate(METHODS):
        parts.append(f'<rect x="{14 + 110 * k}" y="30" width="12" height="10" fill="{COLORS[method]}"/>')
        parts.append(f'<text x="{30 + 110 * k}" y="39">{escape(method)}</text>')
    for k, task in enumerate(TASKS):
        left = LEFT + k * (PANEL + 24)
        parts += _panel(outcomes, task, left, passes)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(outcomes: Outcomes, task: str, left: float, passes: int) -> list[str]:
    def point(number: int, accuracy: float) -> str:
        return f"{left + (number + 1) * EVERY / passes * PANEL:.1f},{TOP + HEIGHT * (1 - accuracy):.1f}"

    parts = [f'<text x="{left}" y="{TOP - 6}" font-weight="bold">{task}</text>']
    for tenth in (0, 2, 4, 6, 8, 10):
        y = TOP + HEIGHT * (1 - tenth / 10)
        parts.append(f'<line x1="{left}" x2="{left + PANEL}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 4}" y="{y + 4}" text-anchor="end">{tenth / 10:g}</text>')
    parts.append(f'<text x="{left + PANEL}" y="{TOP + HEIGHT + 16}" text-anchor="end">{passes} passes</text>')
    for method in reversed(METHODS):
        curves = [outcome["curve"] for outcome in of(outcomes, task, method, 1.0)]
        if curves:
            steps = list(zip(*curves, strict=True))
            band = [point(n, max(v)) for n, v in enumerate(steps)]
            band += [point(n, min(v)) for n, v in reversed(list(enumerate(steps)))]
            line = " ".join(point(n, mean(v)) for n, v in enumerate(steps))
            parts.append(f'<polygon points="{" ".join(band)}" fill="{COLORS[method]}" opacity="0.18"/>')
            parts.append(f'<polyline points="{line}" fill="none" stroke="{COLORS[method]}" stroke-width="1.8"/>')
    return parts


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, Mapping):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value
