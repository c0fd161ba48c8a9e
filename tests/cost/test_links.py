"""The cost of exchanges: bytes and messages, counted by hand for small cases, and how they grow."""

from __future__ import annotations

from math import ceil
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embrace_fx.cost.links import (
    BUCKET_ROUNDS,
    COLLECTIVES,
    MIN_CHUNK_BYTES,
    Cluster,
    Collective,
    Handling,
    Link,
    all_reduce,
    choose_bucket_bytes,
    choose_chunk_bytes,
    exchange,
    launch_ms,
)

RANKS = st.integers(2, 8)


@given(RANKS, st.integers(0, 10**9))
def test_an_all_reduce_sends_less_than_twice_the_tensor(ranks: int, tensor_bytes: int) -> None:
    sent = all_reduce(tensor_bytes, ranks).sent_bytes
    assert tensor_bytes <= sent <= 2 * tensor_bytes or tensor_bytes == 0 == sent


SLOW = Cluster(25_000.0, 0.1)


@pytest.mark.parametrize(
    ("links", "found"),
    [
        ((("broadcast", Link(1.0, 0.0)),), "Got entries for broadcast"),
        ((("all_reduce", Link(1.0, 0.0)), ("all_reduce", Link(2.0, 0.0))), "Got entries for all_reduce, all_reduce"),
        ((("all_reduce", Link(0.0, 0.0)),), "bandwidth must be positive"),
        ((("all_reduce", Link(1.0, -1.0)),), "latency must not be negative"),
        ((("all_reduce", Link(1.0, 0.0, -1.0)),), "latency must not be negative"),
    ],
)
def test_links_that_make_no_sense_are_refused(links: tuple[tuple[Collective, Link], ...], found: str) -> None:
    with pytest.raises(ValueError, match=found):
        Cluster(links=links)
    with pytest.raises(ValueError, match="bandwidth must be positive"):
        Cluster(0.0)


@pytest.mark.parametrize(
    "rates", [{"scan_bytes_per_ms": 0.0}, {"claim_bytes_per_ms": -1.0}, {"unit_ms": -0.1}], ids=str
)
def test_processors_that_make_no_sense_are_refused(rates: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="rates must be positive"):
        Handling(**rates)


MACHINES = Cluster(1000.0, 0.5, ranks_per_machine=4, inside=Link(8000.0, 0.125))
"""Four ranks share 1000 bytes per ms to the others; each reaches 8000 to its neighbours."""


def test_a_ring_is_as_slow_as_its_slowest_link() -> None:
    """8 ranks send 2 * 7/8 of the tensor in 14 messages; one rank of a machine sends to the next machine."""
    assert launch_ms(MACHINES, "all_reduce", 8000, 8) == pytest.approx(14_000 / 1000 + 14 * 0.5)


def test_pairwise_messages_are_split_by_where_they_go() -> None:
    """Of 7 peers 3 are inside; what goes to the 4 others shares a link with what 3 neighbours send."""
    expected = 3 * (1000 / 8000 + 0.125) + 4 * (1000 * 4 / 1000 + 0.5)
    assert launch_ms(MACHINES, "all_to_all", 8000, 8) == pytest.approx(expected)
    assert launch_ms(MACHINES, "all_gather", 1000, 8) == pytest.approx(expected)


def test_chunks_of_machines_are_cut_for_what_they_take() -> None:
    size = choose_chunk_bytes(MACHINES, 8, "all_to_all")
    start_up_ms = launch_ms(MACHINES, "all_to_all", 0, 8)
    assert size == MIN_CHUNK_BYTES or launch_ms(MACHINES, "all_to_all", size, 8) == pytest.approx(10 * start_up_ms)
    assert choose_chunk_bytes(MACHINES, 4) == choose_chunk_bytes(Cluster(8000.0, 0.125), 4)


@pytest.mark.parametrize(
    "options",
    [{"ranks_per_machine": 4}, {"inside": Link(1.0, 0.0)}, {"ranks_per_machine": 0}],
    ids=["no link inside", "nothing inside", "no ranks"],
)
def test_machines_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="inside= is required"):
        Cluster(**options)


@given(RANKS, st.sampled_from(COLLECTIVES), st.floats(1e3, 1e7), st.floats(0.0, 2.0))
def test_start_up_takes_a_tenth_of_a_chunk(
    ranks: int, collective: Collective, bandwidth: float, latency_ms: float
) -> None:
    cluster = Cluster(bandwidth, latency_ms)
    size = choose_chunk_bytes(cluster, ranks, collective)

    def start_up_share(own_bytes: int) -> float:
        start_up_ms = exchange(collective, own_bytes, ranks).messages * latency_ms
        return start_up_ms / launch_ms(cluster, collective, own_bytes, ranks)

    assert start_up_share(size) <= 0.1 * 1.001
    assert size == MIN_CHUNK_BYTES or start_up_share(round(0.99 * size)) > 0.1  # it is no larger than necessary


@given(RANKS, st.integers(10**7, 10**9), st.floats(1e5, 1e7), st.floats(0.2, 2.0), st.floats(0.0, 1.0))
def test_buckets_that_the_end_of_the_backward_awaits_are_as_many_as_end_first(
    ranks: int, total: int, bandwidth: float, latency_ms: float, round_ms: float
) -> None:
    cluster = Cluster(bandwidth, latency_ms, handling=Handling(round_ms=round_ms))

    def late_ms(count: int) -> float:
        own_ms = launch_ms(cluster, "all_reduce", 0, max(ranks, 2)) + BUCKET_ROUNDS * round_ms
        return launch_ms(cluster, "all_reduce", ceil(total / count), max(ranks, 2)) + count * own_ms

    count = ceil(total / choose_bucket_bytes(cluster, ranks, total, read_later=False))
    assert late_ms(count) <= 1.05 * min(map(late_ms, (1, *range(max(count - 3, 1), count + 4), 2 * count)))
