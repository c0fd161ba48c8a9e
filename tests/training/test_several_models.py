"""Two models in one process, of one and of several dtypes, in a group of some ranks: each as under DDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam

import embrace_fx
from tests.support.ranks import run_ranks

NUM_IDS, DIM = 12, 4


class Mixed(nn.Module):
    """A table and a layer in single precision, a table and a layer in bfloat16, a head in double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.ids = nn.Embedding(NUM_IDS, DIM)
        self.narrow = nn.Embedding(NUM_IDS, DIM, dtype=torch.bfloat16)
        self.hidden = nn.Linear(DIM, DIM)
        self.middle = nn.Linear(DIM, DIM, dtype=torch.bfloat16)
        self.out = nn.Linear(DIM, 1, dtype=torch.float64)

    def forward(self, ids: Tensor) -> Tensor:
        narrow = self.middle(self.narrow(ids))
        return self.out((torch.tanh(self.hidden(self.ids(ids))) + narrow).double()).square().mean()


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ids = nn.Embedding(NUM_IDS, DIM)
        self.score = nn.Linear(DIM, 1)

    def forward(self, ids: Tensor, scale: Tensor) -> Tensor:
        return (self.score(self.ids(ids)).mean() - scale).square()


def _trained(rank: int, wrap: Callable[[nn.Module], Any]) -> dict[str, Tensor]:
    """Each model's loss reads what the other one has just become."""
    torch.manual_seed(0)
    models = [wrap(Mixed()), wrap(Critic())]
    optimizers = [Adam(model.parameters(), 0.01, eps=1e-3) for model in models]
    for k in range(4):
        ids = torch.randint(NUM_IDS, (6,), generator=torch.Generator().manual_seed(10 * k + rank))
        first = models[0](ids)
        second = models[1](ids, first.detach().float())
        (second if k % 2 else first).backward()
        (first if k % 2 else second).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found = {}
    for k, model in enumerate(models):
        for name, value in embrace_fx.full_state_dict(model).items():
            found[f"{k}.{name.removeprefix('module.')}"] = value.detach().clone()
    return found


def _compared(rank: int, world_size: int) -> None:
    group = dist.new_group([1, 2])
    if rank == 0:  # trains alone meanwhile
        alone = embrace_fx.compile(Mixed(), process_group=dist.new_group([0], use_local_synchronization=True))
        alone(torch.arange(4)).backward()
        return
    expected = _trained(rank, lambda model: DistributedDataParallel(model, process_group=group))
    for strategy in ("auto", "alltoall"):
        found = _trained(rank, lambda m, s=strategy: embrace_fx.compile(m, process_group=group, strategy=s))  # type: ignore[misc]
        torch.testing.assert_close(found, expected)


@pytest.mark.long
def test_two_models_of_a_group_of_some_ranks() -> None:
    run_ranks(3, _compared)


class Half(nn.Module):
    """A head on a table that another model has, too."""

    def __init__(self, ids: nn.Embedding) -> None:
        super().__init__()
        self.ids, self.out = ids, nn.Linear(DIM, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.ids(ids)).square().mean()


def _of_one_table(rank: int, wrap: Callable[[nn.Module], Any]) -> list[Tensor]:
    """One backward comes to both models."""
    torch.manual_seed(0)
    table = nn.Embedding(NUM_IDS, DIM)
    plain = [Half(table), Half(table)]
    models = [wrap(each) for each in plain]
    optimizer = Adam(dict.fromkeys(p for model in models for p in model.parameters()), 0.01, eps=1e-3)
    for k in range(6):
        random = torch.Generator().manual_seed(10 * k + rank)
        losses = [model(torch.randint(NUM_IDS, (6,), generator=random)) for model in models]
        optimizer.zero_grad()
        (losses[0] + losses[1]).backward()
        optimizer.step()
    return [parameter.detach().clone() for each in plain for parameter in each.parameters()]


def _one_table_beside_ddp(rank: int, world_size: int, route: Any) -> None:
    found = _of_one_table(rank, lambda m: embrace_fx.compile(m, strategy="allreduce", route=route))
    torch.testing.assert_close(found, _of_one_table(rank, DistributedDataParallel))


@pytest.mark.parametrize("route", [pytest.param(None, marks=pytest.mark.long), "eager"])
def test_two_models_with_one_table(route: str | None) -> None:
    run_ranks(2, _one_table_beside_ddp, route)
