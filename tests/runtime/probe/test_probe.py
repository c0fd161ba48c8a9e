"""The probe: links from times by hand, on real ranks, and on hosts whose limit is known."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import astuple
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from embrace_fx.cost.links import (
    COLLECTIVES,
    CORE,
    LARGE_BLOCK_BYTES,
    Cluster,
    Collective,
    Handling,
    Link,
    exchange,
)
from embrace_fx.runtime.probe import pace
from embrace_fx.runtime.probe import probe as measuring
from embrace_fx.runtime.probe.handling import PASSES, SCANNED_BYTES
from embrace_fx.runtime.probe.probe import Sample, fit_link, probe_cluster
from embrace_fx.runtime.probe.processors import Load
from embrace_fx.runtime.ranks.communicator import Communicator
from tests.support.ranks import run_ranks


def as_cluster(link: Link) -> Cluster:
    return Cluster(links=tuple((collective, link) for collective in COLLECTIVES))


@given(
    st.integers(2, 8),
    st.sampled_from(COLLECTIVES),
    st.floats(1e2, 1e7),
    st.floats(0.001, 5.0),
    st.lists(st.integers(12, 25), min_size=2, max_size=6, unique=True),
)
def test_exact_times_give_the_link(
    ranks: int, collective: str, bandwidth: float, latency_ms: float, sizes: list[int]
) -> None:
    cluster = Cluster(bandwidth, latency_ms)
    sent = [exchange(collective, 2**size, ranks) for size in sizes]  # type: ignore[arg-type]  # sampled from them
    found = fit_link([Sample(each, each.time_ms(cluster)) for each in sent])
    assert found.bandwidth_bytes_per_ms == pytest.approx(bandwidth, rel=1e-3)
    assert found.latency_ms == pytest.approx(latency_ms, rel=1e-3, abs=1e-4 * sent[-1].sent_bytes / bandwidth)


def test_sizes_grow_until_bytes_tell_from_start_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight ranks share two cores: start-up takes 60 ms, give or take 2, and a link of 24 kB per ms is to be found."""
    noise_ms = itertools.cycle((2.0, -2.0, 0.5))
    monkeypatch.setattr(measuring, "make_launch", lambda _, __, own_bytes, ___: own_bytes)
    monkeypatch.setattr(
        measuring, "mean_ms", lambda _, own_bytes, *__: 60 + next(noise_ms) + 2 * 7 / 8 * own_bytes / 24e3
    )
    ranks = SimpleNamespace(world_size=8, reduce_scalar=lambda value, _: value)
    samples = measuring.time_collective(cast(Communicator, ranks), "all_reduce", 1, measuring.CPU)
    assert fit_link(samples).bandwidth_bytes_per_ms == pytest.approx(24e3, rel=0.2)


@pytest.mark.parametrize("start_up_ms", [0.3, 13.0])
@pytest.mark.parametrize("rate", [6_250.0, 37_500.0, 125_000.0], ids=["50 Mb/s", "300 Mb/s", "1 Gb/s"])
@pytest.mark.parametrize("hidden", [0.0, 1.0], ids=["start-up on top", "start-up hidden"])
def test_links_are_found_in_little_time(
    monkeypatch: pytest.MonkeyPatch, rate: float, start_up_ms: float, hidden: float
) -> None:
    """Of eight ranks, with start-ups as on cores of their own or shared ones, and buckets of 75 kB, full at first."""
    spent_ms = []

    def time_ms(_: object, own_bytes: int, row: int, *__: object) -> float:
        sent_ms = max(0.0, exchange("all_reduce", own_bytes, 8).sent_bytes - 75_000 / row) / rate
        spent_ms.append(row * (start_up_ms + max(0.0, sent_ms - hidden * start_up_ms)))
        return spent_ms[-1] / row

    monkeypatch.setattr(measuring, "make_launch", lambda _, __, own_bytes, ___: own_bytes)
    monkeypatch.setattr(measuring, "mean_ms", time_ms)
    ranks = SimpleNamespace(world_size=8, reduce_scalar=lambda value, _: value)

    samples = measuring.time_collective(cast(Communicator, ranks), "all_reduce", 2, measuring.CPU)

    assert fit_link(samples).bandwidth_bytes_per_ms == pytest.approx(rate, rel=0.15)
    assert sum(spent_ms) < 1500


def probed(rank: int, world_size: int) -> tuple[Cluster, float]:
    communicator = Communicator(dist.group.WORLD)
    start_s = time.monotonic()
    return probe_cluster(communicator), time.monotonic() - start_s


def test_two_ranks_get_one_answer() -> None:
    (cluster, elapsed_s), (other, _) = run_ranks(2, probed)
    assert cluster == other
    assert [name for name, _ in cluster.links] == list(COLLECTIVES)
    for collective in ("all_reduce", None):
        assert cluster.link(collective).bandwidth_bytes_per_ms > 10_000  # 80 Mb/s, which a busy loopback reaches, too
    assert elapsed_s < 20
    rates = cluster.handling
    assert min(rates.scan_bytes_per_ms, rates.pass_bytes_per_ms, rates.claim_bytes_per_ms) > 1e4  # 10 MB/s
    assert 0 <= rates.unit_ms < 0.1
    assert 1e-3 < cluster.pace < 1e3
    assert 0 <= cluster.busy <= 1


