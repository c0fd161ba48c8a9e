"""The parallel forms: accuracy on 1, 2 and 4 ranks, and wall time with one rank five times slower.

    python -m benchmarks.admm.parallel --output benchmarks/results

Ranks are processes of this machine, with gloo between them, on scikit-learn's digits; a worker's batches are as many as
a process alone makes. Time is emulated: ranks share cores, so an iteration's length is made by sleeping until
`--iteration-ms` have passed, five times that on the slow rank. Messages and waiting are real. Synchronous ranks are all
workers; of asynchronous ones rank 0 is the master.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from benchmarks.admm.methods import BATCH
from benchmarks.admm.report import write_parallel
from benchmarks.admm.tasks import Task, digits
from embrace_fx import admm

RANKS, SLOWER = (1, 2, 4), 5


@dataclass(frozen=True)
class Setting:
    """The settings of one training.

    Attributes:
        ranks: 1 trains without torch.distributed.
        asynchronous: rank 0 is the master; else all ranks are synchronous workers.
        iterations: the maximum number of iterations; for the master, of updates.
        iteration_ms: the minimum duration of a worker's iteration, or 0 for no minimum.
        slow_rank: the last one's iterations take `SLOWER` times as long.
        accuracy: the accuracy on the test data at which training ends, or None to run all iterations.
    """

    ranks: int
    asynchronous: bool = False
    iterations: int = 60
    iteration_ms: float = 0.0
    slow_rank: bool = False
    accuracy: float | None = None
    seed: int = 0


@dataclass(frozen=True)
class Outcome:
    """The result on rank 0: the highest accuracy, and the wall time until the end of training."""

    accuracy: float
    wall_s: float
    iterations: int
    stopped: str | None


def sleeper(milliseconds: float) -> Callable[[admm.Progress], None]:
    """Returns a callback that makes every iteration last at least this long."""
    began_s = [time.perf_counter()]

    def sleep(progress: admm.Progress) -> None:
        time.sleep(max(0.0, began_s[0] + milliseconds / 1e3 - time.perf_counter()))
        began_s[0] = time.perf_counter()

    return sleep


def run_rank(rank: int, setting: Setting, folder: str) -> None:
    """Trains on one rank. Rank 0 writes the outcome into the folder."""
    torch.set_num_threads(1)
    if setting.ranks > 1:
        store = f"file://{folder}/store"
        timeout = timedelta(minutes=5)
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=setting.ranks, timeout=timeout)
    outcome = train(rank, setting, digits())
    if rank == 0:
        Path(folder, "outcome.json").write_text(json.dumps(asdict(outcome)), encoding="utf-8")
    if setting.ranks > 1:
        dist.destroy_process_group()


def train(rank: int, setting: Setting, task: Task) -> Outcome:
    """Trains on this rank's shard of the training data. Every rank is evaluated on all of the test data."""
    workers = setting.ranks - setting.asynchronous
    worker = max(rank - setting.asynchronous, 0)
    inputs, classes = task.train
    rnn, head = task.modules(setting.seed, scale=1.0)
    parallel: admm.Synchronous | admm.Asynchronous | None = None
    if setting.asynchronous:
        parallel = admm.Asynchronous(arrivals=1, staleness=2 * workers * SLOWER)
    elif setting.ranks > 1:
        parallel = admm.Synchronous()
    slow = setting.slow_rank and rank == setting.ranks - 1
    is_master = setting.asynchronous and rank == 0
    state = admm.train(
        rnn,
        head,
        (inputs[worker::workers], classes[worker::workers]),
        iterations=setting.iterations,
        batch_size=BATCH // workers,
        validation=task.test,
        stopping=admm.Stopping(patience=None, accuracy=setting.accuracy),
        parallel=parallel,
        on_iteration=None if is_master else sleeper(setting.iteration_ms * (SLOWER if slow else 1)),
    )
    best = max(progress.accuracy for progress in state.history)
    return Outcome(best, state.elapsed_s, state.iteration, state.stopped)


def measure(setting: Setting) -> Outcome:
    """Runs a training in new processes, and returns its outcome."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(run_rank, args=(setting, folder), nprocs=setting.ranks)
        return Outcome(**json.loads(Path(folder, "outcome.json").read_text(encoding="utf-8")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("build/admm"))
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--iteration-ms", type=float, default=400.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)

    accuracies: dict[int, list[float]] = {ranks: [] for ranks in RANKS}
    for seed in range(options.seeds):
        for ranks in RANKS:
            outcome = measure(Setting(ranks, iterations=options.iterations, seed=seed))
            print(f"seed {seed}, {ranks} ranks: {outcome}", flush=True)
            accuracies[ranks].append(outcome.accuracy)
    target = round(accuracies[1][0] - 0.02, 4)
    timed = []
    for _ in range(options.rounds):
        pair = {}
        for form in ("synchronous", "asynchronous"):
            is_asynchronous = form == "asynchronous"
            pair[form] = measure(
                Setting(
                    4,
                    is_asynchronous,
                    iterations=options.iterations * (20 if is_asynchronous else 2),
                    iteration_ms=options.iteration_ms,
                    slow_rank=True,
                    accuracy=target,
                )
            )
            print(f"{form}: {pair[form]}", flush=True)
        timed.append(pair)
    write_parallel(options.output, accuracies, timed, target, slower=SLOWER, iteration_ms=options.iteration_ms)


if __name__ == "__main__":
    main()
