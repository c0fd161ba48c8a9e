"""What Python does for a launch of a sharded table, in rounds of `cost.Handling`: `shard_cost.ROUNDS`.

    python -m benchmarks.micro.table_rounds

Two ranks train a model with a table so small that its bytes do not count, whole and sharded in turns. The difference is
told in processor time of the threads that run Python, the one that computes and the one that launches, by launch.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

import embrace_fx
from embrace_fx.passes.planner.shard_cost import launches_of
from embrace_fx.runtime.probe.probe import probe_handling
from embrace_fx.runtime.ranks.communicator import Communicator

RANKS, ROWS, WIDTH, IDS = 2, 512, 16, 64
WARM_UP, STEPS, TURNS = 30, 300, 5
STRATEGIES = ("allreduce", "alltoall")
OTHER_THREADS = ("gloo", "pt_")
"""How threads that run no Python are named."""


class Small(nn.Module):
    """A table, and what else is reduced."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.linear(self.table(ids)).square().mean()
        return loss


def python_ms() -> float:
    """Processor time so far of this process's threads that run Python."""
    ticks = 0
    for task in Path("/proc/self/task").iterdir():
        name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
        if not name.startswith(OTHER_THREADS):
            ticks += sum(map(int, rest.split()[11:13]))
    return ticks * 1e3 / os.sysconf("SC_CLK_TCK")


def training(strategy: str, rank: int) -> Iterator[None]:
    """Endless steps."""
    torch.manual_seed(0)
    plain = Small()
    model = embrace_fx.compile(
        plain, optimizer=torch.optim.Adagrad(plain.parameters()), strategy={"table.weight": strategy}, schedule="2d"
    )
    random = torch.Generator().manual_seed(rank)
    for ids in model.lookahead(torch.randint(ROWS, (IDS,), generator=random) for _ in iter(int, 1)):
        model(ids).backward()
        model.optimizer.step()
        model.optimizer.zero_grad()
        yield


def rank_main(rank: int, meeting: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    steps = {strategy: training(strategy, rank) for strategy in STRATEGIES}
    step_ms: dict[str, list[float]] = {strategy: [] for strategy in STRATEGIES}
    for turn in range(TURNS + 1):
        for strategy, each in steps.items():
            began_ms = python_ms()
            for _ in range(STEPS if turn else WARM_UP):
                next(each)
            if turn:
                step_ms[strategy].append((python_ms() - began_ms) / STEPS)
    handling = probe_handling(Communicator(None))
    if rank == 0:
        whole_ms, sharded_ms = (statistics.median(step_ms[strategy]) for strategy in STRATEGIES)
        by_launch_ms = (sharded_ms - whole_ms) / launches_of("2d")
        print(
            f"a step's Python takes {whole_ms:.2f} ms with the table whole, {sharded_ms:.2f} ms sharded: "
            f"{by_launch_ms:.3f} ms for each of {launches_of('2d')} launches; a round of handling takes "
            f"{handling.round_ms:.3f} ms, {by_launch_ms / handling.round_ms:.1f} of them"
        )
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        spawn(rank_main, (f"{folder}/meeting",), nprocs=RANKS)


if __name__ == "__main__":
    main()
