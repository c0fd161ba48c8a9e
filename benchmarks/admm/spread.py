"""How often a training comes near the best: ADMM and each optimizer over many seeds, by the bars of `benchmarks.admm`.

    python -m benchmarks.admm.spread --output benchmarks/results

Five seeds tell little of how often a method misses. Here all start at scale 1 from what ADMM makes of a model, at seeds
that have neither chosen a setting nor been judged before; rates and bars are read from `admm-stability.json`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import mean, stdev

import torch

from benchmarks.admm.__main__ import SEEDS, Done, Key, train
from benchmarks.admm.methods import METHODS
from benchmarks.admm.report import SHARE, best_optimizer, environment, of, rounded, today
from benchmarks.admm.tasks import TASKS

FIRST_SEED = 2000

Found = dict[str, dict[str, list[float]]]
"""Accuracies by task and method, in the order of seeds."""


def judged(folder: Path) -> Done:
    """Returns the trainings from which the thresholds are computed."""
    read = json.loads(folder.joinpath("admm-stability.json").read_text(encoding="utf-8"))["trainings"]
    return {Key(*each["key"]): each for each in read}


def measure(known: Done, seeds: int, epochs: int) -> Found:
    found: Found = {task: {method: [] for method in METHODS} for task in TASKS}
    made = {name: make() for name, make in TASKS.items()}
    rates = {key[:2]: key.rate for key in known}
    for seed in range(FIRST_SEED, FIRST_SEED + seeds):
        for task, accuracies in found.items():
            for method in METHODS:
                key = Key(task, method, "rescaled", rates[task, method], seed, 1.0)
                accuracies[method].append(train(made[task], key, epochs).accuracy)
            print(seed, task, {method: round(each[-1], 4) for method, each in accuracies.items()}, flush=True)
    return found


def write(folder: Path, known: Done, found: Found, epochs: int) -> None:
    """Writes admm-spread.md and .json."""
    seeds = len(next(iter(found.values()))["ADMM"])
    lines = [
        "# How often a training comes near the best",
        "",
        f"`python -m benchmarks.admm.spread --seeds {seeds} --output benchmarks/results`, {today()}: {epochs} epochs "
        f"at {seeds} seeds from {FIRST_SEED}, that have neither chosen a setting nor been judged before, scale 1, all "
        f"from ADMM's start; torch {environment()['torch']}. *Within* counts trainings that reach {SHARE:.0%} of the "
        "best tuned optimizer's mean in [the comparison](admm-stability.md). *Hardest* is the judged seed at which "
        "ADMM is worst, from the same start.",
        "",
        "| task | bar | method | mean | standard deviation | lowest | within | hardest |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for task, accuracies in found.items():
        bar = SHARE * best_optimizer(known, task)[2]
        hardest = min(SEEDS, key=lambda seed: known[Key(task, "ADMM", "rescaled", None, seed, 1.0)]["accuracy"])
        for method, each in accuracies.items():
            (there,) = [
                f"{o['accuracy']:.3f}" for o in of(known, task, method, 1.0, "rescaled") if o["key"][4] == hardest
            ] or ["not trained"]
            lines.append(
                f"| {task} | {bar:.3f} | {method} | {mean(each):.3f} | {stdev(each):.3f} | {min(each):.3f} | "
                f"{sum(accuracy >= bar for accuracy in each)} of {seeds} | {there} |"
            )
    folder.joinpath("admm-spread.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    everything = {"environment": environment(), "date": today(), "first seed": FIRST_SEED, "accuracies": found}
    folder.joinpath("admm-spread.json").write_text(json.dumps(rounded(everything)) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=20)
    options = parser.parse_args()
    torch.set_num_threads(1)
    known = judged(options.output)
    write(options.output, known, measure(known, options.seeds, options.epochs), options.epochs)


if __name__ == "__main__":
    main()
