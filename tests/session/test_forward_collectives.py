"""Collectives of the user's in a forward: run as written, as under DDP, or refused in one line.

Shape legend
    B examples; D columns.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD

import embrace_fx
from tests.support.beside import check, ids
from tests.support.ranks import run_ranks

B, D = 4, 8
Combine = Callable[[Tensor], Tensor]


class Words(nn.Module):
    """Encodes words, and passes them to a function that communicates."""

    def __init__(self, combine: Combine) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words = nn.Embedding(50, D)
        self.inner = nn.Linear(D, D)
        self.combine = combine

    def forward(self, ids_BT: Tensor) -> Tensor:
        return self.combine(self.inner(self.words(ids_BT)).mean(1))


def contrast(own_BD: Tensor, all_ND: Tensor) -> Tensor:
    """Returns a contrastive loss: each example must match itself among the examples of all ranks."""
    mine = torch.arange(len(own_BD)) + len(own_BD) * dist.get_rank()
    return F.cross_entropy(own_BD @ all_ND.t(), mine)


def reduced_in_place(x: Tensor) -> Tensor:
    mean = x.mean(0)
    dist.all_reduce(mean)
    return (x - mean / 2).square().sum()


def gathered_with_gradient(x: Tensor) -> Tensor:
    return contrast(x, torch.cat(differentiable.all_gather(x)))


class Weighed(torch.autograd.Function):
    """A collective of the forward whose value the backward alone reads, and one in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        weight = x.detach().mean()
        dist.all_reduce(weight)
        ctx.save_for_backward(weight)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        (weight,) = ctx.saved_tensors
        return gradient * weight


def weighed_by_function(x: Tensor) -> Tensor:
    y = Weighed.apply(x)  # type: ignore[no-untyped-call]
    least = y.detach().mean(0)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return (y * least).mean()


def batch(step: int, rank: int, length: int = 3) -> Tensor:
    return ids(step, rank, B, length)


def loop(model: Any, rank: int) -> list[Tensor]:
    """Trains, accumulates over two batches, and evaluates, while the batches of one rank change their shape."""
    optimizer, losses = SGD(model.parameters(), lr=0.2), []
    for step in range(3):
        if step == 1:
            with model.no_sync():
                model(batch(7, rank)).backward()
        loss = model(batch(step, rank, 3 + rank * (step == 2)))
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return [*losses, model.eval()(batch(3, rank))]


CASES = {
    each.__name__: (partial(Words, each), loop)
    for each in (reduced_in_place, gathered_with_gradient, weighed_by_function)
}


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"schedule": "none"}, marks=pytest.mark.long)], ids=["common", "asked for a graph"]
)
@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning", "ignore:c10d.*autograd kernel:UserWarning")
def test_collectives_of_the_forward_are_those_of_ddp(options: dict[str, Any]) -> None:
    check(__name__, rtol=1e-5, **options)


def asynchronous(x: Tensor) -> Tensor:
    mean = x.detach().mean(0)
    work = dist.all_reduce(mean, async_op=True)
    work.wait()
    return (x * mean).sum()


def objects(x: Tensor) -> Tensor:
    found: list[Any] = [None, None]
    dist.all_gather_object(found, dist.get_rank())
    return x.square().sum() * sum(found)


def send(x: Tensor) -> Tensor:
    theirs = torch.empty_like(x)
    if dist.get_rank() == 0:
        dist.send(x.detach(), 1)
    else:
        dist.recv(theirs, 0)
    return (x * theirs).sum()


def refuse_and_go_on(rank: int, world_size: int) -> list[str]:
    told = []
    shards: dict[str, Any] = {"strategy": "alltoall"}
    cases = ((reduced_in_place, shards), (reduced_in_place, {"route": "graph"}), (asynchronous, shards), (send, shards))
    for combine, options in (*cases, (objects, {"route": "graph"})):
        compiled: Any = embrace_fx.compile(Words(combine), **options)
        with pytest.raises(embrace_fx.CaptureError, match="the forward communicates") as caught:
            compiled(batch(0, rank))
        compiled.close()
        told.append(str(caught.value).partition("() at ")[0].rpartition("It calls ")[2])
    return told


def test_where_shards_or_a_graph_are_asked_for_they_are_refused_on_every_rank() -> None:
    for told in run_ranks(2, refuse_and_go_on):
        assert told[:3] == ["torch.distributed.all_reduce"] * 3
        assert told[4] == "torch.distributed.all_gather_object"
        assert told[3] in ("torch.distributed.send", "torch.distributed.recv")  # from whichever rank reports first
