"""Large tables under AdamW, on 4 ranks: time of a step on limited links, and peak memory of a rank.

    python -m benchmarks.micro.adamw_tables time --rows 500000 --width 32 --rate-mbit 200
    python -m benchmarks.micro.adamw_tables memory --table-gib 1

time    The LSTM language model of the lab, whose tables nothing ties. Systems are opened on the same ranks and take
        turns of a few steps; a round is every system once, and a ratio is of two systems of one round. TorchRec's
        optimizers are fused into its tables and lazy, and it lives in an environment of its own (`make bench-peers`):
        `python -m benchmarks.lab` compares with it.
memory  One table and a linear layer. Every system has processes of its own; told is by how much the most memory that a
        rank has held (VmHWM) is above what it held before the model was made.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, SparseAdam

import embrace_fx
from benchmarks.models.base import MoreRows, Workload
from benchmarks.models.language_model import LanguageModelWorkload
from benchmarks.network import Links, network
from benchmarks.peers.base import with_sparse_tables

LR, SEED = 1e-3, 0
WARM_UP, TURN = 4, 4
"""Steps: what a system needs to be at work, and of a turn."""
GIB = 2**30
TIME_SYSTEMS = ("embrace sweep", "embrace replay", "embrace replay, 10x rows", "ddp", "ddp sparse")
MEMORY_SYSTEMS = ("embrace sweep", "embrace replay", "ddp")

GIVEN_BACK = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
"""For glibc: its own thresholds, so that memory that is freed goes back to the kernel."""


@dataclass(frozen=True)
class Job:
    """What a rank is to measure."""

    what: str
    systems: tuple[str, ...]
    rows: int
    width: int
    rounds: int


class OneTable(nn.Module):
    """A table, and what else is reduced."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(rows, width), nn.Linear(width, 1)

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.linear(self.table(ids)).square().mean()
        return loss


def _compiled(model: nn.Module, system: str) -> Any:
    updates: Any = "replay" if "replay" in system else "sweep"
    return embrace_fx.compile(model, strategy={"*table*": "alltoall"}, row_updates=updates)


def _open(system: str, job: Job, rank: int) -> Iterator[None]:
    """Endless steps of a system, its loader read ahead."""
    torch.manual_seed(SEED)
    workload: Workload = _workload(job)
    if "10x" in system:
        workload = MoreRows(workload, 10)
    plain = with_sparse_tables(workload.make(), sparse=system == "ddp sparse")
    if system.startswith("embrace"):
        model = _compiled(plain, system)
        optimizers: list[Any] = [AdamW(model.parameters(), lr=LR)]
    else:
        model = DistributedDataParallel(plain)
        of_tables = list(plain.tables.parameters())
        if system == "ddp sparse":
            rest = [p for p in plain.parameters() if not any(p is table for table in of_tables)]
            optimizers = [SparseAdam(of_tables, lr=LR), AdamW(rest, lr=LR)]
        else:
            optimizers = [AdamW(plain.parameters(), lr=LR)]

    batches = (_workload(job).batch(step, rank, SEED) for step in count())
    for batch in model.lookahead(batches) if system.startswith("embrace") else batches:
        model(*batch).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        yield


def _workload(job: Job) -> LanguageModelWorkload:
    return LanguageModelWorkload(job.rows, job.width, 4 * job.width, 1, batch_size=32, length=20, sampled=512)


def _times(job: Job, rank: int) -> dict[str, list[float]]:
    systems = {name: _open(name, job, rank) for name in job.systems}
    for steps in systems.values():
        for _ in range(WARM_UP):
            next(steps)
    found: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(job.rounds):
        for name, steps in systems.items():
            dist.barrier()
            begun_s = time.perf_counter()
            for _ in range(TURN):
                next(steps)
            dist.barrier()
            found[name].append((time.perf_counter() - begun_s) * 1e3 / TURN)
    return found


def _memory(job: Job, rank: int) -> dict[str, float]:
    (system,) = job.systems
    _train_one_table(system, 64, job.width, rank)  # what a process imports and compiles at its first step
    Path("/proc/self/clear_refs").write_text("5")  # the most it has held is what it holds
    before = _status("VmRSS")
    _train_one_table(system, job.rows, job.width, rank)
    return {"peak_bytes": float(_status("VmHWM") - before)}


def _train_one_table(system: str, rows: int, width: int, rank: int) -> None:
    if system.startswith("embrace"):
        with torch.device("meta"):
            plain = OneTable(rows, width)
        model = _compiled(plain, system)
    else:
        model = DistributedDataParallel(OneTable(rows, width))
    optimizer = AdamW(model.parameters(), lr=LR)
    for step in range(WARM_UP):
        random = torch.Generator().manual_seed(step * 100 + rank)
        model(torch.randint(rows, (256,), generator=random)).backward()
        optimizer.step()
        optimizer.zero_grad()


def _status(key: str) -> int:
    """A line of /proc/self/status, in bytes."""
    line = next(each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith(key))
    return int(line.split()[1]) * 1024


def _rank(job: Job) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = (_times if job.what == "time" else _memory)(job, dist.get_rank())
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps(found))
    dist.destroy_process_group()


def _run(job: Job, links: Links, timeout_s: float) -> tuple[Any, Any]:
    """What rank 0 measured, and what the links reached."""
    with network(links) as hosts:
        command = [sys.executable, "-m", "benchmarks.micro.adamw_tables", "rank", json.dumps(asdict(job))]
        outputs = hosts.run(command, timeout_s=timeout_s, environment=GIVEN_BACK if job.what == "memory" else None)
        line = next(line for line in outputs[0].splitlines() if line.startswith("RESULT "))
        return json.loads(line.removeprefix("RESULT ")), asdict(hosts.reached)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("time", "memory", "rank"))
    parser.add_argument("job", nargs="?")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rate-mbit", type=float, default=200.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--table-gib", type=float, default=1.0, help="of memory")
    parser.add_argument("--timeout-s", type=float, default=1800.0)
    given = parser.parse_args()
    if given.what == "rank":
        _rank(Job(**{**json.loads(given.job), "systems": tuple(json.loads(given.job)["systems"])}))
        return
    links = Links(ranks=given.ranks, rate_mbit=given.rate_mbit)
    if given.what == "time":
        job = Job("time", TIME_SYSTEMS, given.rows, given.width, given.rounds)
        found, reached = _run(job, links, given.timeout_s)
        first = found[TIME_SYSTEMS[1]]
        for name, each in found.items():
            ratio = statistics.median(a / b for a, b in zip(each, first, strict=True))
            print(f"{name:26} {statistics.median(each):10.1f} ms a step, {ratio:6.2f} times replay's")
        print(json.dumps({"job": asdict(job), "links": reached, "ms": found, "load": os.getloadavg()}))
        return
    rows = round(given.table_gib * GIB / 4 / given.width)
    peaks = {}
    for system in MEMORY_SYSTEMS:
        job = Job("memory", (system,), rows, given.width, 1)
        found, _ = _run(job, links, given.timeout_s)
        peaks[system] = found["peak_bytes"]
        tables = peaks[system] / GIB / given.table_gib
        print(f"{system:26} {peaks[system] / GIB:8.3f} GiB above the start, {tables:.2f} tables", flush=True)
    for system in MEMORY_SYSTEMS[:-1]:
        print(f"{system:26} {peaks[system] / peaks['ddp']:8.3f} of DDP's")


if __name__ == "__main__":
    main()
