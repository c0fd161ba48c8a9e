"""Loops of models that no graph holds, each beside DDP; habits of others are scenarios, which run eagerly, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.eager.models import Batch, Critic, Experts, Repeating, Turning, drawn, labelled, placed
from tests.support.beside import check

pytestmark = pytest.mark.filterwarnings("ignore:Grad strides do not match bucket view strides:UserWarning")  # DDP's

STEPS = 6
UNUSED = {"find_unused_parameters": True}


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def _step(model: Any, optimizer: torch.optim.Optimizer, batch: Batch) -> float:
    optimizer.zero_grad()
    loss: Tensor = model(*batch)
    loss.backward()
    optimizer.step()
    return loss.item()


def joining_before_a_turn(model: Any, rank: int) -> list[float]:
    """The last rank that has batches comes to one of which there is no graph."""
    optimizer = _adam(model)
    with model.join():
        return [
            _step(model, optimizer, (*labelled(step, rank), rank == 0 and step >= 4))
            for step in range(STEPS - 2 * rank)
        ]


def own_experts(model: Any, rank: int) -> list[float]:
    """Each rank has ids of its own, and so other experts; most of them have no gradient on a rank."""
    optimizer, losses = _adam(model), []
    for step in range(STEPS):
        ids = drawn(step, rank, 1, 1, high=8) + 8 * rank
        losses.append(_step(model, optimizer, (ids, drawn(step, rank, 1, high=3, of=1))))
    return losses


def penalised(model: Any, rank: int) -> list[float]:
    """The loss has the slope of the scores by the batch, a gradient that is differentiated again."""
    optimizer, losses = _adam(model), []
    for step in range(STEPS):
        optimizer.zero_grad()
        place = placed(step, rank)[1].requires_grad_()
        scores = model(place)
        (slope,) = torch.autograd.grad(scores.sum(), place, create_graph=True)
        loss = scores.mean() + (slope.norm(dim=1) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def plain(model: Any, rank: int) -> list[float]:
    optimizer = _adam(model)
    return [_step(model, optimizer, labelled(step, rank)) for step in range(STEPS)]


CASES = {
    "joining before a turn": (Turning, joining_before_a_turn),
    "own experts": (Experts, own_experts),
    "penalised": (Critic, penalised),
    "plain": (Repeating, plain),
}


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_each_loop_ends_where_ddp_ends(name: str, ranks: int) -> None:
    check(__name__, name, ranks=ranks, ddp=UNUSED, dtype=torch.float64, says="route: eager", rtol=1e-9)
