"""Cutting two batches before the host knows any size: the same parts as with sizes that are read at once."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from embrace_fx.runtime import kernels
from embrace_fx.runtime.flow.routing import Routing, SplitAhead, cut_batches, membership, route_padded
from embrace_fx.runtime.flow.row_gradient import SumOptions, sum_received
from embrace_fx.vocabulary.plan import Grid

V = 9
CPU = torch.device("cpu")

paddings = st.sampled_from([-1, 0, 4])


def packed(by_rank: list[list[int]]) -> tuple[Tensor, list[list[int]], Routing]:
    """Returns the ids of a table's batch as they are gathered, and each rank's unique ids."""
    capacities = [[len(ids)] for ids in by_rank]
    unique = [sorted(set(ids)) for ids in by_rank]
    longest = max(map(len, by_rank))
    rows = [[len(u), *u, *[0] * (longest - len(u))] for u in unique]
    flat = torch.tensor([i for u in unique for i in u], dtype=torch.int64)
    routing = Routing(flat, tuple(map(len, unique)), Grid(1, len(unique)), 0)
    return torch.tensor(rows, dtype=torch.int32), capacities, routing


def _pieces(first: Routing) -> list[Routing]:
    """Returns all pieces of a batch after it has been cut."""
    return [first, *first.rest()]


@given(st.integers(1, 3), st.data(), st.integers(1, 4), paddings)
def test_batches_are_cut_as_with_sizes_at_hand(ranks: int, data: st.DataObject, chunks: int, padding_idx: int) -> None:
    ids = st.lists(st.integers(0, V - 1), max_size=12)
    one, other = (data.draw(st.lists(ids, min_size=ranks, max_size=ranks)) for _ in range(2))
    current = packed(one)[2]
    gathered, capacities, following = packed(other)
    isin = membership(V, CPU)
    expected = cut_batches(current, following, isin, chunks)
    paddings = (padding_idx,) if padding_idx >= 0 else ()

    ahead = SplitAhead(current, table := route_padded(gathered, capacities, 0, V), isin, V, chunks, paddings)
    assert tuple(table.counts.tolist()) == following.counts
    assert torch.equal(table.ids[: sum(following.counts)], following.ids)
    found = ahead.cut_batches(following.ids, following.counts, ahead.sizes.tolist())

    of_current, of_following = zip(map(_pieces, found), map(_pieces, expected), strict=True)
    for part, each in (*zip(*of_current, strict=True), *zip(*of_following, strict=True)):
        assert part.counts == each.counts
        assert part.own_positions is not None
        assert each.own_positions is not None
        assert torch.equal(part.own_positions, each.own_positions)
        assert torch.equal(part.ids, each.ids)
    for part in of_current[0]:
        rows = torch.randn(part.ids.numel(), 3, dtype=torch.float64)
        assert part.sums is not None
        found_sums = sum_received(part, rows.view(-1), SumOptions(rows.dtype, 3, paddings, 0.5))
        for mine, reference in zip(
            found_sums, kernels.coalesce(part.ids, rows.view(-1), 3, paddings, 0.5), strict=True
        ):
            assert torch.equal(mine, reference)
