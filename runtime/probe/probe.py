"""Measures the links between ranks and the ranks' processors, as a `Cluster`, on the process groups used for
training.

Contract
    Collective, outside of a step: all ranks call it, and all get rank 0's answer. Each way to send is timed in growing
    sizes, until the bytes clearly outweigh the start-up, and take so long that bursts through queues and buffers do
    not matter. A size's time is the median of a few runs, on the slowest rank. The next size follows from times
    common to all ranks, so that all measure the same sizes. Processors are measured on all ranks at once, because
    ranks that share cores slow each other down in training too.
"""

from __future__ import annotations

import platform
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from math import ceil
from statistics import median
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from embrace_fx.cost.links import (
    COLLECTIVES,
    CORE,
    LARGE_BLOCK_BYTES,
    MIN_CHUNK_BYTES,
    Cluster,
    Collective,
    Exchange,
    Handling,
    Link,
    exchange,
    launch_ms,
)
from embrace_fx.runtime.exchanges.channel import Channel
from embrace_fx.runtime.probe import pace
from embrace_fx.runtime.probe.handling import (
    HANDLED_ROWS,
    NARROW,
    PASSES,
    SCANNED_BYTES,
    make_claim_work,
    make_exchange_work,
    make_scan_work,
)
from embrace_fx.runtime.probe.processors import Load, delay_share
from embrace_fx.runtime.ranks.communicator import Communicator, InFlight
from embrace_fx.runtime.ranks.gathering import gather_single
from embrace_fx.vocabulary.schedule import IN_FLIGHT

FIRST_BYTES = 4 * 1024
GROWTH, LAST_GROWTH = 8, 4
"""Growth of the size while times are mostly start-up, and afterwards."""
OUTWEIGHS = 12.0
"""Time of the largest size, in start-ups: an unknown part of start-up hides behind the bytes, which is then an error of
the bandwidth of a twelfth at most."""
LONG_MS = 50.0
"""Least time of the largest size's row: a token bucket or a socket passes some milliseconds' bytes in a burst."""
MOST_BYTES = 4 * 2**20
"""Largest size: on links fast enough to carry more in time, the processors would be measured."""
SHARE_MS = 200.0
"""About the time of all runs of a size, of which the median counts."""
FEWEST_RUNS, MOST_RUNS = 2, 3
MOST_IN_ROW = 8
"""Most launches of a run, which is their mean; fewer of a size that takes long."""
FIRST_ROW, FIRST_MS, MOST_FIRST_RUNS = 4, 120.0, 40
"""For the first size: launches in a row, about the time of all runs, most runs. Start-up depends on when the scheduler
wakes threads and is the noisiest figure, and chunk sizes are multiples of it."""
GLANCED_BYTES, GLANCE_ERROR = 2**20, 1.5
"""Larger size of a glance; ratio by which its times may differ from a probe's."""
BURST_SHARE = 0.1
"""Most share by which the bandwidth may be below the largest size's own rate, for a burst: 5 of `LONG_MS`. The slope
alone may be far off, where one of few runs met a busy core."""

HANDLED_MS, HANDLED_SPANS = 30.0, 3
"""For each kind of handling: the least time of a span, several turns of the scheduler where ranks share a core, and the
number of spans, of which the median counts. Single spans have differed by a factor of ten."""

ALIKE, ALIKE_START_UP = 1.15, 3.0
"""Most ratio of times, for a large AllReduce and for a small one, which a busy core disturbs more, at which links of an
earlier run still hold. A schedule made for links 1.4 times too slow took a ninth longer than its own."""
ALIKE_WITHIN_A_HOST = 2.0
"""Least ratio by which exchanges within a host take less time than expected for the links to be probed again: busy
processors have made probes of one host differ as much."""
SLOWER_WITHIN_A_HOST = 8.0
"""Least ratio by which exchanges within a host take more time than expected for the links to be probed again: more than
busy processors cost. Containers or network namespaces of one host may have limited links."""

CPU = torch.device("cpu")

