"""Sharded tables beside the exchanges of replicas: gradients of the same patterns, whose mean is the dense AllReduce's.

The table is zero, and SGD's learning rate is 1: after a step it is the mean, negated. Gradients of float64 are
multiples of 12, of which each rank's share and their sums are exact.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

import embrace_fx
from embrace_fx.vocabulary.plan import Grid
from tests.support.exchange_cases import DTYPES, PATTERNS, D, V
from tests.support.ranks import run_ranks
from tests.support.training import whole_parameters


class Table(nn.Module):
    """The gradient of its rows is what they are multiplied with."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.table = nn.Embedding(V, D, _weight=torch.zeros(V, D, dtype=dtype))

    def forward(self, ids: Tensor, factors: Tensor) -> Tensor:
        loss: Tensor = (self.table(ids) * factors).sum()
        return loss


def gradient_of(pattern: str, dtype: torch.dtype, rank: int, world_size: int) -> Tensor:
    torch.manual_seed(100 * list(PATTERNS).index(pattern) + rank)
    mask = PATTERNS[pattern](rank, world_size)
    values = 12 * torch.randint(1, 100, (V, D)).double() if dtype == torch.float64 else torch.randn(V, D)
    return torch.where(mask, values, 0).to(dtype)


def exchange_all(rank: int, world_size: int, grids: list[Grid | None]) -> list[str]:
    """What is wrong, of every pattern in every dtype, over columns and over grids."""
    faults = []
    for dtype in DTYPES:
        for grid in grids:
            model = Table(dtype)
            optimizer = SGD(model.parameters(), 1.0)
            strategy = {"table.*": grid or "alltoall"}
            compiled = embrace_fx.compile(model, optimizer=optimizer, strategy=strategy)
            for pattern in PATTERNS:
                gradient = gradient_of(pattern, dtype, rank, world_size)
                ids = gradient.any(dim=1).nonzero().view(-1)
                compiled(ids, gradient[ids]).backward()
                compiled.optimizer.step()
                compiled.optimizer.zero_grad()
                compiled.synchronize()
                found = -whole_parameters(compiled)["table.weight"]
                largest = gradient.abs().max().double()
                expected = gradient.double()
                dist.all_reduce(largest, dist.ReduceOp.MAX)
                dist.all_reduce(expected)
                expected /= world_size
                exact = dtype == torch.float64
                allowed = 0.0 if exact else (world_size + 1) * torch.finfo(dtype).eps * float(largest)
                off = float((found.double() - expected).abs().max())
                if found.dtype != dtype or off > allowed:
                    faults.append(f"{pattern}, {dtype}, {grid}: {found.dtype}, off by {off}, allowed {allowed}")
                compiled.load_state_dict({"table.weight": torch.zeros(V, D, dtype=dtype)})
            if compiled.plan["table.weight"].strategy != "alltoall":
                faults.append(f"{dtype}, {grid}: {compiled.plan['table.weight'].strategy}")
    return faults


@pytest.mark.long
@pytest.mark.parametrize(
    ("world_size", "grids"),
    [
        (1, [None]),
        (2, [None, Grid(2, 1)]),
        (3, [None, Grid(3, 1)]),
        (4, [None, Grid(2, 2), Grid(4, 1)]),
    ],
)
def test_the_mean_is_the_dense_all_reduces(world_size: int, grids: list[Grid | None]) -> None:
    assert run_ranks(world_size, exchange_all, grids) == [[]] * world_size
