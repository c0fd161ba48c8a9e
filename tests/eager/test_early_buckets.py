"""Buckets leave while autograd computes: as soon as their gradients are there, in the order in which it makes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import embrace_fx
from embrace_fx.cost import links as cost
from tests.eager.models import KINDS, WIDTH, WORDS, labelled
from tests.support.inside import session_of
from tests.support.ranks import run_ranks


class _Noting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, note: Callable[[], None]) -> Tensor:
        ctx.note = note
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.note()
        return gradients[0], None


class Backwards(nn.Module):
    """Its layers stand in the order in which their gradients come, and not in that in which they compute.

    `note` is called when the gradients of all layers are there, and that of the table is still to be computed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.head, self.last, self.first = nn.Linear(WIDTH, KINDS), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.rows = nn.Embedding(WORDS, WIDTH)
        self.note: Callable[[], None] = lambda: None

    def forward(self, ids: Tensor, kinds: Tensor) -> Tensor:
        hidden: Tensor = _Noting.apply(self.rows(ids).mean(1), self.note)  # type: ignore[no-untyped-call]
        return F.cross_entropy(self.head(torch.tanh(self.last(torch.tanh(self.first(hidden))))), kinds)


def _note_launches(launcher: Any, launched: list[str]) -> None:
    submit = launcher.submit

    def noting(which: Any, *more: Any) -> Any:
        launched.append(which.what)
        return submit(which, *more)

    launcher.submit = noting


def _launched_early(rank: int, world_size: int) -> tuple[list[tuple[str, ...]], list[str], list[str]]:
    """The buckets; what has been launched when `note` is called; what has at the end of the backward."""
    bucket_bytes, early, launched = cost.choose_bucket_bytes, list[str](), list[str]()
    cost.choose_bucket_bytes = lambda *arguments, **options: 4 * WIDTH * (WIDTH + 1)  # one layer per bucket
    try:
        torch.manual_seed(0)
        model = Backwards()
        compiled: Any = embrace_fx.compile(model, route="eager")
        optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
        for step in range(5):
            if step == 4:
                _note_launches(session_of(compiled).programs.flow.launcher, launched)
                model.note = lambda: early.extend(launched)
            compiled(*labelled(step, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
        buckets = list(compiled.plan.buckets)
        compiled.close()
    finally:
        cost.choose_bucket_bytes = bucket_bytes
    return buckets, early, launched


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.long)])
def test_buckets_leave_before_the_end_of_the_backward(world_size: int) -> None:
    for buckets, early, launched in run_ranks(world_size, _launched_early):
        assert [{name.partition(".")[0] for name in bucket} for bucket in buckets] == [
            {"head"},
            {"last"},
            {"first"},
            {"rows"},
        ]
        assert early == ["bucket 0", "bucket 1", "bucket 2"]
        assert launched == ["bucket 0", "bucket 1", "bucket 2", "bucket 3"]
