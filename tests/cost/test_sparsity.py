"""How sparse gradients are on all ranks: counted by hand, and extrapolated next to ranks that really draw."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from embrace_fx.cost.sparsity import (
    extrapolate,
    imbalance,
    in_blocks,
    independent_ranks,
    measure_sparsity,
    range_starts,
)
from tests.support.exchange_cases import random_sparsity

V = 20_000
TOKENS = 2_000


def batch(rank: int, skew: float) -> Tensor:
    """Returns random words. A larger `skew` draws small ids more often."""
    random = torch.Generator().manual_seed(rank)
    return (torch.rand(TOKENS, generator=random, dtype=torch.float64) ** skew * V).long()


@given(st.integers(1, 12), st.integers(1, 60), st.data())
def test_unions_grow_from_a_ranks_own_to_all(ranks: int, num_units: int, data: st.DataObject) -> None:
    sets = data.draw(st.lists(st.sets(st.integers(0, num_units - 1)), min_size=ranks, max_size=ranks))
    ids = [torch.tensor(sorted(own), dtype=torch.int64) for own in sets]
    sparsity = measure_sparsity(ids, num_units, width=4, itemsize=4)
    assert sparsity.units_by_rank == tuple(own.numel() for own in ids)
    assert sparsity.unions[-1] == torch.cat(ids).unique().numel()
    assert list(sparsity.unions) == sorted(sparsity.unions)
    if ranks <= 8:
        assert sparsity.unions[0] == pytest.approx(sparsity.mean_units)


@pytest.mark.parametrize("skew", [1.0, 3.0, 6.0])
@pytest.mark.parametrize("ranks", [4, 16])
def test_extrapolated_unions_are_about_what_ranks_would_have(skew: float, ranks: int) -> None:
    true = measure_sparsity([batch(rank, skew).unique() for rank in range(ranks)], V, 8, 4)
    for known in (1, 2):
        found = extrapolate([batch(rank, skew) for rank in range(known)], V, 8, 4, ranks)
        assert found.mean_units == pytest.approx(true.mean_units, rel=0.05)
        assert found.union == pytest.approx(true.union, rel=0.35)
        assert found.push_imbalance == pytest.approx(true.push_imbalance, rel=0.35)
        assert list(found.unions) == sorted(found.unions)


def test_extrapolation_without_ids_is_empty() -> None:
    assert extrapolate([torch.zeros(0, dtype=torch.int64)], 10, 8, 4, 3).unions == (0.0, 0.0, 0.0)


def test_independent_ranks_by_hand() -> None:
    sparsity = independent_ranks(100, 8, 4, (50, 20))
    assert sparsity.unions == pytest.approx((50.0, 100 * (1 - 0.5 * 0.8)))
    assert random_sparsity(100, 8, 4, 0.5, 2).unions == pytest.approx((50.0, 75.0))


def test_what_was_measured_in_one_line() -> None:
    ids = [torch.tensor([0, 1, 2, 3]), torch.tensor([2, 3, 4, 7])]
    found = str(measure_sparsity(ids, 8, 4, 4, total_ids=20))
    assert found == (
        "density 50.00%, ids per row 2.5, overlap of two ranks 50%, g(2) 1.50, skew 1.5 (of the union 1.3)"
    )
    assert str(measure_sparsity(ids[:1], 8, 4, 4)) == "density 50.00%, ids per row 1.0, skew 1.0 (of the union 1.0)"


def test_rows_in_blocks() -> None:
    rows = independent_ranks(100, 8, 4, (20, 20))
    same, shorter, longer = (in_blocks(rows, size) for size in (8, 4, 16))
    assert (same.num_units, same.units_by_rank) == (100, (20, 20))
    assert (shorter.num_units, shorter.units_by_rank) == (200, (40, 40))
    assert (longer.num_units, longer.units_by_rank) == (50, (18, 18))  # 50 blocks * (1 - 0.8 * 0.8) = 18
    assert longer.unions[0] == pytest.approx(50 * 0.36)


def test_imbalance_of_even_ranges() -> None:
    assert range_starts(8, 3) == [0, 2, 5]
    assert imbalance(torch.tensor([0, 1, 7]), 8, 2) == pytest.approx(2 * 2 / 3)
    assert imbalance(torch.zeros(0, dtype=torch.int64), 8, 2) == 1.0
