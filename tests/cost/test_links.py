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
    Exchange,
    Handling,
    Link,
    Work,
    all_gather,
    all_reduce,
    all_to_all,
    choose_bucket_bytes,
    choose_chunk_bytes,
    exchange,
    launch_ms,
    passes_work,
    predict_id_exchange,
)

RANKS = st.integers(2, 8)


@pytest.mark.parametrize(
    ("exchange", "expected"),
    [
        (all_reduce(1000, 1), Exchange(0, 0)),
        (all_reduce(1000, 2), Exchange(1000, 2)),
        (all_reduce(1000, 4), Exchange(1500, 6)),
        (all_gather(100, 4), Exchange(300, 3)),
        (all_to_all(100, 4), Exchange(75, 3)),
        (predict_id_exchange((4, 5), 100), Exchange(8 + 4 * 6, 1)),  # 2 counts; then 5 ids and a count, 4 bytes each
        (predict_id_exchange((4, 5), 2**31), Exchange(8 + 8 * 6, 1)),
    ],
    ids=str,
)
def test_bytes_and_messages(exchange: Exchange, expected: Exchange) -> None:
    assert exchange == expected


def test_time_is_the_start_ups_and_the_bytes() -> None:
    cluster = Cluster(bandwidth_bytes_per_ms=1000.0, latency_ms=0.5)
    assert Exchange(3000, 4).time_ms(cluster) == 3000 / 1000 + 4 * 0.5
    assert Exchange(0, 0).time_ms(cluster) == 0.0


def test_large_messages_hide_start_up() -> None:
    link = Link(1000.0, 0.1, least_ms=2.0)
    cluster = Cluster(links=(("all_reduce", link),))
    assert Exchange(3_000, 4).time_ms(cluster, "all_reduce") == 4 * 2.0
    assert Exchange(30_000, 4).time_ms(cluster, "all_reduce") == pytest.approx(30 + 4 * 0.1)
    assert link.start_up_ms == 2.0
    assert Link(1000.0, 0.5).start_up_ms == 0.5


@given(RANKS, st.integers(0, 10**9))
def test_an_all_reduce_sends_less_than_twice_the_tensor(ranks: int, tensor_bytes: int) -> None:
    sent = all_reduce(tensor_bytes, ranks).sent_bytes
    assert tensor_bytes <= sent <= 2 * tensor_bytes or tensor_bytes == 0 == sent


SLOW = Cluster(25_000.0, 0.1)
UNEVEN = Cluster(1000.0, 0.5, (("all_to_all", Link(500.0, 0.25)),))
"""An AlltoAll that reaches half of the bandwidth."""


def test_a_collective_has_its_own_link_or_the_clusters() -> None:
    assert UNEVEN.link("all_to_all") == UNEVEN.link("messages") == Link(500.0, 0.25)
    assert Cluster(links=(("messages", Link(7.0, 0.5)),)).link("messages") == Link(7.0, 0.5)
    assert UNEVEN.link("all_reduce") == UNEVEN.link() == Link(1000.0, 0.5)
    assert Exchange(3000, 4).time_ms(UNEVEN) == 3000 / 1000 + 4 * 0.5
    assert Exchange(3000, 4).time_ms(UNEVEN, "all_to_all") == 3000 / 500 + 4 * 0.25
    assert hash(UNEVEN) == hash(Cluster(1000.0, 0.5, UNEVEN.links))


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


def test_the_time_of_one_launch() -> None:
    """On 2 ranks, an AllReduce sends the whole tensor in 2 messages, and an AlltoAll sends half of it in 1 message."""
    assert launch_ms(UNEVEN, "all_reduce", 4000, 2) == 4000 / 1000 + 2 * 0.5
    assert launch_ms(UNEVEN, "all_to_all", 4000, 2) == 2000 / 500 + 0.25
    assert launch_ms(UNEVEN, "all_gather", 4000, 2) == 4000 / 1000 + 0.5


def test_work_takes_its_time_at_the_rates_of_the_processor() -> None:
    rates = Handling(
        scan_bytes_per_ms=1000.0, pass_bytes_per_ms=100.0, claim_bytes_per_ms=10.0, unit_ms=0.5, round_ms=7.0
    )
    cluster = Cluster(handling=rates)
    assert Work(scanned_bytes=2000).time_ms(cluster) == 2.0
    assert passes_work(300, times=2).time_ms(cluster) == 6.0
    assert (Work(scanned_bytes=2000, claimed_bytes=40) + Work(units=3, rounds=2)).time_ms(
        cluster
    ) == 2.0 + 4.0 + 1.5 + 14.0
    assert Work().time_ms(cluster) == 0.0
    assert MACHINES.flattened(8).handling == MACHINES.flattened(4).handling == MACHINES.handling


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


@pytest.mark.parametrize(("ranks", "least_ms"), [(4, 2.0), (8, (3 * 2.0 + 4 * 1.0) / 7)])
def test_what_a_message_takes_at_least_is_that_of_the_links_it_uses(ranks: int, least_ms: float) -> None:
    outside = tuple((collective, Link(1000.0, 0.0, 1.0)) for collective in COLLECTIVES)
    machines = Cluster(1000.0, 0.5, outside, ranks_per_machine=4, inside=Link(8000.0, 0.0, 2.0))
    assert machines.flattened(ranks).link("all_to_all").least_ms == pytest.approx(least_ms)
    assert machines.flattened(ranks).link("all_reduce").least_ms == 2.0


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


def test_a_bucket_is_a_chunk_and_no_more_than_there_is() -> None:
    assert choose_bucket_bytes(SLOW, 4, 10**8) == choose_chunk_bytes(SLOW, 4)
    assert choose_bucket_bytes(SLOW, 4, 1000) == 1000
    assert choose_bucket_bytes(SLOW, 4, 0) == 1


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
