"""Models that run as written and are frozen for some calls, as discriminators are: gradients go through; beside DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import embrace_fx
from tests.support.ranks import run_ranks


def _judge(*, normed: bool) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6) if normed else nn.Tanh(), nn.Linear(6, 1)).double()


def _trained(rank: int, compiled: bool, normed: bool) -> list[Tensor]:
    torch.manual_seed(0)
    plain = _judge(normed=normed)
    model: Any = embrace_fx.compile(plain, route="eager") if compiled else DistributedDataParallel(plain)
    optimizer, found = torch.optim.AdamW(model.parameters(), 0.05, eps=1e-3), list[Tensor]()
    for step in range(5):
        judged = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))
        judged.requires_grad_()
        plain.requires_grad_(step % 2 == 0)
        loss = model(judged).square().mean()
        loss.backward()
        assert judged.grad is not None
        found += [loss.detach(), judged.grad]
        optimizer.step()
        optimizer.zero_grad()
    return found + [value.detach() for value in plain.parameters()]


def _apart(rank: int, world_size: int, normed: bool) -> None:
    sides = [_trained(rank, compiled, normed) for compiled in (True, False)]
    torch.testing.assert_close(*sides, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("normed", [False, True])
def test_a_model_frozen_for_some_calls_passes_gradients_through(normed: bool) -> None:
    run_ranks(2, _apart, normed)
