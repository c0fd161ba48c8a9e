"""Buffers as under DDP: rank 0's before each forward, whoever changed them; none under no_sync, or where asked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.beside import check

DIM = 4


class Buffered(nn.Module):
    """Has a buffer that the forward only reads, a buffer that the forward updates, and a BatchNorm."""

    scale: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM)
        self.register_buffer("scale", torch.ones(DIM))
        self.register_buffer("seen", torch.zeros(DIM))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.mul_(0.9).add_(x.detach().mean(0))
        return (self.norm(self.linear(x) * self.scale) + self.seen).square().mean()


def _losses(model: Any, rank: int) -> list[Tensor]:
    plain, found = model.module, []

    def call(*numbers: int) -> None:
        for k in numbers:
            loss = model(torch.randn((6, DIM), generator=torch.Generator().manual_seed(10 * k + rank)))
            if loss.requires_grad:
                loss.backward()
            found.extend([loss.detach(), *(b.clone().double() for b in plain.buffers())])

    call(0)
    with torch.no_grad():
        plain.scale.add_(rank + 1.0)  # in place, with a different value on each rank
    call(1)
    if rank == 0:
        plain.scale = plain.scale * 2  # a new tensor, on rank 0 only
    call(2)
    if rank == 1:
        plain.scale.zero_()  # has no effect, because rank 0's buffers overwrite those of rank 1
    call(3)
    with model.no_sync():
        for k in range(4, 7):
            call(k)
            if rank == 0:
                plain.scale.add_(1.0)
    call(7, 8)
    model.eval()
    with torch.no_grad():
        call(9)
        if rank == 0:
            plain.norm.get_buffer("running_mean").add_(1.0)
        call(10)
    model.train()
    call(11, 12)
    plain.norm.eval()  # reads the running statistics that training has changed
    call(13, 14)
    model.eval()
    with torch.no_grad():
        call(15, 16)  # each call changes buffers that the next one reads
    model.train()
    call(17)
    plain.norm.eval()
    call(18)
    model.train()
    with torch.no_grad():  # as in `update_bn`: training mode without gradients
        call(19, 20)
        model.eval()
        call(21)
    return found


CASES = {"buffers": (Buffered, _losses)}


@pytest.mark.filterwarnings("ignore::FutureWarning")  # DDP warns about its older name for the option
@pytest.mark.parametrize(
    ("ddp", "broadcast"),
    [({}, True), ({"broadcast_buffers": False}, False), ({"forward_sync_buffers": False}, "once")],
    ids=["rank 0's", "each rank's own", "rank 0's once"],
)
@pytest.mark.parametrize("route", [pytest.param("graph", marks=pytest.mark.long), "eager"])
def test_forwards_read_the_buffers_that_are_asked_for(ddp: dict[str, Any], broadcast: Any, route: Any) -> None:
    check(__name__, ddp=ddp, broadcast_buffers=broadcast, route=route)