_LOOPBACK: tuple[tuple[Collective, float, float], ...] = (
    ("all_reduce", 1.8e6, 0.1),
    ("all_to_all", 1.7e6, 0.15),
    ("all_gather", 1e6, 0.15),
    ("messages", 1.7e6, 0.15),
)
"""Collective, bytes per ms and ms of a message within a host: the shortest of many, on two cores of a server."""
_LOOPBACK_PACE = 4.0
"""`Cluster.pace` of such a core."""
LOOPBACK_ALIKE, LOOPBACK_WITHIN_MS = 3.0, 400.0
"""Most ratio of the shortest exchange's time to the usual one within a host; milliseconds spent at most to find one.
Busy processors make exchanges longer, but rarely all of them."""

_GROUPS: dict[Collective, str] = {
    "all_reduce": "dense",
    "all_to_all": "embedding",
    "all_gather": "ids",
    "messages": "dense",
}
"""Collective -> the communication class whose process group carries it in training."""


@dataclass(frozen=True)
class Sample:
    """One measurement of a collective: the bytes and messages that a rank sent, and the time."""

    sent: Exchange
    time_ms: float


def probe_cluster(
    communicator: Communicator, device: torch.device = CPU, computes_on: torch.device | None = None
) -> Cluster:
    """Measures the speed of the links between ranks for each collective, and how fast processors handle gradients.
    Returns the same cluster on all ranks, or the default cluster for a single rank. Collective.

    The cluster's `links` are measured with several launches in flight. Its latency is measured with one AllReduce at a
    time.

    Args:
        device: the device of the tensors that are sent.
        computes_on: the model's device, or None if it is `device`.

    Raises:
        DeadRank: a rank does not take part.
    """
    if communicator.world_size == 1:
        return Cluster()
    links = [fit_link(time_collective(communicator, collective, IN_FLIGHT, device)) for collective in COLLECTIVES]
    alone = smallest_ms(communicator, make_launch(communicator, "all_reduce", FIRST_BYTES, device), 1, device)
    sent = exchange("all_reduce", FIRST_BYTES, communicator.world_size)
    bandwidth = links[0].bandwidth_bytes_per_ms
    links.append(Link(bandwidth, max(alone - sent.sent_bytes / bandwidth, 0.0) / sent.messages))
    handling = measure_handling(communicator, device)
    computes_on = computes_on or device
    speed = pace.expected_ms(CORE) / together_ms(communicator, pace.make_reference_work(computes_on), computes_on)
    figures = torch.tensor(
        [speed, *(value for link in links for value in astuple(link)), *astuple(handling)],
        dtype=torch.float64,
        device=device,
    )
    communicator.broadcast([figures])
    speed, *rest = figures.tolist()
    values = iter(rest)
    *in_a_row, own = (Link(next(values), next(values), next(values)) for _ in links)
    by_name = tuple(zip(COLLECTIVES, in_a_row, strict=True))
    found = Cluster(own.bandwidth_bytes_per_ms, own.latency_ms, by_name, handling=Handling(*values), pace=speed)
    return replace(found, busy=_measure_busy_share(communicator, found)) if computes_on.type == "cpu" else found


def _measure_busy_share(communicator: Communicator, links: Cluster) -> float:
    """Measures the share of a large AllReduce's duration by which it delays concurrent compute on the same processors.
    `links` are the measured links between ranks. Collective.
    """
    own_bytes = bytes_for_rate(links, communicator.world_size)
    launch = make_launch(communicator, "all_reduce", own_bytes, CPU)
    runs = min(ceil(LONG_MS / launch_ms(links, "all_reduce", own_bytes, communicator.world_size)), MOST_IN_ROW)
    _wait_for_ranks(communicator, CPU)
    began_s = time.process_time()
    wall_ms = runs * mean_ms(communicator, launch, runs, IN_FLIGHT, CPU)
    own = Load.of_this_rank((time.process_time() - began_s) * 1e3, wall_ms)
    return delay_share(communicator.gather(own, Load))


