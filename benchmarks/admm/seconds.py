"""What an epoch of ADMM costs beside one of an optimizer: epochs in turns, float32, one thread.

    python -m benchmarks.admm.seconds --output benchmarks/results

A round is an epoch of each method, one after the other; what counts is the ratio within a round, so that a busy machine
slows both. ADMM's epochs are those of `admm.train`, its figures included; optimizers judge nothing.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median

import torch

from benchmarks.admm.methods import BATCH, OPTIMIZERS, one_epoch
from benchmarks.admm.report import environment, rounded, today
from benchmarks.admm.tasks import TASKS, Task
from embrace_fx import admm


def measure(task: Task, rounds: int) -> dict[str, list[float]]:
    """Returns method -> milliseconds of its epochs, one per round. The first round is left out."""
    found: dict[str, list[float]] = {method: [] for method in ("ADMM", *OPTIMIZERS)}
    rnn, head = task.modules(0, 1.0)
    loops = {}
    for method, (make, rates) in OPTIMIZERS.items():
        own_rnn, own_head = task.modules(0, 1.0)
        optimizer = make([*own_rnn.parameters(), *own_head.parameters()], lr=rates[1])
        loops[method] = own_rnn, own_head, optimizer, torch.Generator().manual_seed(0)
    began_s = [0.0]

    def others(progress: admm.Progress) -> None:
        """Runs an epoch of each optimizer between two epochs of ADMM."""
        found["ADMM"].append((time.perf_counter() - began_s[0]) * 1e3)
        for method, (own_rnn, own_head, optimizer, generator) in loops.items():
            started_s = time.perf_counter()
            one_epoch(own_rnn, own_head, task, optimizer, generator)
            found[method].append((time.perf_counter() - started_s) * 1e3)
        began_s[0] = time.perf_counter()

    began_s[0] = time.perf_counter()
    admm.train(rnn, head, task.train, iterations=rounds + 1, batch_size=BATCH, on_iteration=others)
    return {method: times[1:] for method, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("build/admm"))
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {name: measure(make(), options.rounds) for name, make in TASKS.items()}
    write(options.output, found, options.rounds)


def write(folder: Path, found: dict[str, dict[str, list[float]]], rounds: int) -> None:
    """Writes admm-seconds.md and .json."""
    lines = [
        "# What an epoch costs",
        "",
        f"`python -m benchmarks.admm.seconds --output benchmarks/results`, {today()}: {rounds} rounds, an epoch of "
        f"each method in turns, float32, one thread of a shared machine, torch {environment()['torch']}. Median of the "
        "ratios within rounds, ADMM's milliseconds over the optimizer's, and the quartiles.",
        "",
        f"| task | ADMM ms | {' | '.join(OPTIMIZERS)} |",
        f"|---|---|{'---|' * len(OPTIMIZERS)}",
    ]
    for task, times in found.items():
        cells = []
        for method in OPTIMIZERS:
            ratios = sorted(mine / other for mine, other in zip(times["ADMM"], times[method], strict=True))
            low, high = ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]
            cells.append(f"{median(ratios):.2f} ({low:.2f} to {high:.2f})")
        lines.append(f"| {task} | {median(times['ADMM']):.1f} | {' | '.join(cells)} |")
    folder.mkdir(parents=True, exist_ok=True)
    folder.joinpath("admm-seconds.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    everything = {"environment": environment(), "date": today(), "milliseconds": found}
    folder.joinpath("admm-seconds.json").write_text(json.dumps(rounded(everything)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
