"""A rank of the benchmark of the exchanges: measures the cells it is told to, one after the other, with all others.

    python -m benchmarks.exchanges.rank JOB         (started by the benchmark, on the host of its rank)

JOB is a file: {"cells": [[round, case, system], ..], "cluster": what a probe of the links gave or null, "kept": file,
"minutes": limit, "divisor": of the tensors}. Rank 0 appends a line of JSON for each cell to `kept` as it is done.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.exchanges.cases import CASES, SYSTEMS, Case, System
from benchmarks.namespaces import interface_sent_bytes
from embrace_fx.cost.links import COLLECTIVES, Cluster, Handling, Link
from embrace_fx.runtime.exchanges.in_place import ExchangeKind, exchange_gradient_
from embrace_fx.runtime.probe.probe import probe_cluster
from embrace_fx.runtime.ranks.communicator import Communicator
from tests.support.counting_channel import CountingChannel

MOST_RUNS = 5
ENOUGH_S = 2.0
"""A cell is run until its runs took so long together, or `MOST_RUNS` times."""


def main() -> None:
    torch.set_num_threads(1)
    job = json.loads(Path(sys.argv[1]).read_text())
    deadline = time.monotonic() + job["minutes"] * 60
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    cluster = cluster_of(job["cluster"]) if job["cluster"] else probe_cluster(Communicator(dist.group.WORLD))
    if not job["cluster"]:
        _keep(Path(job["kept"]), {"cluster": as_data(cluster)})
    bench = Bench(CountingChannel(dist.group.WORLD), cluster)
    cases = {case.name: Case(case.kind, case.density, job["divisor"]) for case in CASES}
    for kind in sorted({cases[name].kind for _, name, _ in job["cells"]}):  # warm up connections, index sets and memory
        warm_up = Case(kind, 0.01, job["divisor"])
        for system in SYSTEMS.values():
            bench.run(warm_up, system, most_runs=1)
    for round_, name, system in job["cells"]:
        if not _agreed(time.monotonic() < deadline):
            break
        began = datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds")
        load = os.getloadavg()[0]
        found = bench.run(cases[name], SYSTEMS[system])
        cell = {"round": round_, "case": name, "system": system, "began": began, "load": load, **found}
        _keep(Path(job["kept"]), cell)
        if dist.get_rank() == 0:
            print(f"{round_ + 1} {name:14} {system:18} {min(found['seconds']) * 1e3:9.1f} ms", file=sys.stderr)
    dist.barrier()
    dist.destroy_process_group()


class Bench:
    """Runs exchanges of gradients in place, as training does."""

    def __init__(self, channel: CountingChannel, cluster: Cluster) -> None:
        self._channel = channel
        self._cluster = cluster
        self._flat = torch.zeros(0)

    def run(self, case: Case, system: System, most_runs: int = MOST_RUNS) -> dict[str, Any]:
        """Runs a case, and returns its measurements: for each run, the seconds of the slowest rank; for each rank,
        bytes and CPU seconds per run.
        """
        if self._flat.numel() != case.num_units * case.width:
            self._flat = torch.zeros(case.num_units * case.width)
        rows = self._flat.view(case.num_units, case.width)
        ids = case.ids(self._channel.rank)
        # Use integers, so that sums are exact in any order.
        random = torch.Generator().manual_seed(self._channel.rank)
        values = torch.randint(1, 9, (ids.numel(), case.width), generator=random).float()
        interface = os.environ["GLOO_SOCKET_IFNAME"]
        seconds: list[float] = []
        figures = []
        while len(seconds) < most_runs and sum(seconds) < ENOUGH_S:
            rows.zero_()
            rows.index_copy_(0, ids, values)
            expected = checksum(rows)
            counted, messages = self._channel.sent_bytes, self._channel.messages
            dist.barrier()
            sent, cpu_s = interface_sent_bytes(interface), time.process_time()
            start = time.perf_counter()
            self._exchange(case.num_units, system)
            own_s = time.perf_counter() - start
            dist.barrier()
            figures.append(
                (
                    interface_sent_bytes(interface) - sent,
                    self._channel.sent_bytes - counted,
                    self._channel.messages - messages,
                    time.process_time() - cpu_s,
                )
            )
            seconds.append(_slowest(own_s))
            dist.all_reduce(expected)
            if not torch.equal(checksum(rows), expected / self._channel.world_size):
                raise RuntimeError(f"{system.name} did not return the mean of all ranks' gradients")
        by_rank: list[Any] = [None] * self._channel.world_size
        dist.all_gather_object(by_rank, torch.tensor(figures, dtype=torch.float64).mean(0).tolist())
        sent_bytes, counted_bytes, start_ups, cpu = zip(*by_rank, strict=True)
        return {
            "seconds": seconds,
            "sent_bytes": sent_bytes,
            "counted_bytes": counted_bytes,
            "messages": start_ups,
            "cpu_s": cpu,
        }

    def _exchange(self, num_units: int, system: System) -> None:
        if system.strategy == "allreduce":
            self._channel.all_reduce_(self._flat)
            self._flat.div_(self._channel.world_size)
        else:
            kind = ExchangeKind(num_units, system.strategy, system.scheme)
            exchange_gradient_(self._flat, kind, self._channel, self._cluster)


def checksum(rows: Tensor) -> Tensor:
    """(2,) float64: sums of all rows, plain and by number; of integers, the ranks' add up to that of their sum."""
    of_rows = rows.sum(1).double()
    return torch.stack([of_rows.sum(), of_rows @ torch.arange(rows.shape[0], dtype=torch.float64)])


def as_data(cluster: Cluster) -> dict[str, Any]:
    links = {name: astuple(link) for name, link in cluster.links}
    link = (cluster.bandwidth_bytes_per_ms, cluster.latency_ms)
    return {"link": link, "links": links, "handling": asdict(cluster.handling)}


def cluster_of(data: dict[str, Any]) -> Cluster:
    """Converts the result of `as_data` back to a cluster."""
    bandwidth_bytes_per_ms, latency_ms = data["link"]
    links = tuple((name, Link(*data["links"][name])) for name in COLLECTIVES if name in data["links"])
    return Cluster(bandwidth_bytes_per_ms, latency_ms, links, handling=Handling(**data["handling"]))


def _agreed(own: bool) -> bool:
    """Returns rank 0's value on every rank."""
    flag = torch.tensor(own)
    dist.broadcast(flag, 0)
    return bool(flag)


def _slowest(seconds: float) -> float:
    value = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.item()


def _keep(file: Path, line: dict[str, Any]) -> None:
    if dist.get_rank() == 0:
        with file.open("a") as opened:
            opened.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
