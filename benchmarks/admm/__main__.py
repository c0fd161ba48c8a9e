"""ADMM next to SGD-type optimizers: the same epochs, five seeds, initial weights x0.01 to x10.

    python -m benchmarks.admm --output benchmarks/results --minutes 10

Each optimizer's learning rate is the best of three at a seed that is not among the five, at scale 1. It starts from
what is given, and once more from what ADMM makes of that, the same for all scales. ADMM has its defaults.
What is trained is kept under build/admm, one line per training; the same command goes on where it was, and several may
run at once, each with a `--share` of the trainings. `python -m benchmarks.admm.parallel`, `.pixels` and `.seconds`
measure the parallel forms, all pixels in one step, and what an epoch costs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.admm.methods import OPTIMIZERS, Outcome, by_admm, by_optimizer, rescale
from benchmarks.admm.report import write_stability
from benchmarks.admm.tasks import TASKS, Task

SEEDS = (0, 1, 2, 3, 4)
SCALES = (1.0, 0.1, 10.0, 0.01)
TUNING_SEED = 1000


class Key(NamedTuple):
    """Identifies a training. ADMM has no learning rate, and rescales the initial weights itself."""

    task: str
    method: str
    start: str
    rate: float | None
    seed: int
    scale: float


Done = dict[Key, dict[str, Any]]


def tuned_rate(done: Done, task: str, method: str) -> float | None:
    """Returns the learning rate with the highest accuracy at the tuning seed, or None if a rate has not been trained
    yet.
    """
    rates = OPTIMIZERS[method][1]
    found = {rate: done.get(Key(task, method, "given", rate, TUNING_SEED, 1.0)) for rate in rates}
    scored = {rate: outcome["accuracy"] for rate, outcome in found.items() if outcome is not None}
    return max(scored, key=lambda rate: scored[rate]) if len(scored) == len(rates) else None


def wanted(done: Done) -> Iterator[Key]:
    """Yields every training. Trainings that others depend on come first."""
    for seed in SEEDS:
        for task in TASKS:
            for scale in SCALES:
                yield Key(task, "ADMM", "rescaled", None, seed, scale)
    for task in TASKS:
        for method, (_, rates) in OPTIMIZERS.items():
            for rate in rates:
                yield Key(task, method, "given", rate, TUNING_SEED, 1.0)
    for start, scales in (("rescaled", (1.0,)), ("given", SCALES)):
        for seed in SEEDS:
            for scale in scales:
                for task in TASKS:
                    for method in OPTIMIZERS:
                        tuned = tuned_rate(done, task, method)
                        if tuned is not None:
                            yield Key(task, method, start, tuned, seed, scale)


def train(task: Task, key: Key, epochs: int) -> Outcome:
    rnn, head = task.modules(key.seed, key.scale)
    if key.rate is None:
        return by_admm(rnn, head, task, epochs)
    if key.start == "rescaled":
        rescale(rnn, head, task)
    return by_optimizer(rnn, head, task, key.method, key.rate, key.seed, epochs)


def read(path: Path) -> Done:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {Key(*line["key"]): line["outcome"] for line in map(json.loads, lines)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("build/admm"))
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--share", default="0/1", help="k/n: every n-th training, from the k-th")
    options = parser.parse_args()
    torch.set_num_threads(1)
    kept = Path("build/admm", f"stability-{options.epochs}.jsonl")
    kept.parent.mkdir(parents=True, exist_ok=True)
    first, parts = map(int, options.share.split("/"))
    tasks = {name: make() for name, make in TASKS.items()}
    deadline_s, done = time.monotonic() + 60 * options.minutes, read(kept)
    for number, key in enumerate(wanted(done)):
        if key in done or number % parts != first:
            continue
        if time.monotonic() > deadline_s:
            break
        done[key] = asdict(train(tasks[key.task], key, options.epochs))
        with kept.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": key, "outcome": done[key]}) + "\n")
        done |= read(kept)
    judged = {key: outcome for key, outcome in done.items() if key.seed in SEEDS}
    write_stability(options.output, judged, epochs=options.epochs)


if __name__ == "__main__":
    main()
