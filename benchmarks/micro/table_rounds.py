"""What Python does for a sharded table, and for a bucket, under each schedule, in rounds of `cost.Handling`.

    python -m benchmarks.micro.table_rounds

Two ranks train a model with a table so small that its bytes do not count, whole and sharded, and with one bucket or
several, in turns, under each schedule. Differences are told in processor time of the threads that run Python, the one
that computes and the one that launches: they are `ROUNDS`, by launch, `STEP_ROUNDS` and `UPDATE_ROUNDS` of
`passes/planner/step_cost.py`.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

import embrace_fx
from embrace_fx.runtime.probe.handling import NARROW, make_exchange_work
from embrace_fx.vocabulary.schedule import SCHEDULES

RANKS, ROWS, WIDTH, IDS = 2, 512, 160, 64
"""A square layer of this width is larger than the smallest chunk, so that each is a bucket."""
WARM_UP, STEPS, TURNS = 30, 100, 5
LAYERS = (1, 9)
STRATEGIES = ("allreduce", "alltoall")
LINKS = embrace_fx.Cluster(1e6, 0.0)
"""On which the smallest chunks are cut."""
OTHER_THREADS = ("gloo", "pt_")
"""How threads that run no Python are named."""


class Small(nn.Module):
    """A table, and dense parameters that are also reduced."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)
        self.linear = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.linear(self.table(ids)).square().mean()
        return loss


def python_ms() -> float:
    """Returns the processor time so far of this process's threads that run Python."""
    tasks = [*Path("/proc/self/task").iterdir()]
    of_python = (task for task in tasks if not (task / "comm").read_text().startswith(OTHER_THREADS))
    return sum(int((task / "schedstat").read_text().split()[0]) for task in of_python) / 1e6


def round_ms() -> float:
    """Returns the processor time of handling one round of communication."""
    run, times = make_exchange_work(NARROW, 1, torch.device("cpu")), 300
    run()
    began_s = time.thread_time()
    for _ in range(times):
        run()
    return (time.thread_time() - began_s) * 1e3 / times


def training(schedule: Any, strategy: str, layers: int, rank: int) -> Iterator[int]:
    """Trains endlessly, and yields the number of buckets."""
    torch.manual_seed(0)
    plain = Small(layers)
    optimizer = torch.optim.Adagrad(plain.parameters())
    model = embrace_fx.compile(
        plain, optimizer=optimizer, strategy={"table.weight": strategy}, schedule=schedule, cluster=LINKS
    )
    random = torch.Generator().manual_seed(rank)
    for ids in model.lookahead(torch.randint(ROWS, (IDS,), generator=random) for _ in iter(int, 1)):
        model(ids).backward()
        model.optimizer.step()
        model.optimizer.zero_grad()
        yield len(model.plan.buckets)


def rank_main(rank: int, meeting: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    kinds = [*product(SCHEDULES, STRATEGIES, LAYERS)]
    steps = {kind: training(*kind, rank) for kind in kinds}
    buckets = {kind: next(each) for kind, each in steps.items()}
    step_ms: dict[tuple[Any, ...], list[float]] = {kind: [] for kind in kinds}
    for turn in range(TURNS + 1):
        for kind, each in steps.items():
            began_ms = python_ms()
            for _ in range(STEPS if turn else WARM_UP):
                next(each)
            if turn:
                step_ms[kind].append((python_ms() - began_ms) / STEPS)
    one_ms = statistics.median(round_ms() for _ in range(TURNS))
    if rank == 0:
        ms = {kind: statistics.median(found) for kind, found in step_ms.items()}
        few, many = LAYERS
        print(f"a round of handling takes {one_ms:.3f} ms; ms of Python a step, and in rounds:")
        for schedule in SCHEDULES:
            whole, sharded, more = (
                (schedule, "allreduce", few),
                (schedule, "alltoall", few),
                (schedule, "alltoall", many),
            )
            table_ms = ms[sharded] - ms[whole]
            bucket_ms = (ms[more] - ms[sharded]) / (buckets[more] - buckets[sharded])
            print(
                f"{schedule}: {ms[whole]:.2f} ms with the table whole, {table_ms:+.3f} ms sharded, "
                f"{table_ms / one_ms:.1f} rounds; {bucket_ms:+.3f} ms for each further bucket, its layer "
                f"included, {bucket_ms / one_ms:.1f} rounds"
            )
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        spawn(rank_main, (f"{folder}/meeting",), nprocs=RANKS)


if __name__ == "__main__":
    main()
