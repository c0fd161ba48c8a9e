"""Evaluations between steps: as they are written where every table is whole, whatever route steps take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam

import embrace_fx
from tests.support.beside import check, ids, train


class Branching(nn.Module):
    """Branches on values during evaluation, which cannot be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.out = nn.Embedding(50, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, ids: Tensor) -> Tensor:
        found = self.out(self.norm(self.words(ids)))
        if not self.training:
            return -found.sum() if float(found.sum()) > 0 else found.sum()
        return found.square().mean()


def _evaluates(model: Any, rank: int) -> list[Tensor]:
    found = []
    for step in range(0, 8, 2):
        train(model, [(ids(k, rank, 4 + k % 3),) for k in (step, step + 1)], Adam)
        with torch.no_grad():
            found.append(model.eval()(ids(step, rank, 4)))
        model.train()
    assert not isinstance(model, embrace_fx.CompiledModel) or model.graphs.reason == ""
    return found


CASES = {"evaluates": (Branching, _evaluates)}


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["none", "2d"])
def test_whole_tables_are_evaluated_as_the_model_is_written(schedule: str) -> None:
    check(__name__, strategy="allreduce", schedule=schedule, cluster=embrace_fx.Cluster(), rtol=1e-5)
