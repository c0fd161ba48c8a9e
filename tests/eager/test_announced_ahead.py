"""Under the eager route ranks meet at the head of a backward: a forward waits for none. Mistakes are still named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import embrace_fx
from tests.eager.models import Asserting, labelled
from tests.support.ranks import run_ranks, store

STEPS, PLANNED = 7, 4


class _Noting(Asserting):
    """Calls `after` at the end of its forward."""

    after = staticmethod(lambda: None)

    def forward(self, *batch: Tensor) -> Tensor:
        loss = super().forward(*batch)
        self.after()
        return loss


def _losses(model: nn.Module, rank: int, begin: Callable[[int], None] = lambda step: None) -> list[float]:
    """Trains, and returns the losses. Calls `begin` at the beginning of each step."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(STEPS):
        begin(step)
        optimizer.zero_grad()
        losses.append(model(*labelled(step, rank)))
        losses[-1].backward()
        optimizer.step()
    return [loss.item() for loss in losses]


def _one_after_the_other(rank: int, world_size: int) -> tuple[list[float], list[float]]:
    """Delays each later forward of rank 1 until rank 0 has ended its own. Returns losses of embrace_fx and of DDP."""
    torch.manual_seed(0)
    model: Any = _Noting()

    def begin(step: int) -> None:
        if step >= PLANNED and rank == 0:
            model.after = lambda: store().set(f"ended {step}", "")
        if step >= PLANNED and rank == 1:
            store().wait([f"ended {step}"])

    found = _losses(embrace_fx.compile(model, route="eager"), rank, begin)
    torch.manual_seed(0)
    return found, _losses(nn.parallel.DistributedDataParallel(Asserting()), rank)


def test_a_forward_waits_for_no_other_rank() -> None:
    for found, expected in run_ranks(2, _one_after_the_other):
        assert found == pytest.approx(expected, rel=1e-6)


def _skips_a_backward(rank: int, world_size: int) -> tuple[str, str, list[Tensor]]:
    """Omits one backward on rank 1. Returns which call raised ("forward" or "backward"), its error, and parameters."""
    torch.manual_seed(0)
    compiled = embrace_fx.compile(Asserting(), route="eager")
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    where = told = ""
    for step in range(STEPS):
        here = "forward"
        try:
            loss = compiled(*labelled(step, rank))
            here = "backward"
            if rank == 1 and step == PLANNED:
                continue
            loss.backward()
        except Exception as error:
            where, told = here, f"{type(error).__name__}: {error}"
            optimizer.zero_grad()
            continue
        optimizer.step()
        optimizer.zero_grad()
    return where, told, [parameter.detach().clone() for parameter in compiled.parameters()]


@pytest.mark.filterwarnings("ignore:All ranks abandoned the previous call:RuntimeWarning")
def test_a_rank_that_skips_a_backward_is_named_before_anything_is_applied() -> None:
    (where, told, parameters), (*_, others) = run_ranks(2, _skips_a_backward)
    assert where == "backward"
    assert "rank 1: this rank called the model again without a backward" in told
    for found, other in zip(parameters, others, strict=True):
        torch.testing.assert_close(found, other, rtol=0, atol=0)
