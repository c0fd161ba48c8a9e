"""Tables beyond memory for tests: one by itself, and a model of one table that is trained on ranks."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

import embrace_fx
from embrace_fx.runtime.tables.layouts import Place
from embrace_fx.runtime.tables.part import Origin
from embrace_fx.runtime.tables.part_layout import Layout
from embrace_fx.runtime.tables.row_table import RowTable
from embrace_fx.runtime.tables.table_part import TablePart, become_part
from embrace_fx.runtime.tiers.initial import FirstValues
from embrace_fx.runtime.tiers.records import Column
from embrace_fx.runtime.tiers.tiered_table import HeldInFile, TieredTable, state_columns
from embrace_fx.runtime.tiers.working_set import TAKEN, WEIGHTS, WorkingSet
from tests.support.ranks import run_ranks

Make = Callable[[Any], Optimizer]

OPTIMIZERS: Mapping[str, Make] = {
    "sgd": lambda p: SGD(p, lr=0.1),
    "sgd, decayed": lambda p: SGD(p, lr=0.1, weight_decay=0.01),
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "nesterov": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: Adam(p, lr=0.01),
    "amsgrad": lambda p: Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: AdamW(p, lr=0.01),
    "adagrad": lambda p: Adagrad(p, lr=0.1, initial_accumulator_value=0.3),
    "rmsprop": lambda p: RMSprop(p, lr=0.01),
    "rmsprop, centered": lambda p: RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "row-wise adagrad": lambda p: embrace_fx.RowWiseAdagrad(p, lr=0.1),
}


def in_memory(table: Tensor, make: Make) -> RowTable:
    """A table whose rows rest, all of it in memory."""
    parameter = nn.Parameter(table.clone())
    place = Place(table.shape, None)
    return RowTable("t", parameter, place, None, "exact", make([parameter]), may_rest=lambda: True)


def beyond_memory(table: Tensor, make: Make, slots: int, directory: str | Path) -> TieredTable:
    """The same with so many rows in memory."""
    parameter = nn.Parameter(table.clone())
    optimizer = make([parameter])
    state = optimizer.state.get(parameter) or {}
    columns = {WEIGHTS: Column((table.shape[1],), table.dtype), TAKEN: Column((), torch.int64)}
    columns |= state_columns(optimizer, optimizer.param_groups[0], table[:0], state)
    memory = WorkingSet("t", len(table), slots, columns, FirstValues(range(table.shape[1]), 0, table.dtype), directory)
    memory.store(torch.arange(len(table)), {WEIGHTS: table})
    shown = columns.keys() & state.keys()
    optimizer.state[parameter] = {key: value for key, value in state.items() if key not in shown}
    like = torch.empty_strided(tuple(table.shape), (0, 0), dtype=table.dtype)
    place = Place(table.shape, None)
    become_part(parameter, like, Layout.of_table(place), Origin("t", "", None, None))
    assert isinstance(parameter, TablePart)
    parameter.held = HeldInFile(like, "expected rows by ids")
    return TieredTable("t", parameter, place, None, "exact", optimizer, memory=memory, shown=shown)


class OneTable(nn.Module):
    """A table of `ROWS` rows, and a layer that reads it."""

    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, COLUMNS, padding_idx=3, device=device)
        self.linear = nn.Linear(COLUMNS, 1)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.linear(torch.tanh(self.table(ids))).square().mean()
        return found


ROWS, COLUMNS = 200, 6


def batches(rank: int, steps: int, *, zipf: bool = True) -> list[tuple[Tensor]]:
    """Ids of a rank's batches, few of them often where Zipf's law holds."""
    generator = torch.Generator().manual_seed(100 + rank)
    drawn = torch.rand(steps, 3, 4, generator=generator)
    ids = ((ROWS**drawn - 1) if zipf else drawn * ROWS).long().clamp_(max=ROWS - 1)
    return [(each,) for each in ids]


@dataclass(frozen=True)
class Run:
    """How a model is trained.

    Attributes:
        memory: of the table; None: all of it.
        ahead: batches that the loader runs ahead.
        meta: whether the table begins on the meta device.
        folder: of a checkpoint, which is loaded at first if it is there, else saved after half of the steps.
    """

    optimizer: str = "adamw"
    schedule: str = "2d"
    memory: float | None = None
    steps: int = 30
    folder: str = ""
    meta: bool = False
    ahead: int = 1


def train(rank: int, world_size: int, run: Run) -> list[float]:
    """Losses of steps, and of an evaluation that reads every row."""
    torch.manual_seed(0)
    model = OneTable("meta" if run.meta else None)
    stepping = OPTIMIZERS[run.optimizer](model.parameters())
    asked: Any = {"row_updates": "replay"} if run.memory is None else {"tables_in": tempfile.gettempdir()}
    asked |= {"optimizer": stepping, "strategy": "alltoall", "schedule": run.schedule, "table_memory": run.memory}
    compiled = embrace_fx.compile(model, **asked)
    losses, half = [], run.steps // 2
    own: Any = batches(rank, run.steps)
    if loads := bool(run.folder) and Path(run.folder).exists():
        compiled.load_checkpoint(run.folder)
        own = own[half:]
        if not own:
            compiled(*batches(rank, 1)[0])
    looks_ahead = run.schedule != "none" or run.ahead > 1
    for step, batch in enumerate(compiled.lookahead(own, run.ahead) if looks_ahead else own):
        if run.folder and not loads and step == half:
            compiled.save_checkpoint(run.folder)
        loss = compiled(*batch)
        loss.backward()
        stepping.step()
        stepping.zero_grad()
        losses.append(loss.item())
    compiled.eval()
    with torch.no_grad():
        losses += [compiled(ids).item() for ids in torch.arange(ROWS).split(10)]
    compiled.close()
    return losses


def assert_same_losses(world_size: int, run: Run) -> None:
    """Fails unless a table beyond memory trains as it does in memory, to the bit."""
    expected = run_ranks(world_size, train, replace(run, memory=None))
    assert run_ranks(world_size, train, run) == expected
