"""Rows that have left for the next batch, where the loop then changes what the step makes of them; beside DDP."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import embrace_fx
from tests.support.ranks import run_ranks

ROWS, WIDTH, STEPS = 30, 6, 8


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.out(self.words(ids).mean(1)).square().mean()
        return found


def batches(rank: int) -> list[Tensor]:
    """Each reads other rows than the one before, so that all rows of it leave early; row 0 is read by the odd ones."""
    return [torch.arange(3) + 3 * (k % 2 == 0) + 6 * rank + 12 * (k % 3 == 2) for k in range(STEPS)]


def of_unread_rows(table: Any, optimizer: Any) -> None:
    """Writes the gradient of rows that the next batch reads, and this one does not."""
    table.grad[:16] = 0.25


def of_first_row(table: Any, optimizer: Any) -> None:
    table.grad[:1] = 0.25


def clipped(table: Any, optimizer: Any) -> None:
    nn.utils.clip_grad_norm_([table], 0.05)


Write = Callable[[Any, Any], None]
"""Of the table, kept from before the first call, and its optimizer."""


def _train(model: Any, make: Any, rank: int, before: Write | None, after: Write | None) -> list[Tensor]:
    optimizer, table = make(model.parameters()), model.module.words.weight  # asked for once
    ids = [each[None] for each in batches(rank)]
    for k, batch in enumerate(model.lookahead(ids) if isinstance(model, embrace_fx.CompiledModel) else ids):
        optimizer.zero_grad()
        model(batch).backward()
        if before is not None and k % 2:
            before(table, optimizer)
        optimizer.step()
        if after is not None and k % 2:
            after(table, optimizer)
    whole = embrace_fx.full_state_dict(model.module)
    return [whole[name] for name in sorted(whole)]


def _both(
    rank: int, world_size: int, make: Any, schedule: Any, before: Write | None, after: Write | None
) -> tuple[list[Tensor], list[Tensor]]:
    found = []
    for compiled in (True, False):
        torch.manual_seed(0)
        plain = Words().double()
        model: Any = (
            embrace_fx.compile(plain, strategy={"words.weight": "alltoall"}, schedule=schedule)
            if compiled
            else DistributedDataParallel(plain)
        )
        found.append(_train(model, make, rank, before, after))
    return found[0], found[1]


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, 0.1)


def adamw(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, 0.02, eps=1e-3)


def pairs(cases: list[tuple[Any, ...]], default: tuple[int, ...]) -> list[Any]:
    """All cases, of which those by default have each pair of two values that are asked for together."""
    return [pytest.param(*each, marks=() if k in default else pytest.mark.long) for k, each in enumerate(cases)]


@pytest.mark.parametrize(
    ("before", "make", "schedule"),
    pairs(list(product([of_unread_rows, of_first_row, clipped], [sgd, adamw], ["2d", "vertical"])), (0, 3, 5, 6, 9)),
)
def test_gradients_written_between_backward_and_step(before: Write, make: Any, schedule: str) -> None:
    for ours, theirs in run_ranks(2, _both, make, schedule, before, None):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


def put(table: Any, optimizer: Any) -> None:
    """Puts other averages in the place of a table's."""
    state = optimizer.state[table]
    for key in ("exp_avg", "exp_avg_sq"):
        state[key] = torch.linspace(0, 1, ROWS * WIDTH, dtype=torch.float64).view(ROWS, WIDTH)


def put_average(table: Any, optimizer: Any) -> None:
    optimizer.state[table]["exp_avg"] = torch.linspace(0, 1, ROWS * WIDTH, dtype=torch.float64).view(ROWS, WIDTH)


def copied(table: Any, optimizer: Any) -> None:
    state = optimizer.state[table]
    for key in ("exp_avg", "exp_avg_sq"):
        state[key].copy_(torch.linspace(0, 1, ROWS * WIDTH, dtype=torch.float64).view(ROWS, WIDTH))


def scaled(table: Any, optimizer: Any) -> None:
    """Writes through the state's own values, as a restart of averages does."""
    for state in optimizer.state.values():
        state["exp_avg"].mul_(0.5)


@pytest.mark.parametrize(
    ("after", "schedule"), pairs(list(product([put, put_average, copied, scaled], ["2d", "vertical"])), (0, 3, 4, 7))
)
def test_state_written_between_two_steps(after: Write, schedule: str) -> None:
    for ours, theirs in run_ranks(2, _both, adamw, schedule, None, after):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
