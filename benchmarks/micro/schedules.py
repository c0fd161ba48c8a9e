"""The four schedules on a bandwidth-limited network, against what the dependences and the wire allow.

    python -m benchmarks.micro.schedules --output benchmarks/results    # as root: network namespaces with a rate limit

One language model of several blocks, two tables and a sampled softmax; four ranks, each a host of its own. In every
rank the same model is compiled once per schedule, and once for a group of one rank: the same step with communication
removed. They take turns (none, horizontal, vertical, 2d, alone, and again); a round's figure is the mean of its steps
in the steady state; results are medians of rounds.

The limit of a step is the largest of
    compute     the step without communication, all ranks computing at once
    wire        what a rank's interface sends in a step under 2d, at the rate of a bare transfer
    dependences the longest cycle of the step's true dependences, were every transfer to find the link idle
All three and the steps are measured; the last one is computed from the profile that the run itself took.

Threads that communicate come before those that compute, in every system alike: on a host of its own a rank's
communication finds a core free, here it would stand in line behind the computation of all ranks.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import embrace_fx
from benchmarks.lab.floors import dependences_ms
from benchmarks.lab.rank import put_communication_first
from benchmarks.network import Links, network
from benchmarks.records import write_record
from embrace_fx.vocabulary.schedule import SCHEDULES

ALONE = "alone"
UNCOUNTED = 3
SYSTEMS = (*SCHEDULES, ALONE)


@dataclass(frozen=True)
class Sizes:
    """The sizes of a rank's workload.

    Attributes:
        rows: the number of rows of each table.
        width: the width of tables and blocks.
        blocks: the number of LSTM layers.
        batch, length: the shape of the ids.
        negatives: the number of words sampled for the softmax.
        skew: the exponent of Zipf's law for the ids: 1 for words, less for items of a shop.
    """

    rows: int = 60_000
    width: int = 192
    blocks: int = 12
    batch: int = 160
    length: int = 20
    negatives: int = 600
    skew: float = 1.0


class LanguageModel(nn.Module):
    """An input table, LSTM blocks with a residual around each, and a sampled softmax over a second table."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.input = nn.Embedding(sizes.rows, sizes.width)
        self.blocks = nn.ModuleList(nn.LSTM(sizes.width, sizes.width, batch_first=True) for _ in range(sizes.blocks))
        self.output = nn.Embedding(sizes.rows, sizes.width)

    def forward(self, ids: Tensor, targets: Tensor, negatives: Tensor) -> Tensor:
        hidden = self.input(ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)[0]
        right = (hidden * self.output(targets)).sum(-1, keepdim=True)
        wrong = hidden @ self.output(negatives).t()
        scores = torch.cat([right, wrong], dim=-1).flatten(0, 1)
        return nn.functional.cross_entropy(scores, scores.new_zeros(scores.shape[0], dtype=torch.int64))


