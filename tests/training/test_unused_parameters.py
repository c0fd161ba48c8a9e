"""Parameters that no rank uses under `join`: gradients are there as under DDP, None included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import embrace_fx
from tests.support.ranks import run_ranks
from tests.support.scenarios.losses import NUM_IDS, Branches

DTYPE = torch.float64


def _ids(rank: int, step: int) -> Tensor:
    return torch.randint(NUM_IDS, (5,), generator=torch.Generator().manual_seed(10 * step + rank))


def _present(rank: int, wrap: Callable[[nn.Module], Any], *, in_place: bool) -> list[list[bool]]:
    """By step, which parameters have a gradient, while ranks run out of batches."""
    torch.manual_seed(0)
    model = wrap(Branches().to(DTYPE))
    optimizer, found = SGD(model.parameters(), 0.1), []
    with model.join():
        for k, taken in enumerate(("ab", "", "a", "", "b", "")[: 3 + 3 * rank]):
            model(_ids(rank, k), taken).backward()
            found.append([parameter.grad is not None for parameter in model.module.parameters()])
            optimizer.step()
            optimizer.zero_grad(set_to_none=not in_place)
    return found


def _present_as_under_ddp(rank: int, world_size: int) -> None:
    for in_place in (False, True):
        with_ddp = _present(rank, lambda m: DistributedDataParallel(m, find_unused_parameters=True), in_place=in_place)
        ours = _present(rank, lambda m: embrace_fx.compile(m, strategy="alltoall"), in_place=in_place)
        assert ours == with_ddp


def test_what_a_rank_reached_before_it_ran_out_has_a_gradient_as_under_ddp() -> None:
    run_ranks(2, _present_as_under_ddp)
