"""Tables of which memory holds a working set, on ranks of this machine.

    python -m benchmarks.micro.tables_beyond_memory time --model lm --memory 0.1
    python -m benchmarks.micro.tables_beyond_memory large --rows 40000000 --columns 256 --memory 2.6e8

time    Step time of systems in turns, each in processes of its own; rounds begin with another system each. Its ratio to
        the same table in memory is the median over rounds of medians over steps; so is that of the processor's time of
        a step, which says more where others use the machine. What was read and written counts from the end of the
        warm-up, by which working sets are full.
count   Calls of Python functions in a step, by room of the code, on all threads.
large   A table on the meta device that no memory holds, beside one of FEW rows, of which steps read about as many: step
        time, and how much more memory a rank's process holds (RssAnon of /proc/self/status: without page cache), which
        is to be within `--memory` bytes, and how much more is in use, as malloc says: what it keeps besides differs
        by 30 MiB and more from run to run. What the working set of the few rows takes is not taken off.

Models: the lab's "lm" and "recommender" with `--rows` rows of a table; "plain", a table and layers under Zipf's law.
Systems
    memory      the tables in memory
    tier        `table_memory`, of tables of at least half of `--rows`
    mapped      DistributedDataParallel with tables and their state in files that are mapped into memory; not of adamw
    ddp_sparse, torchrec_column, ...    those of the lab, in memory
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.micro.host_time.counters import Calls, per_step, threads_now
from benchmarks.models import MODELS
from benchmarks.models.base import Batch, Lookups, TableModel, Workload
from benchmarks.models.language_model import LanguageModelWorkload
from benchmarks.models.recommender import CRITEO_ROWS, RecommenderWorkload
from benchmarks.models.text import generator
from benchmarks.peers import SYSTEMS, System
from benchmarks.peers.base import Task, Training
from embrace_fx.runtime.memory.resident import bytes_in_use
from embrace_fx.runtime.tiers.working_set import WorkingSet

STATUS = Path("/proc/self/status")
ROOT = Path(__file__).parents[2]
OWN = ("memory", "tier", "mapped")
FEW = 6000


class Plain(TableModel):
    """A table, and layers that compute for a while."""

    def __init__(self, sizes: PlainWorkload) -> None:
        super().__init__()
        width, device = sizes.width, "meta" if sizes.meta else None
        self.tables = nn.ModuleDict({"table": nn.Embedding(sizes.rows, sizes.columns, device=device)})
        self.layers = nn.Sequential(nn.Linear(sizes.columns, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.out = nn.Linear(width, 1)

    def lookups(self, *batch: Tensor) -> Lookups:
        return {"table": ("table", batch[0])}

    def loss(self, rows: Mapping[str, Tensor], *batch: Tensor) -> Tensor:
        found: Tensor = self.out(self.layers(rows["table"])).square().mean()
        return found


@dataclass(frozen=True)
class PlainWorkload:
    """Sizes; `meta`: the table begins on the meta device; `even`: ids are of all rows alike."""

    rows: int
    columns: int
    width: int
    batch_size: int
    length: int
    meta: bool
    even: bool = False

    def make(self) -> Plain:
        return Plain(self)

    def batch(self, step: int, rank: int, seed: int) -> Batch:
        """Ids, the k-th most frequent of them about 1 / k as often as the first, spread over the table."""
        drawn = torch.rand(self.batch_size, self.length, generator=generator(step, rank, seed), dtype=torch.float64)
        if self.even:
            return ((drawn * self.rows).long(),)
        return ((self.rows**drawn - 1).long() * 7_368_787 % self.rows,)


def workload(args: argparse.Namespace) -> Workload:
    """The model and its batches."""
    found = MODELS[args.model]["lab"] if args.model in MODELS else None
    if isinstance(found, LanguageModelWorkload):
        return replace(found, vocabulary=args.rows)
    if isinstance(found, RecommenderWorkload):
        return replace(found, rows=tuple(min(rows, args.rows) for rows in CRITEO_ROWS))
    is_large = args.what == "large"
    sizes = args.rows, args.columns, args.width, args.batch, args.length
    return PlainWorkload(*sizes, meta=is_large, even=is_large and args.rows == FEW)


def system_of(args: argparse.Namespace) -> System:
    """The system that trains."""
    if args.system not in OWN:
        return SYSTEMS[args.system]
    adamw = {"adamw": args.optimizer == "adamw"}
    beyond = {"memory": args.memory, "rows": args.rows // 2 if args.memory < 1 else 0, "ahead": args.ahead}
    options = {"memory": {"memory": None, **adamw}, "tier": {**beyond, **adamw}, "mapped": {}}[args.system]
    kind = "Mapped" if args.system == "mapped" else "Tiered"
    return System(f"tiered.{kind}", "project", "", {"directory": args.directory, **options})


# -- a rank ------------------------------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Trains on one rank; returns its figures."""
    torch.set_num_threads(1)
    calls = Calls()
    if args.what == "count":
        calls.install()
    dist.init_process_group("gloo", init_method=f"file://{args.store}", rank=args.rank, world_size=args.ranks)
    task = Task(workload(args), args.optimizer, args.lr)
    batches = [task.workload.batch(step, args.rank, 0) for step in range(args.warm_up + args.steps)]
    before, most, in_use = anonymous_mib(), 0.0, 0.0
    training = system_of(args).peer().prepare(task)
    times, losses, counted, cpu_s, threads = [], [], {}, 0.0, threads_now()
    begun_s = time.perf_counter()
    for step, loss in enumerate(training.steps(batches)):
        losses.append(loss)
        times.append((time.perf_counter() - begun_s) * 1e3)
        most, in_use = max(most, anonymous_mib()), max(in_use, bytes_in_use(torch.device("cpu")) / 2**20)
        if step == args.warm_up - 1:
            counted, cpu_s, threads = counts(training), time.process_time(), threads_now()
            calls.on = args.what == "count"
        begun_s = time.perf_counter()
    calls.remove()
    told: dict[str, Any] = {"ms": statistics.median(times[args.warm_up :]), "loss": float(losses[-1])}
    told["mean ms"] = statistics.mean(times[args.warm_up :])
    told["ms of processor"] = (time.process_time() - cpu_s) * 1e3 / args.steps
    told |= {f"{name} a step": (n - counted[name]) / args.steps for name, n in counts(training).items()}
    took = per_step(threads, threads_now(), args.steps)
    told["threads: ms, waits"] = {name: (round(one.cpu_ms, 2), one.waits) for name, one in took.items()}
    told["calls of Python"] = {room: round(count / args.steps) for room, count in calls.by_room.most_common()}
    told |= {"anonymous_mib": most - before, "in_use_mib": in_use}
    told |= {"sets_mib": sum(each.nbytes for each in working_sets(training)) / 2**20}
    told["tables"] = [line.strip() for line in training.notes().splitlines() if "rows in memory" in line]
    told["schedule"] = training.compiled and training.compiled.plan.schedule_name
    dist.barrier()
    dist.destroy_process_group()
    return told


