"""Large tables under AdamW, on 4 ranks: time of a step on limited links, and peak memory of a rank.

    python -m benchmarks.micro.adamw_tables time --rows 500000 --width 32 --rate-mbit 200
    python -m benchmarks.micro.adamw_tables memory --table-gib 1 --ddp-ranks 2

time    The LSTM language model of the lab, whose tables nothing ties. Every system has processes of its own, which are
        warmed up and then measured, by the clock and by what rank 0's process takes of a processor. A round is every
        system once; a ratio is of two systems of one round. TorchRec's optimizers are fused into the backward and lazy:
        rows without gradient stand still. On a CPU its Adam does not exist, and Adagrad, which reads and writes one
        average less, stands in for it. Its packages come from the environment that `make bench-peers` makes, on the
        project's torch; without it, TorchRec is left out.
memory  One table and a linear layer. Every system has processes of its own; told is by how much the most memory that a
        rank has held (VmHWM) is above what it held before the model was made. What a rank of DDP holds does not depend
        on the number of ranks: fewer of them can have a larger table.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer, SparseAdam

import embrace_fx
from benchmarks.models.base import Batch, MoreRows, Workload
from benchmarks.models.language_model import LanguageModelWorkload
from benchmarks.network import Links, network
from benchmarks.peers import SYSTEMS
from benchmarks.peers.base import Task, with_sparse_tables

LR, SEED = 1e-3, 0
GIB = 2**30
STATUS = Path("/proc/self/status")
PEER = Path(__file__).parents[2] / "build" / "peers" / "torchrec"


@dataclass(frozen=True)
class Steps:
    """How many steps a system takes before it is measured, and then, in a few spells of so many each."""

    warm_up: int
    measured: int
    spells: int = 3

    @property
    def total(self) -> int:
        return self.warm_up + self.spells * self.measured


SETTLED = SYSTEMS["embrace_auto"].warm_up_steps
"""Steps after which "auto" has tried its schedules."""
TIME_SYSTEMS = {
    "embrace replay": Steps(SETTLED, 8),
    "embrace replay, 10x rows": Steps(SETTLED, 8),
    "embrace sweep": Steps(SETTLED, 4),
    "ddp": Steps(1, 1, 1),
    "ddp sparse": Steps(4, 8),
    "torchrec column": Steps(4, 8),
    "torchrec planner": Steps(4, 8),
}
MEMORY_SYSTEMS = ("embrace sweep", "embrace replay", "ddp")
MEMORY_STEPS = 4
HELD_BY_DDP = 7
"""Tables: itself, its gradient, the bucket, two averages, and two that AdamW makes on the way."""

GIVEN_BACK = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}
"""For glibc: its own thresholds, so that memory that is freed goes back to the kernel."""


@dataclass(frozen=True)
class Job:
    """What a rank is to measure."""

    what: str
    system: str
    rows: int
    width: int
    rate_mbit: float


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


def _open(job: Job, rank: int) -> Iterator[Any]:
    """The steps of a system, its loader read ahead; batches are made before them."""
    torch.manual_seed(SEED)
    system = job.system
    batches = [_workload(job).batch(step, rank, SEED) for step in range(TIME_SYSTEMS[system].total + 2)]
    if system.startswith("torchrec"):
        return _torchrec(job, batches)
    workload: Workload = MoreRows(_workload(job), 10) if "10x" in system else _workload(job)
    plain = with_sparse_tables(workload.make(), sparse=system == "ddp sparse")
    if system.startswith("embrace"):
        model = _compiled(plain, system)
        return _steps(model, [AdamW(model.parameters(), lr=LR)], model.lookahead(batches))
    of_tables = list(plain.tables.parameters())
    rest = [p for p in plain.parameters() if not any(p is table for table in of_tables)]
    if system == "ddp sparse":
        optimizers: list[Optimizer] = [SparseAdam(of_tables, lr=LR), AdamW(rest, lr=LR)]
    else:
        optimizers = [AdamW(plain.parameters(), lr=LR)]
    return _steps(DistributedDataParallel(plain), optimizers, batches)


def _steps(model: Any, optimizers: Sequence[Optimizer], batches: Iterable[Batch]) -> Iterator[None]:
    for batch in batches:
        model(*batch).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        yield


def _torchrec(job: Job, batches: Iterable[Batch]) -> Iterator[Any]:
    task = Task(_workload(job), "adagrad", LR, SEED, job.rate_mbit)
    return SYSTEMS[job.system.replace(" ", "_")].peer().prepare(task).steps(batches)


def _workload(job: Job) -> LanguageModelWorkload:
    return LanguageModelWorkload(job.rows, job.width, 4 * job.width, 1, batch_size=32, length=20, sampled=512)


def _times(job: Job, rank: int) -> dict[str, float]:
    counts, steps = TIME_SYSTEMS[job.system], _open(job, rank)
    for _ in range(counts.warm_up):
        next(steps)
    found, busy = [], []
    for _ in range(counts.spells):
        dist.barrier()
        begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
        for _ in range(counts.measured):
            next(steps)
        busy.append((time.process_time() - begun_cpu_s) * 1e3 / counts.measured)
        dist.barrier()
        found.append((time.perf_counter() - begun_s) * 1e3 / counts.measured)
    return {"ms": statistics.median(found), "cpu_ms": statistics.median(busy)}


def _memory(job: Job, rank: int) -> dict[str, float]:
    _train_one_table(job.system, 64, job.width, rank)  # what a process imports and compiles at its first step
    Path("/proc/self/clear_refs").write_text("5")  # the most it has held is what it holds
    before = _line_of(STATUS, "VmRSS")
    _train_one_table(job.system, job.rows, job.width, rank)
    return {"peak_bytes": float(_line_of(STATUS, "VmHWM") - before)}


def _train_one_table(system: str, rows: int, width: int, rank: int) -> None:
    if system.startswith("embrace"):
        with torch.device("meta"):
            plain = OneTable(rows, width)
        model = _compiled(plain, system)
    else:
        model = DistributedDataParallel(OneTable(rows, width))
    optimizer = AdamW(model.parameters(), lr=LR)
    for step in range(MEMORY_STEPS):
        random = torch.Generator().manual_seed(step * 100 + rank)
        model(torch.randint(rows, (256,), generator=random)).backward()
        optimizer.step()
        optimizer.zero_grad()


def _line_of(file: Path, key: str) -> int:
    """A line of /proc/self/status or /proc/meminfo, in bytes."""
    line = next(each for each in file.read_text().splitlines() if each.startswith(key))
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
    environment = dict(GIVEN_BACK) if job.what == "memory" else {}
    with network(links) as hosts:
        command = [sys.executable, "-m", "benchmarks.micro.adamw_tables", "rank", json.dumps(asdict(job))]
        outputs = hosts.run(command, timeout_s=timeout_s, environment=environment)
        line = next(line for line in outputs[0].splitlines() if line.startswith("RESULT "))
        return json.loads(line.removeprefix("RESULT ")), asdict(hosts.reached)


def _compare_times(given: argparse.Namespace) -> None:
    systems = given.systems or list(TIME_SYSTEMS)
    if not (PEER / ".ready").exists():
        print("Without TorchRec: run `make bench-peers`.")
        systems = [name for name in systems if not name.startswith("torchrec")]
    found: dict[str, list[float]] = {name: [] for name in systems}
    busy: dict[str, list[float]] = {name: [] for name in systems}
    reached = None
    for _ in range(given.rounds):
        for name in systems:
            job = Job("time", name, given.rows, given.width, given.rate_mbit)
            measured, reached = _run(job, Links(given.ranks, given.rate_mbit), given.timeout_s)
            found[name].append(measured["ms"])
            busy[name].append(measured["cpu_ms"])
            print(f"{name:26} {measured['ms']:10.1f} ms a step, {measured['cpu_ms']:.1f} of a processor", flush=True)
    for name, each in found.items():
        ratios = [a / b for a, b in zip(each, found[systems[0]], strict=True)]
        told = f"{statistics.median(ratios):6.3f} times {systems[0]}'s ({min(ratios):.3f} to {max(ratios):.3f})"
        of_processor = f"{statistics.median(busy[name]):.1f} of a processor on rank 0"
        print(f"{name:26} {statistics.median(each):10.1f} ms a step ({of_processor}), {told}")
    setting = {"rows": given.rows, "width": given.width, "rounds": given.rounds}
    print(json.dumps({"setting": setting, "links": reached, "ms": found, "cpu_ms": busy, "load": os.getloadavg()}))


def _compare_memory(given: argparse.Namespace) -> None:
    rows = round(given.table_gib * GIB / 4 / given.width)
    peaks = {}
    for system in MEMORY_SYSTEMS:
        ranks = given.ddp_ranks if system == "ddp" else given.ranks
        needed = given.table_gib * (HELD_BY_DDP * ranks if system == "ddp" else 2 * HELD_BY_DDP) * GIB
        free = _line_of(Path("/proc/meminfo"), "MemAvailable")
        if needed > free:
            print(f"{system:26} left out: {needed / GIB:.1f} GiB needed, {free / GIB:.1f} free")
            continue
        job = Job("memory", system, rows, given.width, given.rate_mbit)
        found, _ = _run(job, Links(ranks, given.rate_mbit), given.timeout_s)
        peaks[system] = found["peak_bytes"]
        tables = peaks[system] / GIB / given.table_gib
        print(f"{system:26} {peaks[system] / GIB:8.3f} GiB on each of {ranks} ranks, {tables:.2f} tables", flush=True)
    for system in MEMORY_SYSTEMS[:-1]:
        if "ddp" in peaks and system in peaks:
            print(f"{system:26} {peaks[system] / peaks['ddp']:8.3f} of DDP's")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("time", "memory", "rank"))
    parser.add_argument("job", nargs="?")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--ddp-ranks", type=int, default=4, help="of DDP, where memory is compared")
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rate-mbit", type=float, default=200.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--systems", nargs="*", choices=tuple(TIME_SYSTEMS), help="of time; all by default")
    parser.add_argument("--table-gib", type=float, default=1.0, help="of memory")
    parser.add_argument("--timeout-s", type=float, default=1800.0)
    given = parser.parse_args()
    if given.what == "rank":
        sys.path.extend(map(str, PEER.glob("lib/*/site-packages")))
        _rank(Job(**json.loads(given.job)))
    elif given.what == "time":
        _compare_times(given)
    else:
        _compare_memory(given)


if __name__ == "__main__":
    main()
