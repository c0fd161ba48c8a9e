"""The cost of exchanges: how bytes, chunks and buckets grow. Small cases are counted by hand in test_costs.py."""

from __future__ import annotations

from math import ceil

from hypothesis import given
from hypothesis import strategies as st

from embrace_fx.cost.links import (
    BUCKET_ROUNDS,
    COLLECTIVES,
    MIN_CHUNK_BYTES,
    Cluster,
    Collective,
    Handling,
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