def counts(training: Training) -> dict[str, int]:
    """What working sets have done."""
    found = [memory.counts for memory in working_sets(training)]
    return {name: sum(getattr(each, name) for each in found) for name in ("asked", "missed", "read", "written")}


def working_sets(training: Training) -> list[WorkingSet]:
    """Those of a model; a stack has one."""
    tables = {} if training.compiled is None else training.compiled._session.state.tables
    return [*{id(table.memory): table.memory for table in tables.values() if hasattr(table, "memory")}.values()]


def anonymous_mib() -> float:
    """Memory of this process that no file stands behind."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1024


# -- all of them -------------------------------------------------------------------------------------------------------


def on_ranks(args: argparse.Namespace, system: str) -> list[dict[str, Any]]:
    """Figures of a run, by rank."""
    environment = SYSTEMS[system].environment if system not in OWN else "project"
    python = sys.executable if environment == "project" else str(ROOT / f"build/peers/{environment}/bin/python")
    with tempfile.TemporaryDirectory() as folder:
        told = {**vars(args), "system": system, "store": f"{folder}/store"}
        command = [python, "-m", "benchmarks.micro.tables_beyond_memory", "rank"]
        ranks = []
        for rank in range(args.ranks):
            with Path(folder, f"errors-{rank}").open("w") as errors:
                own = [*command, json.dumps({**told, "rank": rank})]
                ranks.append(subprocess.Popen(own, stdout=subprocess.PIPE, stderr=errors, text=True))
        outputs = [process.communicate(timeout=1800)[0] for process in ranks]
        for number, process in enumerate(ranks):
            if process.returncode:
                raise RuntimeError(f"rank {number} of {system}: {Path(folder, f'errors-{number}').read_text()[-2000:]}")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def main() -> None:
    if sys.argv[1] == "rank":
        os.environ["OMP_NUM_THREADS"] = "1"
        print(json.dumps(run(argparse.Namespace(**json.loads(sys.argv[2])))))
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("time", "count", "large"))
    parser.add_argument("--model", choices=("lm", "recommender", "plain"), default="plain")
    parser.add_argument("--systems", nargs="+", default=["memory", "tier"])
    parser.add_argument("--optimizer", choices=("adamw", "adagrad", "sgd"), default="adamw")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--columns", type=int, default=64)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--memory", type=float, default=0.1)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--ahead", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--warm-up", type=int, default=40)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", default=tempfile.gettempdir())
    args = parser.parse_args()
    if args.what == "large":
        few = argparse.Namespace(**{**vars(args), "rows": FEW})
        for rank, (told, beside) in enumerate(zip(on_ranks(args, "tier"), on_ranks(few, "tier"), strict=True)):
            grown, of_few = told["anonymous_mib"], beside["anonymous_mib"] - beside["sets_mib"]
            in_use = told["in_use_mib"] - beside["in_use_mib"] + beside["sets_mib"]
            print(f"rank {rank}: {told}\n    with {FEW} rows {beside}")
            print(
                f"rank {rank}: {grown:.0f} MiB at most, {of_few:.0f} with {FEW} rows: {grown - of_few:.0f} more, "
                f"{in_use:.0f} more in use, of {args.memory / 2**20:.0f}"
            )
        return
    if args.what == "count":
        for system in args.systems:
            told = on_ranks(args, system)[0]["calls of Python"]
            print(f"{system}: {sum(told.values()):,} calls of Python a step, {told}")
        return
    found: dict[str, list[dict[str, Any]]] = {system: [] for system in args.systems}
    for number in range(args.rounds):
        first = number % len(args.systems)
        for system in (*args.systems[first:], *args.systems[:first]):
            told = on_ranks(args, system)[0]
            found[system].append(told)
            print(f"round {number}, {system}: {told}", flush=True)
    for system, what in itertools.product(args.systems, ("ms", "mean ms", "ms of processor")):
        of_system, of_first = ([each[what] for each in found[name]] for name in (system, args.systems[0]))
        ratios = [round(own / base, 3) for own, base in zip(of_system, of_first, strict=True)]
        middle = statistics.median(ratios)
        print(f"{system}: {statistics.median(of_system):.1f} {what}, {middle:.3f} of {args.systems[0]} {ratios}")


if __name__ == "__main__":
    main()
