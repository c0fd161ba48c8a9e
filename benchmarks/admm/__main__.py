"""ADMM next to SGD-type optimizers: the same passes over the data, five seeds, initial weights x0.01 to x10.

    python -m benchmarks.admm --output benchmarks/results --minutes 10

Each optimizer's learning rate is the best of three at a seed that is not among the five, at scale 1; ADMM has its
defaults. What is trained is kept under build/admm, one line per training; the same command goes on where it was. The
page is written in any case, and says what it lacks. `python -m benchmarks.admm.parallel` measures the parallel forms.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.admm.methods import METHODS, OPTIMIZERS, train
from benchmarks.admm.report import write_stability
from benchmarks.admm.tasks import TASKS

SEEDS = (0, 1, 2, 3, 4)
SCALES = (1.0, 0.1, 10.0, 0.01)
TUNING_SEED = 1000

Key = tuple[str, str, float | None, int, float]
"""Task, method, learning rate, seed, scale."""


def tuned_rates(done: dict[Key, dict[str, Any]], task: str) -> dict[str, float | None]:
    """By method: the rate with the highest accuracy at the tuning seed, of those trained."""
    rates: dict[str, float | None] = {"ADMM": None}
    for method, (_, candidates) in OPTIMIZERS.items():
        found = {rate: done.get((task, method, rate, TUNING_SEED, 1.0)) for rate in candidates}
        scored = {rate: outcome["accuracy"] for rate, outcome in found.items() if outcome is not None}
        if len(scored) == len(candidates):
            rates[method] = max(scored, key=lambda rate: scored[rate])
    return rates


def wanted(done: dict[Key, dict[str, Any]]) -> Iterator[Key]:
    """Every training, those first that others depend on; then a seed at a time, so that a part of it is fair."""
    for task in TASKS:
        for method, (_, rates) in OPTIMIZERS.items():
            for rate in rates:
                yield task, method, rate, TUNING_SEED, 1.0
    for seed in SEEDS:
        for scale in SCALES:
            for task in TASKS:
                for method, tuned in tuned_rates(done, task).items():
                    yield task, method, tuned, seed, scale


def read(path: Path) -> dict[Key, dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {tuple(line["key"]): line["outcome"] for line in map(json.loads, lines)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("build/admm"))
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--passes", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(1)
    kept = Path("build/admm", f"stability-{options.passes}.jsonl")
    kept.parent.mkdir(parents=True, exist_ok=True)
    done = read(kept)
    tasks = {name: make() for name, make in TASKS.items()}
    deadline_s = time.monotonic() + 60 * options.minutes
    for key in wanted(done):
        if key in done:
            continue
        if time.monotonic() > deadline_s:
            break
        name, method, rate, seed, scale = key
        done[key] = asdict(train(tasks[name], method, rate, seed, scale, options.passes))
        with kept.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"key": key, "outcome": done[key]}) + "\n")
    rates = {name: tuned_rates(done, name) for name in TASKS}
    judged = {key: outcome for key, outcome in done.items() if key[3] != TUNING_SEED}
    expected = len(TASKS) * len(METHODS) * len(SEEDS) * len(SCALES)
    write_stability(options.output, judged, rates, expected=expected, passes=options.passes)


if __name__ == "__main__":
    main()
