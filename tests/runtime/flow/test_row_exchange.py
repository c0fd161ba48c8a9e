"""Ids and rows between ranks: which go where, and which leave before the others.

Shape legend: V rows of the table.
"""

from __future__ import annotations

from unittest import mock

import torch
from hypothesis import given
from hypothesis import strategies as st

from embrace_fx.runtime.flow.routing import Routing, membership, split_in_chunks
from embrace_fx.vocabulary.plan import Grid

V = 7

ids_of_ranks = st.lists(st.lists(st.integers(0, V - 1), unique=True, max_size=V), min_size=1, max_size=4)


def routing_of(by_rank: list[list[int]], rank: int = 0) -> Routing:
    flat = torch.tensor([i for ids in by_rank for i in ids], dtype=torch.int64)
    return Routing(flat, tuple(map(len, by_rank)), Grid(1, len(by_rank)), rank)


@given(ids_of_ranks, ids_of_ranks)
def test_prior_and_delayed_rows_partition_a_batch(current: list[list[int]], following: list[list[int]]) -> None:
    routing, other = routing_of(current), routing_of(following)
    marked = membership(V, torch.device("cpu"))
    with mock.patch("embrace_fx.runtime.flow.routing.MOST_MARKED", 0):
        unmarked = membership(V, torch.device("cpu"))

    for isin in (unmarked, marked, marked):  # twice, because the first call must leave no marks
        mask = isin(routing.ids, other.ids)
        prior, delayed = routing.select(mask), routing.select(~mask)

    read_next = {i for ids in following for i in ids}
    assert mask.tolist() == [i in read_next for ids in current for i in ids]
    assert prior.ids.tolist() == routing.ids[mask].tolist()
    for rank, ids in enumerate(current):
        own = routing_of(current, rank).select(mask).own_positions
        assert own is not None
        assert [ids[k] for k in own.tolist()] == [i for i in ids if i in read_next]
    assert prior.counts == tuple(sum(i in read_next for i in ids) for ids in current)
    assert tuple(map(sum, zip(prior.counts, delayed.counts, strict=True))) == routing.counts
    assert routing.select(~mask, but=[prior]).counts == delayed.counts


@given(ids_of_ranks, st.data(), st.integers(1, 5))
def test_chunks_keep_equal_ids_together(by_rank: list[list[int]], data: st.DataObject, chunks: int) -> None:
    ids = routing_of(by_rank).ids
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids))), dtype=torch.bool)

    found = split_in_chunks(ids, mask, chunks)

    assert len(found) == chunks
    assert torch.equal(torch.stack(found).sum(0), mask.long())  # every masked row is in exactly one chunk
    where: dict[int, set[int]] = {}
    for k, chunk in enumerate(found):
        for row in ids[chunk].tolist():
            where.setdefault(row, set()).add(k)
    assert all(len(of_row) == 1 for of_row in where.values())


def test_chunks_are_of_about_equal_size() -> None:
    ids = torch.randperm(1000, generator=torch.Generator().manual_seed(0))

    sizes = [int(chunk.sum()) for chunk in split_in_chunks(ids, ids % 2 == 0, 4)]

    assert max(sizes) - min(sizes) <= 2