def measure_handling(communicator: Communicator, device: torch.device = CPU) -> Handling:
    """Measures how fast processors handle sparse gradients while all ranks do so at once. Returns the mean over ranks.
    Collective.
    """
    row_bytes = {width: rows * width * 4 for width, rows in HANDLED_ROWS.items()}
    runs = [
        make_scan_work(device),
        make_claim_work(device),
        *(make_exchange_work(*each, device) for each in HANDLED_ROWS.items()),
    ]
    runs.append(make_exchange_work(NARROW, 1, device))
    scan_ms, claim_ms, wide_ms, narrow_ms, round_ms = (together_ms(communicator, run, device) for run in runs)
    wide_ms, narrow_ms = (max(ms - round_ms, 1e-6) for ms in (wide_ms, narrow_ms))
    # Model each measured time as a cost per byte for each pass over the data, plus a cost per row.
    passed = np.array([(PASSES * row_bytes[width], rows) for width, rows in HANDLED_ROWS.items()])
    pass_ms, unit_ms = np.linalg.solve(passed, (wide_ms, narrow_ms))
    if pass_ms <= 0 or unit_ms < 0:  # the fit fails if few rows take as long as many
        pass_ms, unit_ms = wide_ms / passed[0, 0], 0.0
    return Handling(SCANNED_BYTES / scan_ms, float(1 / pass_ms), LARGE_BLOCK_BYTES / claim_ms, float(unit_ms), round_ms)


def together_ms(communicator: Communicator, run: Callable[[], None], device: torch.device = CPU) -> float:
    """Measures how many milliseconds a call of `run`, which computes on `device`, takes while all ranks call it.
    Returns the mean over ranks. Collective.
    """
    run()
    spans_ms = [_span_ms(communicator, run, device) for _ in range(HANDLED_SPANS)]
    own_ms = torch.tensor(median(spans_ms), dtype=torch.float64, device=device)
    return communicator.reduce_scalar(own_ms, dist.ReduceOp.SUM).item() / communicator.world_size


def _span_ms(communicator: Communicator, run: Callable[[], None], device: torch.device) -> float:
    """Calls `run` repeatedly for about `HANDLED_MS`, after waiting for all ranks. Returns the mean milliseconds of a
    call.
    """
    _wait_for_ranks(communicator, device)
    start_s = time.perf_counter()
    runs, elapsed_ms = 0, 0.0
    while elapsed_ms < HANDLED_MS:
        run()
        torch.get_device_module(device).synchronize(device)
        runs += 1
        elapsed_ms = (time.perf_counter() - start_s) * 1e3
    return elapsed_ms / runs


def loopback(ranks: int) -> Cluster:
    """Returns a cluster with typical speeds for `ranks` ranks on one host. They are lower if the ranks have more
    threads than the host has cores.
    """
    load, own = Load.of_this_rank(took_ms=1.0, wall_ms=2.0), Handling()
    shared = max(ranks * load.threads / len(load.cores), 1.0)
    links = tuple((name, Link(rate / shared, ms * shared, ms * shared)) for name, rate, ms in _LOOPBACK)
    handling = Handling(
        own.scan_bytes_per_ms / shared,
        own.pass_bytes_per_ms / shared,
        own.claim_bytes_per_ms / shared,
        own.unit_ms * shared,
        own.round_ms * shared,
    )
    alone, speed, busy = links[0][1], _LOOPBACK_PACE / shared, delay_share([load] * ranks)
    return Cluster(alone.bandwidth_bytes_per_ms, alone.latency_ms, links, handling=handling, pace=speed, busy=busy)


def _host_links(communicator: Communicator, computes_on: torch.device) -> Cluster | None:
    """Returns typical links between ranks on one host. Returns None if AllReduces of these ranks are slower, or if the
    model's device, `computes_on`, is not the CPU. Collective.
    """
    usual = communicator.gather(loopback(communicator.world_size), Cluster)[0]
    return usual if computes_on.type == "cpu" and is_loopback(communicator, usual) else None


