"""Parameters that a loss reads without a call of the model, or under `no_sync`: refused, and training goes on.

That they are averaged as under DDP besides a call is in `tests.support.scenarios.losses`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import embrace_fx
from tests.support.ranks import run_ranks
from tests.support.scenarios.losses import Scaled
from tests.support.sides import DTYPE, draw_batch


def scaled(model: Any, step: int, rank: int) -> Tensor:
    return model(*draw_batch(step, rank)) * model.module.logit_scale.exp()


def train(model: Any, rank: int) -> list[Tensor]:
    optimizer, losses = SGD(model.parameters(), lr=0.3), []
    for step in range(3):
        losses.append(scaled(model, step, rank))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def refuse_and_go_on(rank: int, world_size: int) -> list[str]:
    told = []
    torch.manual_seed(1)
    plain = Scaled().to(DTYPE)
    wrapped = DistributedDataParallel(Scaled().to(DTYPE))
    wrapped.module.load_state_dict(plain.state_dict())
    model = embrace_fx.compile(plain, strategy="alltoall")
    train(model, rank)
    train(wrapped, rank)
    with pytest.raises(RuntimeError) as caught:
        (0.1 * model.get_parameter("words.weight").norm()).backward()
    told.append(str(caught.value))
    with pytest.raises(RuntimeError) as caught, model.no_sync():
        scaled(model, 0, rank).backward()
    told.append(str(caught.value))
    model.zero_grad()
    assert all(map(torch.allclose, train(model, rank), train(wrapped, rank)))
    module: Any = model.module
    alone = module.second.weight.square().sum()  # a loss without a call of the model has a local gradient, as under DDP
    if rank == 0:
        alone.backward()
    return told


def test_without_a_call_they_are_refused_and_training_goes_on() -> None:
    for of_rows, accumulating in run_ranks(2, refuse_and_go_on):
        assert "reads the sharded words.weight but does not depend on a call" in of_rows
        assert "strategy={'words.weight': 'allreduce'}" in of_rows
        assert "under no_sync(): the loss reads logit_scale" in accumulating
