"""Measures what collectives reach between the ranks: a `Cluster` from the process groups that training uses.

Contract
    Collective, outside of a step: all ranks call it, and all get rank 0's answer. Each collective is timed in a few
    sizes, each several times the last, for as long as its share of a second lasts, and until one takes clearly longer
    than the first: before, a difference is noise. A size's time is that of one of several runs in a row, on the slowest
    rank, with as many in flight as the launcher has: start-up of one hides behind the transfer of another. One
    AllReduce at a time gives the figures of the cluster as a whole. The sizes follow from times that the ranks have in
    common, so that all measure the same.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from embrace_fx.cost import COLLECTIVES, MIN_CHUNK_BYTES, Cluster, Collective, Exchange, Link, exchange
from embrace_fx.runtime.communicator import Communicator, InFlight, all_gather_single
from embrace_fx.schedule import IN_FLIGHT

FEWEST_RUNS, MOST_RUNS = 3, 7
"""Of each size: small ones are cheap, and the noisiest."""
SHARE_MS = 200.0
"""For each of the four fits: together they take about a second."""
FIRST_BYTES = 4 * 1024
LEAST_GROWTH, MOST_GROWTH = 2.0, 8.0
MOST_BYTES = 2**20
CLEARLY = 3.0
"""Where many ranks share the cores, start-up takes tens of milliseconds, and varies by as much as the bytes of small
sizes take."""

CPU = torch.device("cpu")

_GROUPS: dict[Collective, str] = {"all_reduce": "dense", "all_to_all": "embedding", "all_gather": "ids"}
"""Whose process group carries each collective in training."""


@dataclass(frozen=True)
class Sample:
    """What a rank sent in a collective, and the time it took."""

    sent: Exchange
    time_ms: float


def probe(communicator: Communicator, device: torch.device = CPU) -> Cluster:
    """What the network gives to each collective, on this device.

    Returns: `links` are what collectives reach in a row; figures of the cluster as a whole are those of one AllReduce
        alone. A single rank, which has no network, gets the default.
    Raises:
        DeadRank: a rank does not take part.
    """
    if communicator.world_size == 1:
        return Cluster()
    links = [fit(_measure(communicator, collective, IN_FLIGHT, device)) for collective in COLLECTIVES]
    links.append(fit(_measure(communicator, "all_reduce", 1, device)))
    figures = torch.tensor(
        [(link.bandwidth_bytes_per_ms, link.latency_ms) for link in links], dtype=torch.float64, device=device
    )
    communicator.broadcast([figures])
    *in_a_row, alone = (Link(bandwidth, latency) for bandwidth, latency in figures.tolist())
    return Cluster(alone.bandwidth_bytes_per_ms, alone.latency_ms, tuple(zip(COLLECTIVES, in_a_row, strict=True)))


_PROBED: WeakKeyDictionary[dist.ProcessGroup, dict[str, Cluster]] = WeakKeyDictionary()
"""By group and type of device."""


def probed_links(communicator: Communicator, sent_bytes: int, device: torch.device = CPU) -> Cluster | None:
    """The links between the ranks, probed at the first call for a group; None where a step sends less than a chunk.

    Args:
        sent_bytes: what a step sends, about; equal on all ranks.
        device: whose tensors are sent. Over gloo those of a GPU travel from host to host.
    """
    group = communicator.group
    if group is None or sent_bytes <= MIN_CHUNK_BYTES:
        return None
    found = _PROBED.setdefault(group, {})
    device = device if communicator.uses_nccl(device) else CPU
    if device.type not in found:
        found[device.type] = probe(communicator, device)
    return found[device.type]


def fit(samples: Sequence[Sample]) -> Link:
    """The alpha-beta link that explains the times: weighted least squares, no latency below 0.

    Errors count in proportion to the time itself, as noise that comes and goes does: one over its variance.

    Args:
        samples: of one collective, of at least two sizes.

    Raises:
        ValueError: fewer than two sizes.
    """
    if len({sample.sent.sent_bytes for sample in samples}) < 2:
        raise ValueError(f"expected samples of at least two sizes, in fit, found {list(samples)}.")
    times = np.array([sample.time_ms for sample in samples])
    counts = np.array([(sample.sent.messages, sample.sent.sent_bytes) for sample in samples])
    weights = times**-0.5
    (latency_ms, ms_per_byte), *_ = np.linalg.lstsq(counts * weights[:, None], times * weights)
    if latency_ms < 0 or ms_per_byte <= 0:  # the best of the permitted ones lies on the border
        latency_ms, ms_per_byte = 0.0, counts[:, 1].sum() / (counts[:, 1] ** 2 / times).sum()
    return Link(float(1 / ms_per_byte), float(latency_ms))


def _measure(communicator: Communicator, collective: Collective, in_flight: int, device: torch.device) -> list[Sample]:
    samples: list[Sample] = []
    left_ms, own_bytes, runs = SHARE_MS, FIRST_BYTES, MOST_RUNS
    while True:
        launch = _launch(communicator, collective, own_bytes, device)
        if not samples:
            _time_ms(communicator, launch, 1, 1, device)  # connects the ranks
        own_ms = torch.tensor(_time_ms(communicator, launch, runs, in_flight, device), device=device)
        slowest_ms = communicator.reduce_scalar(own_ms, dist.ReduceOp.MAX).item()
        samples.append(Sample(exchange(collective, own_bytes, communicator.world_size), slowest_ms))
        left_ms -= runs * slowest_ms
        growth = min(left_ms / (FEWEST_RUNS * slowest_ms), MOST_GROWTH, MOST_BYTES / own_bytes)
        told_apart = slowest_ms > CLEARLY * samples[0].time_ms or own_bytes >= MOST_BYTES
        if growth < LEAST_GROWTH and len(samples) > 1 and told_apart:
            return samples
        growth = max(growth, LEAST_GROWTH) if told_apart else MOST_GROWTH
        runs = min(max(int(left_ms / (growth * slowest_ms)), FEWEST_RUNS), MOST_RUNS)
        own_bytes = round(own_bytes * growth)


def _time_ms(
    communicator: Communicator, launch: Callable[[], InFlight], runs: int, in_flight: int, device: torch.device
) -> float:
    """Milliseconds of one of several runs in a row."""
    communicator.reduce_scalar(torch.zeros((), device=device), dist.ReduceOp.SUM)  # all start together
    _finish(device)
    start_s = time.perf_counter()
    launched: deque[InFlight] = deque()
    for _ in range(runs):
        if len(launched) == in_flight:
            communicator.wait(launched.popleft())
        launched.append(launch())
    for last in launched:
        communicator.wait(last)
    _finish(device)
    return (time.perf_counter() - start_s) * 1e3 / runs


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _launch(
    communicator: Communicator, collective: Collective, own_bytes: int, device: torch.device
) -> Callable[[], InFlight]:
    ranks = communicator.world_size
    group = communicator.process_group(_GROUPS[collective])
    own = torch.zeros(own_bytes // 4 // ranks * ranks, device=device)
    if collective == "all_reduce":
        return lambda: communicator.all_reduce_(own, "sum", _GROUPS[collective])
    if collective == "all_to_all":
        received = torch.empty_like(own)
        return lambda: InFlight(received, dist.all_to_all_single(received, own, group=group, async_op=True))
    everyone: Tensor = own.new_empty(ranks * own.numel())
    return lambda: InFlight(everyone, all_gather_single(everyone, own, group=group, async_op=True))