def test_speeds_are_those_of_a_cluster_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every launch and all work takes the time that this cluster should take, on a clock that nothing else moves."""
    links = {name: Link(1e4 * (k + 1), 0.1 / (k + 1)) for k, name in enumerate(COLLECTIVES)}
    handling, now_ms = Handling(3e5, 2e5, 1e5, 1e-4, 0.5), [0.0]

    def takes(ms: float) -> Callable[[], None]:
        return lambda: now_ms.append(now_ms.pop() + ms)

    def sent_ms(name: Collective, own_bytes: int) -> float:
        return exchange(name, own_bytes, 4).time_ms(as_cluster(links[name]), name)

    def handled_ms(width: int, rows: int) -> float:
        many_ms = PASSES * rows * width * 4 / handling.pass_bytes_per_ms + rows * handling.unit_ms
        return handling.round_ms + (many_ms if rows > 1 else 0.0)

    for name, value in {
        "time": SimpleNamespace(perf_counter=lambda: now_ms[0] / 1e3, process_time=lambda: now_ms[0] / 2e3),
        "make_launch": lambda _, name, own_bytes, __: takes(sent_ms(name, own_bytes)),
        "make_exchange_work": lambda width, rows, _: takes(handled_ms(width, rows)),
        "make_scan_work": lambda _: takes(SCANNED_BYTES / handling.scan_bytes_per_ms),
        "make_claim_work": lambda _: takes(LARGE_BLOCK_BYTES / handling.claim_bytes_per_ms),
    }.items():
        monkeypatch.setattr(measuring, name, value)
    monkeypatch.setattr(pace, "make_reference_work", lambda _: takes(pace.expected_ms(CORE) / 2.5))
    monkeypatch.setattr(Load, "of_this_rank", lambda took_ms, wall_ms: Load("a", (0, 1), 1, took_ms, wall_ms))
    ranks = Mock(world_size=4, gather=lambda own, _: [own] * 2)
    ranks.reduce_scalar = lambda value, op: value * 4 if op == dist.ReduceOp.SUM else value
    found = probe_cluster(ranks)
    for name, link in found.links:
        least_ms = sent_ms(name, measuring.FIRST_BYTES) / exchange(name, measuring.FIRST_BYTES, 4).messages
        assert astuple(link) == pytest.approx((*astuple(links[name])[:2], least_ms), rel=1e-4)
    assert (found.bandwidth_bytes_per_ms, found.latency_ms, found.pace) == pytest.approx((1e4, 0.1, 2.5), rel=1e-4)
    assert astuple(found.handling) == pytest.approx(astuple(handling), rel=1e-4)
    assert found.busy == pytest.approx(0.5)
    ranks.broadcast.assert_called_once()  # all ranks use the figures of rank 0
    ranks.uses_nccl.return_value = False
    glanced = measuring.estimate_links(ranks, 2**30) or Cluster()
    assert (glanced.bandwidth_bytes_per_ms, glanced.latency_ms) == pytest.approx((1e4, 0.1), rel=1e-4)


def test_ranks_that_share_cores_are_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Load, "of_this_rank", lambda **times: Load("a", (0, 1), threads=1, **times))
    few, many = measuring.loopback(2), measuring.loopback(8)
    for (_, alone), (_, shared) in zip(few.links, many.links, strict=True):
        assert astuple(shared) == (alone.bandwidth_bytes_per_ms / 4, alone.latency_ms * 4, alone.least_ms * 4)
    *rates, unit_ms, round_ms = astuple(few.handling)
    assert astuple(many.handling) == (*(rate / 4 for rate in rates), unit_ms * 4, round_ms * 4)
    assert (few.pace, few.busy, many.busy) == (4 * many.pace, 0.5, 1.0)
    assert (many.bandwidth_bytes_per_ms, many.latency_ms) == astuple(many.links[0][1])[:2]


def glanced(rank: int, world_size: int) -> tuple[Cluster | None, Cluster | None]:
    communicator = Communicator(dist.group.WORLD)
    return measuring.estimate_links(communicator, 2**30), measuring.estimate_links(communicator, 1000)


def test_a_glance_gives_all_ranks_one_link_and_spares_small_steps() -> None:
    (found, none), (other, _) = run_ranks(2, glanced)
    assert found is not None
    assert found == other
    assert found.bandwidth_bytes_per_ms > 10_000  # 80 Mb/s, which a busy loopback reaches, too
    assert none is None


def test_ranks_meet_before_each_run_and_few_launches_are_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    events, now_s = list[str](), itertools.count()

    def reduced(value: Tensor, _: object) -> Tensor:
        events.append("reduce" if value.numel() > 1 or value.item() else "meet")
        return 2 * value  # the other rank takes as long

    def launch() -> Any:
        events.append("launch")
        return events.count("launch")

    monkeypatch.setattr(measuring, "time", SimpleNamespace(perf_counter=lambda: float(next(now_s))))
    ranks: Any = SimpleNamespace(world_size=2, reduce_scalar=reduced, wait=lambda of: events.append(f"wait {of}"))
    assert measuring.median_ms(ranks, launch, 2, 3, 2, measuring.CPU) == pytest.approx(2e3 / 3)
    launched = ["launch", "launch", "wait {}", "launch", "wait {}", "wait {}"]
    expected = " ".join(["meet", *launched, "meet", *launched, "reduce"])
    assert " ".join(events) == expected.format(*range(1, 7))
    events.clear()
    assert measuring.together_ms(ranks, lambda: events.append("run")) == pytest.approx(1e3)
    assert events == ["run", *["meet", "run"] * measuring.HANDLED_SPANS, "reduce"]