def is_loopback(communicator: Communicator, usual: Cluster) -> bool:
    """Returns whether a small and a large AllReduce are about as fast as predicted from `usual`, which are typical
    links between ranks on one host. Collective.
    """
    for own_bytes in (FIRST_BYTES, MOST_BYTES):
        launch = make_launch(communicator, "all_reduce", own_bytes, CPU)
        mean_ms(communicator, launch, 1, 1, CPU)  # untimed: the first collective connects the ranks
        most_ms = LOOPBACK_ALIKE * launch_ms(usual, "all_reduce", own_bytes, communicator.world_size)
        spent_ms = found_ms = 0.0
        while spent_ms == 0.0 or (found_ms > most_ms and spent_ms < LOOPBACK_WITHIN_MS):
            own_ms = torch.tensor(mean_ms(communicator, launch, 1, 1, CPU))
            found_ms = communicator.reduce_scalar(own_ms, dist.ReduceOp.MAX).item()
            spent_ms += found_ms
        if found_ms > most_ms:
            return False
    return True


_PROBED: WeakKeyDictionary[dist.ProcessGroup, dict[str, Cluster]] = WeakKeyDictionary()
"""Group -> type of the device that computes -> the links found."""


def probed_links(
    communicator: Communicator,
    sent_bytes: int,
    device: torch.device = CPU,
    earlier: Callable[[], tuple[Cluster | None, bool]] = lambda: (None, False),
) -> Cluster | None:
    """Returns the links between ranks, measured once per process group, or None if a step sends less than one chunk.
    Collective.

    Args:
        sent_bytes: approximate bytes that a step sends; equal on all ranks.
        device: the device of the tensors that are sent. Over gloo, a GPU's tensors are sent from host to host.
        earlier: returns (links cached by an earlier run or None, whether all ranks are on one host), equal on all
            ranks. Cached links are used if a short measurement agrees with them.
    """
    group = communicator.group
    if group is None or sent_bytes <= MIN_CHUNK_BYTES:
        return None
    found, computes_on = _PROBED.setdefault(group, {}), device
    device = device if communicator.uses_nccl(device) else CPU
    if computes_on.type not in found:
        recalled, on_one_host = earlier()
        if on_one_host and (usual := _host_links(communicator, computes_on)) is not None:
            found[computes_on.type] = usual
        elif recalled is not None and links_still_hold(communicator, recalled, device, on_one_host):
            found[computes_on.type] = recalled
        else:
            found[computes_on.type] = probe_cluster(communicator, device, computes_on)
    return found[computes_on.type]


def estimate_links(communicator: Communicator, sent_bytes: int, device: torch.device = CPU) -> Cluster | None:
    """Returns the links between ranks if they are known. Otherwise measures only AllReduce, which takes a tenth of the
    time of a full measurement, and uses the measured link for all collectives. Returns None if a step sends less than
    one chunk. Collective.

    Times predicted from this estimate may differ by a factor of `GLANCE_ERROR` from predictions after a full
    measurement.

    Args:
        sent_bytes: the approximate number of bytes that a step sends; equal on all ranks.
        device: the device of the tensors that are sent.
    """
    if communicator.group is None or sent_bytes <= MIN_CHUNK_BYTES:
        return None
    probed = _PROBED.setdefault(communicator.group, {})
    one_host = device.type not in probed and len(set(communicator.gather(platform.node(), str))) == 1
    if one_host and (usual := _host_links(communicator, device)) is not None:
        probed[device.type] = usual
    if device.type in probed:
        return probed[device.type]
    device, samples = device if communicator.uses_nccl(device) else CPU, []
    for own_bytes, row in ((FIRST_BYTES, FIRST_ROW), (GLANCED_BYTES, IN_FLIGHT)):
        launch = make_launch(communicator, "all_reduce", own_bytes, device)
        mean_ms(communicator, launch, 1, 1, device)  # untimed: the first collective connects the ranks
        time_ms = median_ms(communicator, launch, MOST_RUNS, row, IN_FLIGHT, device)
        samples.append(Sample(exchange("all_reduce", own_bytes, communicator.world_size), time_ms))
    link = fit_link(samples)
    return Cluster(link.bandwidth_bytes_per_ms, link.latency_ms)


