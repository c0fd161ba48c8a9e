"""Buffers as under DDP: rank 0's before each forward, whoever changed them; none under no_sync, or where asked."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import embrace_fx
from tests.support.ranks import run_ranks

DIM = 4


class Buffered(nn.Module):
    """A buffer that the forward only reads, one that it lives on, a BatchNorm."""

    scale: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.norm = nn.BatchNorm1d(DIM)
        self.register_buffer("scale", torch.ones(DIM))
        self.register_buffer("seen", torch.zeros(DIM))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.mul_(0.9).add_(x.detach().mean(0))
        return self.norm(self.linear(x) * self.scale) + self.seen


def _losses(rank: int, wrap: Callable[[nn.Module], Any]) -> list[Tensor]:
    torch.manual_seed(rank)
    plain = Buffered()
    model = wrap(plain)
    found = []

    def call(k: int, backward: bool = True) -> None:
        x = torch.randn((6, DIM), generator=torch.Generator().manual_seed(10 * k + rank))
        loss = model(x).square().mean()
        if backward:
            loss.backward()
        found.extend([loss.detach(), *(b.clone().double() for b in (plain.scale, plain.seen))])

    call(0)
    with torch.no_grad():
        plain.scale.add_(rank + 1.0)  # in place, on every rank, another value on each
    call(1)
    if rank == 0:
        plain.scale = plain.scale * 2  # another tensor, on one rank
    call(2)
    if rank == 1:
        plain.scale.zero_()  # on a rank whose buffers do not count
    call(3)
    with model.no_sync():
        for k in range(4, 7):
            call(k)
            if rank == 0:
                plain.scale.add_(1.0)
    for k in range(7, 9):
        call(k)
    model.eval()
    with torch.no_grad():
        call(9, backward=False)
        if rank == 0:
            plain.norm.get_buffer("running_mean").add_(1.0)
        call(10, backward=False)
    model.train()
    call(11)
    call(12)
    model.eval()
    with torch.no_grad():
        call(13, backward=False)
    return found


def _compared(rank: int, world_size: int, of_ddp: dict[str, Any], options: dict[str, Any]) -> None:
    warnings.simplefilter("ignore", FutureWarning)  # of the older name
    expected = _losses(rank, lambda m: DistributedDataParallel(m, **of_ddp))
    found = _losses(rank, lambda m: embrace_fx.compile(m, **options))
    for k, (one, other) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(one, other, msg=partial("value {} of call {}: {}".format, k % 3, k // 3))


def test_forwards_read_the_buffers_of_rank_0() -> None:
    run_ranks(2, _compared, {}, {})


def test_each_rank_keeps_its_own_buffers_where_that_is_asked() -> None:
    run_ranks(2, _compared, {"broadcast_buffers": False}, {"broadcast_buffers": False})


def test_each_rank_goes_on_from_rank_0s_buffers_where_that_is_asked() -> None:
    run_ranks(2, _compared, {"forward_sync_buffers": False}, {"broadcast_buffers": "once"})
