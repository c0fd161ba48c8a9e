"""How sparse gradients are on all ranks: counted by hand, and extrapolated next to ranks that really draw."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from embrace_fx.cost.sparsity import (
    extrapolate,
    measure_sparsity,
)

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
