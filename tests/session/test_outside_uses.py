"""Parameters that a loss reads besides the model's call: averaged over ranks as under DDP, shards of tables too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import embrace_fx
from tests.support.ranks import run_ranks
from tests.support.sides import DTYPE, Matching, draw_batch

Loss = Callable[[Any, Any, int, int], Tensor]


class Scaled(Matching):
    """With a scale that the training loop applies, as CLIP's is."""

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.zeros(()))


def plain(kind: type[Matching] = Matching) -> Matching:
    torch.manual_seed(1)
    return kind().to(DTYPE)


def scaled(model: Any, module: Any, step: int, rank: int) -> Tensor:
    found: Tensor = model(*draw_batch(step, rank)) * module.logit_scale.exp()
    return found


def weighted(model: Any, module: Any, step: int, rank: int) -> Tensor:
    """Each rank's own weight of a parameter that the forward reads too."""
    found: Tensor = model(*draw_batch(step, rank)) + (rank + step) * module.first.weight.square().mean()
    return found


def rows(model: Any, module: Any, step: int, rank: int) -> Tensor:
    found: Tensor = model(*draw_batch(step, rank)) + 0.1 * module.words.weight.norm(dim=1).sum()
    return found


def own_rows(model: Any, module: Any, step: int, rank: int) -> Tensor:
    """Rows that each rank chooses for itself, and its own weight of all."""
    ids = torch.arange(2 + rank) + step
    penalty = module.words.weight[ids].square().sum() + (rank + 1) * module.words.weight.square().mean()
    found: Tensor = model(*draw_batch(step, rank)) + 0.1 * penalty
    return found


def anchored(model: Any, module: Any, step: int, rank: int) -> Tensor:
    """As elastic weight consolidation: a weighted distance to what the weights were."""
    was = {name: value.detach().clone() * 0.9 for name, value in module.named_parameters()}
    apart = [(was[name].square() * (value - was[name]) ** 2).sum() for name, value in module.named_parameters()]
    found: Tensor = model(*draw_batch(step, rank)) + 0.5 * torch.stack(apart).sum()
    return found


def train(model: Any, loss_of: Loss, rank: int, accumulates: bool = False) -> list[Tensor]:
    optimizer, losses = SGD(model.parameters(), lr=0.3), []
    for step in range(3):
        if accumulates:
            with model.no_sync():
                loss_of(model, model.module, 7 + step, rank).backward()
        loss = loss_of(model, model.module, step, rank)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses + [value.clone() for value in embrace_fx.full_state_dict(model).values()]


CASES: list[tuple[type[Matching], Loss, str, bool]] = [
    (Scaled, scaled, "alltoall", False),
    (Matching, weighted, "alltoall", False),
    (Matching, weighted, "alltoall", True),
    (Matching, rows, "allreduce", False),
    (Matching, rows, "alltoall", False),
    (Matching, own_rows, "alltoall", False),
    (Matching, own_rows, "alltoall", True),
    (Matching, anchored, "alltoall", False),
]


def train_both(rank: int, world_size: int) -> list[str]:
    different = []
    for kind, loss_of, strategy, accumulates in CASES:
        found = train(embrace_fx.compile(plain(kind), strategy=strategy), loss_of, rank, accumulates)
        expected = train(DistributedDataParallel(plain(kind)), loss_of, rank, accumulates)
        if not all(map(torch.allclose, found, expected)):
            different.append(f"{loss_of.__name__}, {accumulates}: {found[:3]} for {expected[:3]}")
    return different


@pytest.mark.long
def test_their_gradients_are_averaged_as_under_ddp() -> None:
    assert run_ranks(2, train_both) == [[], []]


def refuse_and_go_on(rank: int, world_size: int) -> list[str]:
    told = []
    model = embrace_fx.compile(plain(Scaled), strategy="alltoall")
    wrapped = DistributedDataParallel(plain(Scaled))
    train(model, scaled, rank)
    train(wrapped, scaled, rank)
    with pytest.raises(RuntimeError) as caught:
        (0.1 * model.get_parameter("words.weight").norm()).backward()
    told.append(str(caught.value))
    with pytest.raises(RuntimeError) as caught, model.no_sync():
        scaled(model, model.module, 0, rank).backward()
    told.append(str(caught.value))
    model.zero_grad()
    assert all(map(torch.allclose, train(model, scaled, rank), train(wrapped, scaled, rank)))
    module: Any = model.module
    alone = module.second.weight.square().sum()  # no call of the model: this rank's own, as under DDP
    if rank == 0:
        alone.backward()
    return told


def test_without_a_call_they_are_refused_and_training_goes_on() -> None:
    for of_rows, accumulating in run_ranks(2, refuse_and_go_on):
        assert "expected the sharded words.weight in the loss of a call" in of_rows
        assert "strategy={'words.weight': 'allreduce'}" in of_rows
        assert "under no_sync() that reads logit_scale" in accumulating