def links_still_hold(
    communicator: Communicator, links: Cluster, device: torch.device = CPU, on_one_host: bool = False
) -> bool:
    """Returns whether a small and a large AllReduce take about as long as predicted from links that were measured
    earlier. Collective.

    Args:
        links: the links that were measured earlier.
        on_one_host: whether all ranks are on one host. A larger difference is then tolerated, because busy processors
            also cause it.
    """
    for own_bytes, alike in (
        (FIRST_BYTES, ALIKE_START_UP),
        (bytes_for_rate(links, communicator.world_size), ALIKE),
    ):
        launch = make_launch(communicator, "all_reduce", own_bytes, device)
        mean_ms(communicator, launch, 1, 1, device)  # untimed: the first collective connects the ranks
        found_ms = median_ms(communicator, launch, FEWEST_RUNS, IN_FLIGHT, IN_FLIGHT, device)
        expected_ms = launch_ms(links, "all_reduce", own_bytes, communicator.world_size)
        lower = max(alike, ALIKE_WITHIN_A_HOST) if on_one_host else alike
        upper = SLOWER_WITHIN_A_HOST if on_one_host else alike
        if not expected_ms / lower < found_ms < expected_ms * upper:
            return False
    return True


def bytes_for_rate(links: Cluster, world_size: int) -> int:
    """Returns the bytes of an AllReduce that is large enough to measure the links' bandwidth."""
    own_bytes, start_up_ms = FIRST_BYTES, launch_ms(links, "all_reduce", FIRST_BYTES, world_size)
    enough_ms = max(LONG_MS, OUTWEIGHS * start_up_ms)
    while own_bytes < MOST_BYTES and launch_ms(links, "all_reduce", own_bytes, world_size) < enough_ms:
        own_bytes *= LAST_GROWTH
    return min(own_bytes, MOST_BYTES)


def fit_link(samples: Sequence[Sample]) -> Link:
    """Fits a link's bandwidth, latency and minimum time to the measured times of one collective for several sizes.

    The bandwidth is computed from the difference of the two largest sizes, within bounds computed from the largest
    size. The minimum time is the time of the smallest size. The latency is the time of larger sizes minus the time to
    send their bytes. If larger sizes take no longer than smaller ones, the latency is 0.

    Raises:
        ValueError: the samples have fewer than two sizes.
    """
    if len({sample.sent.sent_bytes for sample in samples}) < 2:
        raise ValueError(f"fit_link(): expected samples of at least two sizes, but got {list(samples)}.")
    ascending = sorted(samples, key=lambda sample: sample.sent.sent_bytes)
    first, before, last = ascending[0], ascending[-2], ascending[-1]
    own_rate = last.sent.sent_bytes / last.time_ms
    if last.time_ms <= min(first.time_ms, before.time_ms):
        return Link(own_rate, 0.0)
    most = last.sent.sent_bytes / max(last.time_ms - first.time_ms, 1e-9)
    slower_ms = max(last.time_ms - before.time_ms, 1e-9)
    slope = (last.sent.sent_bytes - before.sent.sent_bytes) / slower_ms
    bandwidth = min(max(slope, own_rate * (1 - BURST_SHARE)), most)
    beside_ms = [
        sample.time_ms - sample.sent.sent_bytes / bandwidth
        for sample in ascending
        if sample is last or sample.sent.sent_bytes / bandwidth > first.time_ms
    ]
    latency_ms = min(max(median(beside_ms), 0.0), first.time_ms)
    return Link(bandwidth, latency_ms / last.sent.messages, first.time_ms / first.sent.messages)


def time_collective(
    communicator: Communicator, collective: Collective, in_flight: int, device: torch.device
) -> list[Sample]:
    """Measures the time of a collective for growing sizes, until a size takes much longer than the smallest one.
    Returns one sample for each size. At most `in_flight` launches are in flight at once.
    """
    samples: list[Sample] = []
    own_bytes, row, runs = FIRST_BYTES, FIRST_ROW, MOST_RUNS
    while True:
        launch = make_launch(communicator, collective, own_bytes, device)
        if not samples:
            mean_ms(communicator, launch, 1, 1, device)  # untimed: the first collective connects the ranks
            time_ms = smallest_ms(communicator, launch, in_flight, device)
        else:
            time_ms = median_ms(communicator, launch, runs, row, in_flight, device)
        samples.append(Sample(exchange(collective, own_bytes, communicator.world_size), time_ms))
        start_up_ms = samples[0].time_ms
        told = time_ms > OUTWEIGHS * start_up_ms and row * time_ms > LONG_MS
        if (told or own_bytes >= MOST_BYTES) and len(samples) > 1:
            return samples
        growth = GROWTH if time_ms < 2 * start_up_ms else LAST_GROWTH
        own_bytes, expected_ms = min(own_bytes * growth, MOST_BYTES), growth * time_ms
        row = min(ceil(LONG_MS / expected_ms), MOST_IN_ROW)
        runs = min(max(int(SHARE_MS / (row * expected_ms)), FEWEST_RUNS), MOST_RUNS)


