"""Models that run as written and are frozen for some calls, as discriminators are: gradients go through; beside DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.beside import check


def judge() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))


def _freezes(model: Any, rank: int) -> list[Any]:
    optimizer, found = torch.optim.AdamW(model.parameters(), 0.05, eps=1e-3), []
    for step in range(5):
        judged = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank)).requires_grad_()
        model.module.requires_grad_(step % 2 == 0)
        loss = model(judged).square().mean()
        loss.backward()
        found += [loss.detach(), judged.grad]
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return [*found, model.eval()(torch.ones(1, 4))]  # statistics of batches are shared before they are read


CASES = {"frozen": (judge, _freezes), "frozen, normed": (normed, _freezes)}


@pytest.mark.parametrize("name", CASES)
def test_a_model_frozen_for_some_calls_passes_gradients_through(name: str) -> None:
    check(__name__, name, route="eager", dtype=torch.float64, rtol=1e-9)
