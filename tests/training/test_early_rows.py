"""Rows that have left for the next batch, where the loop then changes what the step makes of them; beside DDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import embrace_fx
from tests.support.parts import differs
from tests.support.ranks import run_ranks
from tests.support.scenario import compiled_once

ROWS, WIDTH, STEPS = 30, 6, 8


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.words(ids).mean(1)).square().mean()


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


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, 0.1)


def adamw(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, 0.02, eps=1e-3)


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


CASES: list[tuple[Any, Write | None, Write | None]] = [
    *((make, before, None) for before in (of_unread_rows, of_first_row, clipped) for make in (sgd, adamw)),
    *((adamw, None, after) for after in (put, put_average, copied, scaled)),
]
"""An optimizer, what is done between backward and step, and what between two steps."""


def _apart(rank: int, world_size: int, schedule: Any) -> list[str]:
    """The cases that end elsewhere than under DDP."""
    compiled, found = compiled_once(strategy={"words.weight": "alltoall"}, schedule=schedule), list[str]()
    for make, before, after in CASES:
        ends = []
        for wrap in (compiled, DistributedDataParallel):
            torch.manual_seed(0)
            ends.append(_train(wrap(Words().double()), make, rank, before, after))
        if how := differs(ends[0], ends[1], 1e-9):
            found.append(f"{make} {before} {after}: {how}")
    return found


@pytest.mark.parametrize("schedule", ["2d", "vertical"])
def test_gradients_and_state_written_between_steps(schedule: str) -> None:
    assert run_ranks(2, _apart, schedule) == [[], []]
