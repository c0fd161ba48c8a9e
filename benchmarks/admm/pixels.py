"""All pixels at once: training loss per epoch of ADMM and of four optimizers, each tuned over five rates, on digits.

    python -m benchmarks.admm.pixels --output benchmarks/results

The form of the paper's experiment on MNIST: one step (N = 1), so that the RNN is a layer of tanh units, and what is
compared is how low the training loss is after so many passes. Rates, and a factor of ADMM's penalties, are chosen by
the training loss at a seed that is not judged.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean, stdev

import torch

from benchmarks.admm.methods import Outcome, by_admm, by_optimizer
from benchmarks.admm.report import environment, rounded, today
from benchmarks.admm.tasks import Task, digits
from embrace_fx import admm

SEEDS, TUNING_SEED = (0, 1, 2, 3, 4), 1000
RATES = {
    "SGD": (3.0, 1.0, 0.3, 0.1, 0.03),
    "momentum": (0.3, 0.1, 0.03, 0.01, 0.003),
    "Adagrad": (0.3, 0.1, 0.03, 0.01, 0.003),
    "Adam": (0.1, 0.03, 0.01, 0.003, 0.001),
}
SIZES = (0.1, 0.25, 0.5, 1.0, 2.0)
"""What ADMM's penalties are multiplied with, and its damping: its one knob, tuned as a rate is."""


def task_of_pixels(train: int = 600) -> Task:
    """Returns a task whose sequences have a single step with all 64 pixels of an image."""
    task = digits(train=train)
    return replace(task, train=(task.train[0].flatten(1)[:, None], task.train[1]), test=_flat(task))


def _flat(task: Task) -> tuple[torch.Tensor, torch.Tensor]:
    return task.test[0].flatten(1)[:, None], task.test[1]


def train(task: Task, method: str, size: float, seed: int, epochs: int) -> Outcome:
    rnn, head = task.modules(seed, 1.0)
    if method != "ADMM":
        return by_optimizer(rnn, head, task, method, size, seed, epochs, every=1)
    default = admm.Penalties()
    penalties = admm.Penalties(size * default.p1, size * default.p2, size * default.p3, size * default.damping)
    return by_admm(rnn, head, task, epochs, penalties, every=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("build/admm"))
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    task, sizes, found = task_of_pixels(), {"ADMM": SIZES, **RATES}, {}
    for method, candidates in sizes.items():
        tried = {size: train(task, method, size, TUNING_SEED, options.epochs).losses[-1] for size in candidates}
        best = min(candidates, key=lambda size: tried[size])
        outcomes = [train(task, method, best, seed, options.epochs) for seed in SEEDS]
        found[method] = {"best": best, "tried": tried, "trainings": [asdict(each) for each in outcomes]}
        print(method, best, [f"{each.losses[-1]:.4f} {each.accuracy:.3f}" for each in outcomes], flush=True)
    write(options.output, found, options.epochs)


def write(folder: Path, found: dict[str, dict[str, object]], epochs: int) -> None:
    """Writes admm-pixels.md and .json."""
    lines = [
        "# All pixels at once",
        "",
        f"`python -m benchmarks.admm.pixels --output benchmarks/results`, {today()}: digits, 64 pixels in one step, "
        f"600 images, 24 hidden units, batches of 16, {epochs} epochs, one thread, torch {environment()['torch']}. "
        "Rates, and what ADMM's penalties are multiplied with, are the best of five by training loss at a seed that is "
        "not judged. Mean over five seeds, with the standard deviation.",
        "",
        f"| method | rate | loss after 1 epoch | after {epochs // 2} | after {epochs} | highest | test accuracy |",
        "|---|---|---|---|---|---|---|",
    ]
    for method, entry in found.items():
        trainings = entry["trainings"]
        assert isinstance(trainings, list)
        losses = [each["losses"] for each in trainings]
        cells = [f"{mean(each[n] for each in losses):.4f}" for n in (0, epochs // 2 - 1)]
        last, accuracies = [each[-1] for each in losses], [each["accuracy"] for each in trainings]
        lines.append(
            f"| {method} | {entry['best']:g} | {' | '.join(cells)} | {mean(last):.4f} ± {stdev(last):.4f} | "
            f"{max(last):.4f} | {mean(accuracies):.3f} ± {stdev(accuracies):.3f} |"
        )
    folder.mkdir(parents=True, exist_ok=True)
    folder.joinpath("admm-pixels.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    everything = {"environment": environment(), "date": today(), "epochs": epochs, "methods": found}
    folder.joinpath("admm-pixels.json").write_text(json.dumps(rounded(everything)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