def smallest_ms(
    communicator: Communicator, launch: Callable[[], InFlight], in_flight: int, device: torch.device
) -> float:
    """Returns the milliseconds of a launch that sends so little that its time is mostly latency. Repeats it often,
    because such times vary. At most `in_flight` launches are in flight at once.
    """
    few_ms = median_ms(communicator, launch, MOST_RUNS, FIRST_ROW, in_flight, device)
    runs = min(int(FIRST_MS / (FIRST_ROW * few_ms)), MOST_FIRST_RUNS)
    return few_ms if runs <= MOST_RUNS else median_ms(communicator, launch, runs, FIRST_ROW, in_flight, device)


def median_ms(
    communicator: Communicator,
    launch: Callable[[], InFlight],
    runs: int,
    launches: int,
    in_flight: int,
    device: torch.device,
) -> float:
    """Returns the milliseconds of a collective that `launch` starts: the median over `runs` runs, where the slowest
    rank determines a run's time. A run starts the collective `launches` times, with at most `in_flight` in flight at
    once. Collective.
    """
    own_ms = torch.tensor(
        [mean_ms(communicator, launch, launches, in_flight, device) for _ in range(runs)], device=device
    )
    slowest_ms: list[float] = communicator.reduce_scalar(own_ms, dist.ReduceOp.MAX).tolist()
    return median(slowest_ms)


def mean_ms(
    communicator: Communicator, launch: Callable[[], InFlight], runs: int, in_flight: int, device: torch.device
) -> float:
    """Waits for all ranks, then starts a collective `runs` times by calling `launch`, with at most `in_flight` in
    flight at once. Returns the mean milliseconds of one collective on this rank.
    """
    _wait_for_ranks(communicator, device)
    start_s = time.perf_counter()
    launched: deque[InFlight] = deque()
    for _ in range(runs):
        if len(launched) == in_flight:
            communicator.wait(launched.popleft())
        launched.append(launch())
    for last in launched:
        communicator.wait(last)
    torch.get_device_module(device).synchronize(device)
    return (time.perf_counter() - start_s) * 1e3 / runs


def _wait_for_ranks(communicator: Communicator, device: torch.device) -> None:
    """Waits until all ranks have called this function and the device has finished its work. Collective."""
    communicator.reduce_scalar(torch.zeros((), device=device), dist.ReduceOp.SUM)
    torch.get_device_module(device).synchronize(device)


def make_launch(
    communicator: Communicator, collective: Collective, own_bytes: int, device: torch.device
) -> Callable[[], InFlight]:
    """Returns a function that launches a collective of zeros, to which each rank contributes `own_bytes` bytes."""
    ranks = communicator.world_size
    group = communicator.process_group(_GROUPS[collective])
    own = torch.zeros(own_bytes // 4 // ranks * ranks, device=device)
    if collective == "all_reduce":
        return lambda: communicator.all_reduce_(own, "sum", _GROUPS[collective])
    if collective == "all_to_all":
        received, sizes = torch.empty_like(own), [own.numel() // ranks] * ranks
        return lambda: communicator.all_to_all(received, own, sizes, sizes, _GROUPS[collective])
    if collective == "messages":
        channel, sizes = Channel(group), [own.numel() // ranks] * ranks
        return lambda: channel.all_to_all(own, sizes, sizes)
    everyone: Tensor = own.new_empty(ranks * own.numel())
    return lambda: InFlight(everyone, gather_single(everyone, own, group, async_op=True))
