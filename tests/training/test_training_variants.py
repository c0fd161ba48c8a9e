"""Training on odd batches and odd tables; the plain case, each model with each optimizer, is test_training.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import embrace_fx
from tests.support.lookups import LookupsWorkload
from tests.support.ranks import run_ranks
from tests.support.reference import assert_same
from tests.support.training import Way, expected_parameters, train_compiled, whole_parameters

STEPS = 8
DTYPE = torch.float64


def test_max_norm_shortens_the_same_rows_on_every_rank() -> None:
    workload, way = LookupsWorkload(max_norm=2.0), Way("alltoall", steps=STEPS)
    expected = expected_parameters(2, workload, DTYPE, "adam", steps=STEPS)
    for result in run_ranks(2, train_compiled, workload, DTYPE, "adam", "exact", way):
        assert result.strategies == {"table.weight": "allreduce"}
        assert_same(result.parameters, expected, DTYPE)


class Summed(nn.Module):
    """Reads one row many times. Each of its gradients is 100, and their sum is 100,000."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4, _weight=torch.full((10, 4), 1e-3))
        self.linear = nn.Linear(4, 1, bias=False)
        nn.init.constant_(self.linear.weight, 100.0)

    def forward(self, ids: Tensor) -> Tensor:
        return self.linear(self.table(ids)).float().sum()


def sums_beyond_half_precision(rank: int, world_size: int) -> Tensor:
    model = Summed()
    compiled = embrace_fx.compile(model, optimizer=SGD(model.parameters(), 1e-4), strategy="alltoall")
    with torch.autocast("cpu", torch.float16):
        loss = compiled(torch.zeros(1000, dtype=torch.long))
    loss.backward()
    compiled.optimizer.step()
    return whole_parameters(compiled)["table.weight"][0]


def test_a_rows_gradient_may_be_beyond_half_precision() -> None:
    for row in run_ranks(2, sums_beyond_half_precision):
        torch.testing.assert_close(row, torch.full((4,), 1e-3 - 10.0))


def clips_half_precision(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """Returns the total norm and the clipped gradients of a model whose squared gradients overflow float16."""
    model = nn.Linear(8, 8, bias=False).half()
    compiled = embrace_fx.compile(model, optimizer=SGD(model.parameters(), 0.1))
    (compiled(torch.ones(2, 8, dtype=torch.float16)).sum() * 200).backward()
    norm = compiled.clip_grad_norm_(1.0)
    assert model.weight.grad is not None
    return norm, model.weight.grad.clone()


@pytest.mark.parametrize("world_size", [1, 2])
def test_clipping_in_half_precision(world_size: int) -> None:
    for norm, gradient in run_ranks(world_size, clips_half_precision):
        assert norm.item() == pytest.approx(400 * 8, rel=1e-3)
        torch.testing.assert_close(gradient.float(), torch.full((8, 8), 1 / 8), rtol=1e-2, atol=0.0)
