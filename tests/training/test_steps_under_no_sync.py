"""Steps that take what each rank has accumulated for itself: as under DDP, or refused where a table has one copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import embrace_fx
from tests.support.ranks import run_ranks
from tests.support.training import whole_parameters


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(30, 4)
        self.other = nn.Embedding(20, 4)
        self.linear = nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.linear(self.words(ids) * self.other(ids % 20)).square().mean()


def _train(rank: int, wrap: Any, optimizer: str) -> tuple[list[Tensor], list[str]]:
    """Every third step begins with a backward under `no_sync()` that a step takes at once."""
    torch.manual_seed(0)
    model = wrap(Bags().double())
    steps = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1)
    told = []
    for step in range(7):
        random = torch.Generator().manual_seed(10 * step + rank)
        ids = torch.randint(30, (6,), generator=random)
        if step % 3 == 1:
            with model.no_sync():
                model(ids).backward()
            try:
                steps.step()
            except RuntimeError as error:
                told.append(str(error))
        model(ids).backward()
        steps.step()
        steps.zero_grad()
    return [*whole_parameters(model).values()], told


def _beside_ddp(rank: int, world_size: int, strategy: str, optimizer: str) -> Any:
    def compiled(model: nn.Module) -> Any:
        return embrace_fx.compile(model, strategy=strategy)

    return _train(rank, compiled, optimizer), _train(rank, DistributedDataParallel, optimizer)


@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad"])
def test_of_whole_tables_each_rank_steps_its_own(optimizer: str) -> None:
    for (found, told), (expected, _) in run_ranks(2, _beside_ddp, "allreduce", optimizer):
        assert told == []
        torch.testing.assert_close(found, expected)


def _goes_on(rank: int, world_size: int, optimizer: str) -> tuple[list[Tensor], list[str]]:
    return _train(rank, lambda model: embrace_fx.compile(model, strategy="alltoall"), optimizer)


@pytest.mark.parametrize("optimizer", ["Adagrad", "AdamW"])
def test_of_sharded_tables_every_rank_is_refused_and_may_go_on(optimizer: str) -> None:
    (one, told), (other, also_told) = run_ranks(2, _goes_on, optimizer)
    assert told == also_told
    assert len(told) == 2
    assert "Leave no_sync() for the last backward" in told[0]
    torch.testing.assert_close(one, other)
