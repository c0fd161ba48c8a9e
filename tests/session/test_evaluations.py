"""Evaluations between steps: as they are written where every table is whole, whatever route steps take."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import embrace_fx
from tests.support.ranks import run_ranks


class Branching(nn.Module):
    """Decides by its values where it evaluates, which no graph holds."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 8)
        self.norm = nn.BatchNorm1d(8)
        self.out = nn.Linear(8, 1)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.out(self.norm(self.words(ids)))
        if not self.training and float(found.sum()) > 0:
            found = -found
        return found


def _train(model: nn.Module, rank: int) -> list[float]:
    generator, found = torch.Generator().manual_seed(rank), []
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for step in range(8):
        ids = torch.randint(50, (4 + step % 3,), generator=generator)
        model(ids).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 2:
            model.eval()
            with torch.no_grad():
                found.append(model(ids).sum().item())
            model.train()
    return found


def _beside_ddp(rank: int, world_size: int, options: dict[str, Any]) -> str:
    torch.manual_seed(0)
    plain = Branching()
    other = DistributedDataParallel(copy.deepcopy(plain))
    model = embrace_fx.compile(plain, cluster=embrace_fx.Cluster(), **options)
    torch.testing.assert_close(_train(model, rank), _train(other, rank), rtol=1e-5, atol=1e-6)
    return model.graphs.reason


def test_whole_tables_are_evaluated_as_the_model_is_written() -> None:
    for schedule in ("none", "2d"):
        assert run_ranks(2, _beside_ddp, {"strategy": "allreduce", "schedule": schedule}) == ["", ""]
