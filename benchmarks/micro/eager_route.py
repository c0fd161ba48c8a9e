"""What the eager route costs next to DDP, dense and with sparse gradients: step time and bytes sent, in turns.

    python -m benchmarks.micro.eager_route --rounds 21 --output benchmarks/results/eager-route-DATE.md

Two models, written for the eager route: the lab's language model, whose tables are read by lookups alone, and a graph
recommender, whose tables are spread over a graph by a sparse matrix. All systems train in the same processes, each in
its turn; a turn's ratio is told by medians, so that what else the machine does falls on all of them. Ranks are hosts of
their own, where this runs as root.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import embrace_fx
from benchmarks.models import MODELS
from benchmarks.namespaces import interface_sent_bytes
from benchmarks.network import Links, network

USERS, ITEMS, WIDTH, EDGES, BATCH = 8_000, 12_000, 64, 60_000, 512
WARM_UP, STEPS, BATCHES = 14, 8, 24
SYSTEMS = ("eager", "ddp_sparse", "ddp_dense")

Batch = tuple[Tensor, ...]


class GraphRecommender(nn.Module):
    """Recommends items to users: propagates the rows of both tables over the graph of likes, and returns a loss over
    pairs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleDict({"user": nn.Embedding(USERS, WIDTH), "item": nn.Embedding(ITEMS, WIDTH)})
        self.mix = nn.Linear(WIDTH, WIDTH)
        random, size = torch.Generator().manual_seed(5), USERS + ITEMS
        user = torch.randint(USERS, (EDGES,), generator=random)
        item = torch.randint(ITEMS, (EDGES,), generator=random) + USERS
        at = torch.stack([torch.cat([user, item]), torch.cat([item, user])])
        self.graph = torch.sparse_coo_tensor(at, torch.full((2 * EDGES,), 0.1), (size, size)).coalesce()

    def forward(self, user: Tensor, liked: Tensor, other: Tensor) -> Tensor:
        rows = torch.cat([table.weight for table in self.tables.values()])  # type: ignore[misc]
        spread = torch.tanh(self.mix(torch.sparse.mm(self.graph, rows)))
        of_users, of_items = spread.split([USERS, ITEMS])
        return F.softplus((of_users[user] * (of_items[other] - of_items[liked])).sum(1)).mean()


def clicks(step: int, rank: int) -> Batch:
    random = torch.Generator().manual_seed(1000 * step + rank)
    return tuple(torch.randint(high, (BATCH,), generator=random) for high in (USERS, ITEMS, ITEMS))


LM = MODELS["lm"]["lab"]
WORKLOADS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], Batch]]] = {
    "language model": (LM.make, lambda step, rank: LM.batch(step, rank, 0)),
    "graph recommender": (GraphRecommender, clicks),
}


def made(workload: str, system: str) -> nn.Module:
    """The model under a system; the graph spreads gradients over whole tables, which are sparse under no system."""
    torch.manual_seed(0)
    model = WORKLOADS[workload][0]()
    for module in model.modules():
        if isinstance(module, nn.Embedding) and system != "ddp_dense" and workload == "language model":
            module.sparse = True
    if system == "eager":
        return embrace_fx.compile(model, route="eager")
    return DistributedDataParallel(model, gradient_as_bucket_view=system == "ddp_dense")


def training(workload: str, system: str, rank: int) -> Iterator[float]:
    """Trains endlessly, and yields the loss of each step."""
    model = made(workload, system)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01, eps=1e-6)
    batches = [WORKLOADS[workload][1](step, rank) for step in range(BATCHES)]
    for batch in itertools.cycle(batches):
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def turns(workload: str, rank: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Returns (milliseconds, KiB sent) of a step, by system and round. Asserts that all systems compute the same
    losses.
    """
    names = [each for each in SYSTEMS if each != "ddp_sparse" or workload == "language model"]
    steps, interface = {name: training(workload, name, rank) for name in names}, os.environ["GLOO_SOCKET_IFNAME"]
    losses: dict[str, list[float]] = {name: [] for name in names}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for number in range(rounds + 1):
        for name in names if number % 2 else reversed(names):
            count, took_ms = STEPS if number else WARM_UP, []
            dist.barrier()
            sent = interface_sent_bytes(interface)
            for _ in range(count):
                began_s = time.perf_counter()
                losses[name].append(next(steps[name]))
                took_ms.append((time.perf_counter() - began_s) * 1e3)
            dist.barrier()
            if number:
                sent_kib = (interface_sent_bytes(interface) - sent) / count / 1024
                found[name].append((statistics.median(took_ms), sent_kib))
    for name in names:
        # Compare only the first steps, because rounding errors grow.
        torch.testing.assert_close(losses[name][:WARM_UP], losses["ddp_dense"][:WARM_UP], rtol=1e-3, atol=1e-3)
    return found


def rank_main(rounds: int, only: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    found = {each: turns(each, dist.get_rank(), rounds) for each in WORKLOADS if only in each}
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # threads of deleted models would keep the process alive


def table(found: dict[str, dict[str, list[tuple[float, float]]]]) -> str:
    lines = ["| model | system | ms a step | KiB a step and rank | eager / system, each round's | |", "|-|-|-|-|-|-|"]
    for workload, systems in found.items():
        own = [ms for ms, _ in systems["eager"]]
        for name, measured in systems.items():
            ratios = sorted(mine / theirs for mine, (theirs, _) in zip(own, measured, strict=True))
            ms, kib = (statistics.median(column) for column in zip(*measured, strict=True))
            spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
            lines.append(
                f"| {workload} | {name} | {ms:.1f} | {kib:,.0f} | {statistics.median(ratios):.2f} | {spread} |"
            )
    return "\n".join(lines)


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--ranks", type=int, default=2)
    ask.add_argument("--rate-mbit", type=float, default=1000.0)
    ask.add_argument("--rounds", type=int, default=9)
    ask.add_argument("--only", default="", help="a part of the name of the model to train; both by default")
    ask.add_argument("--output", type=Path, help="the page that is written")
    ask.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    asked = ask.parse_args()
    if asked.rank:
        rank_main(asked.rounds, asked.only)
        return
    with network(Links(ranks=asked.ranks, rate_mbit=asked.rate_mbit)) as hosts:
        options = ["--rank", "--rounds", str(asked.rounds), "--only", asked.only]
        command = [sys.executable, "-m", "benchmarks.micro.eager_route", *options]
        outputs = hosts.run(command, timeout_s=1800, environment={"OMP_NUM_THREADS": "1"})
    command_line = f"python -m benchmarks.micro.eager_route --ranks {asked.ranks} --rounds {asked.rounds}"
    limit = f"{asked.rate_mbit:g} Mb/s" if hosts.reached.shaped else f"no limit: {hosts.reached.reason}"
    about = f"`{command_line}`, {limit}, torch {torch.__version__}, load {os.getloadavg()[0]:.1f} at the end."
    page = f"# The eager route\n\n{about}\n\n{table(json.loads(outputs[0]))}\n"
    sys.stdout.write(page)
    if asked.output is not None:
        asked.output.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