def batches(sizes: Sizes, rank: int, first: int, count: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Returns batches with Zipf-distributed ids, which depend only on rank and step."""
    ranks_of_words = torch.arange(1, sizes.rows + 1, dtype=torch.float64)
    probabilities = ranks_of_words**-sizes.skew
    found = []
    for step in range(first, first + count):
        random = torch.Generator().manual_seed(step * 1000 + rank)
        words = torch.multinomial(probabilities, sizes.batch * (sizes.length + 1), True, generator=random)
        ids = words.view(sizes.batch, sizes.length + 1)
        negatives = torch.randint(sizes.rows, (sizes.negatives,), generator=random)
        found.append((ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), negatives))
    return found


class System:
    """One compiled model and its training loop."""

    def __init__(self, name: str, sizes: Sizes, rank: int, group: dist.ProcessGroup | None) -> None:
        torch.manual_seed(0)
        model = LanguageModel(sizes)
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
        schedule: Any = name if name in SCHEDULES else "none"
        self.model = embrace_fx.compile(
            model, optimizer=optimizer, schedule=schedule, strategy="alltoall", process_group=group
        )
        self._sizes, self._rank, self._done = sizes, rank, 0

    def train(self, steps: int) -> float:
        """Trains this many steps and three more. Returns the mean milliseconds of a step, from one forward's start to
        the next.

        The first two steps and the last one are not counted: no rows were sent early for the first, and no batch
        follows the last, so they are not in the steady state.
        """
        read = batches(self._sizes, self._rank, self._done, steps + UNCOUNTED)
        starts = []
        put_communication_first(os.getpid())
        dist.barrier()
        for batch in self.model.lookahead(read):
            starts.append(time.perf_counter())
            self.model(*batch).backward()
            self.model.optimizer.step()
            self.model.optimizer.zero_grad()
        self.model.synchronize()
        dist.barrier()
        self._done += len(read)
        return (starts[-1] - starts[UNCOUNTED - 1]) * 1e3 / steps


def run_rank(options: argparse.Namespace) -> None:
    """What every rank runs; rank 0 prints its results as JSON."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    own_group = [dist.new_group([each]) for each in range(world_size)][rank]
    sizes = Sizes(**json.loads(options.sizes))
    systems = {name: System(name, sizes, rank, own_group if name == ALONE else None) for name in SYSTEMS}
    for system in systems.values():
        system.train(options.warm_up)
    results: dict[str, Any] = {"step_ms": {name: [] for name in SYSTEMS}, "sent_bytes": {name: [] for name in SYSTEMS}}
    for _ in range(options.rounds):
        for name, system in systems.items():
            before = own_sent_bytes()
            results["step_ms"][name].append(system.train(options.steps))
            results["sent_bytes"][name].append((own_sent_bytes() - before) / (options.steps + UNCOUNTED))
    results["predicted_ms"], results["dependences_ms"], results["measured"] = {}, {}, {}
    for name in SCHEDULES:
        model = systems[name].model
        schedule = model.schedule
        results["predicted_ms"][name] = schedule.diagnostics().step_ms
        results["dependences_ms"][name] = dependences_ms(schedule.steps)
        with model.record():
            systems[name].train(options.recorded)
        results["measured"][name] = asdict(model.timeline.diagnostics())
        if rank == 0 and options.pictures:
            model.timeline.save(options.pictures / f"{name}.svg")
    if rank == 0:
        print(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def own_sent_bytes() -> int:
    """Returns the bytes that this rank's network interface has sent."""
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == interface:
            return int(figures.split()[8])
    raise RuntimeError(f"/proc/net/dev has no interface {interface}")


def summarise(results: dict[str, Any], bare_mbit: float) -> dict[str, Any]:
    """Returns medians, the lower bound, and each schedule relative to the bound."""
    step = {name: statistics.median(values) for name, values in results["step_ms"].items()}
    wire_bytes = statistics.median(results["sent_bytes"]["2d"])
    floors = {
        "compute_ms": step[ALONE],
        "wire_ms": wire_bytes * 8 / (bare_mbit * 1e3),
        "dependences_ms": results["dependences_ms"]["2d"],
    }
    limit = max(floors.values())
    rows = {}
    for name in SCHEDULES:
        exposed = [s - a for s, a in zip(results["step_ms"][name], results["step_ms"][ALONE], strict=True)]
        rows[name] = {
            "step_ms": step[name],
            "to_none": statistics.median(
                s / n for s, n in zip(results["step_ms"][name], results["step_ms"]["none"], strict=True)
            ),
            "exposed_ms": statistics.median(exposed),
            "waits_ms": sum(results["measured"][name]["exposed_ms"].values()),
            "to_limit": step[name] / limit,
            "predicted_ms": results["predicted_ms"][name],
            "predicted_to_measured": results["predicted_ms"][name] / step[name],
            "sent_bytes": statistics.median(results["sent_bytes"][name]),
        }
    return {"floors": floors, "limit_ms": limit, "schedules": rows}


def report(summary: dict[str, Any], configuration: dict[str, Any]) -> str:
    lines = [
        f"# The four schedules, {configuration['date']}",
        "",
        f"Measured: `{configuration['command']}`, {configuration['ranks']} ranks at {configuration['rate_mbit']} Mb/s "
        f"({'network namespaces' if configuration['shaped'] else 'loopback, no limit'}), "
        f"torch {configuration['torch']}, Python {configuration['python']}, {configuration['cores']} cores; threads "
        "that communicate come before those that compute.",
        "",
        "| schedule | ms per step | to none | waits ms | to none | step less compute ms | to the limit | predicted ms "
        "| predicted / measured | MB sent |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {name} | {row['step_ms']:.0f} | {row['to_none']:.3f} | {row['waits_ms']:.0f} | "
        f"{row['waits_ms'] / summary['schedules']['none']['waits_ms']:.2f} | {row['exposed_ms']:.0f} | "
        f"{row['to_limit']:.3f} | {row['predicted_ms']:.0f} | {row['predicted_to_measured']:.2f} | "
        f"{row['sent_bytes'] / 1e6:.2f} |"
        for name, row in summary["schedules"].items()
    ]
    floors = summary["floors"]
    lines += [
        "",
        f"Limit {summary['limit_ms']:.0f} ms, the largest of: compute alone {floors['compute_ms']:.0f} ms, the wire "
        f"{floors['wire_ms']:.0f} ms, the dependences {floors['dependences_ms']:.0f} ms (computed from the profile). "
        "Waits: what the calling thread stood still for communication, from the timeline of a few steps more. Step "
        "less compute: less the same step without communication, in the same round; it also counts what communication "
        "takes of the cores that compute shares with it.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rate-mbit", type=float, default=130.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="counted steps of a round")
    parser.add_argument("--warm-up", type=int, default=11, help="steps before, in which the profile is taken")
    parser.add_argument("--recorded", type=int, default=3, help="steps of the timelines")
    parser.add_argument("--sizes", default="{}", help="JSON of the fields of Sizes that differ")
    parser.add_argument("--output", type=Path, help="a folder for JSON and table")
    parser.add_argument("--pictures", type=Path, help="a folder for the timelines")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        run_rank(options)
        return
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    command = [sys.executable, "-m", "benchmarks.micro.schedules", "--rank", "--sizes", options.sizes]
    for name in ("rounds", "steps", "warm_up", "recorded"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    if options.pictures:
        options.pictures.mkdir(parents=True, exist_ok=True)
        command += ["--pictures", str(options.pictures.resolve())]
    with network(Links(options.ranks, options.rate_mbit)) as hosts:
        (printed, *_) = hosts.run(command, timeout_s=1800, environment={"OMP_NUM_THREADS": "1"})
        reached = hosts.reached
    results = json.loads(printed.strip().splitlines()[-1])
    configuration = {
        "command": " ".join(["python -m benchmarks.micro.schedules", *sys.argv[1:]]),
        "ranks": options.ranks,
        "rate_mbit": options.rate_mbit,
        "shaped": reached.shaped,
        "reason": reached.reason,
        "bare_transfer_mbit": statistics.mean(reached.transfer_mbit),
        "sizes": asdict(Sizes(**json.loads(options.sizes))),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "date": today,
    }
    summary = summarise(results, configuration["bare_transfer_mbit"])
    print(report(summary, configuration))
    if options.output:
        data = {"configuration": configuration, "summary": summary, "rounds": results}
        write_record(options.output / f"schedules-{today}", data)
        (options.output / f"schedules-{today}.md").write_text(report(summary, configuration))


if __name__ == "__main__":
    main()
