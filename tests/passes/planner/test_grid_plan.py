"""Grids in the plan: bytes are those predicted, and many ranks get a grid where few keep columns."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import embrace_fx
from embrace_fx.passes.planner.pricing import CLEARLY
from embrace_fx.passes.planner.step_cost import FEWEST_RANKS, USEFUL_COLUMNS
from embrace_fx.vocabulary.plan import Grid
from embrace_fx.vocabulary.row_wise import NOT_ON_A_GRID
from tests.support.cases import long_but
from tests.support.models import Workload
from tests.support.ranks import run_ranks
from tests.support.wire import OneTableWorkload, assert_predicted, on_ranks


@dataclass(frozen=True)
class OwnRowsWorkload(OneTableWorkload):
    """Of the rows that a rank reads, its own row of a grid of two has five sixths, or one sixth."""

    local_rows: bool = True

    def batches(self, step: int, rank: int, seed: int) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(rank)
        different = torch.randperm(self.num_rows // 2, generator=generator)[: self.num_ids]
        own = (torch.arange(self.num_ids) % 6 > 0) == self.local_rows
        return (2 * different + torch.where(own, rank, 1 - rank),)


@pytest.mark.long
@pytest.mark.parametrize(
    ("grid", "workload", "autocast"),
    long_but(
        ("its own rows",),
        {
            "its own rows": (Grid(2, 1), OwnRowsWorkload(), False),
            "the others' rows": (Grid(2, 1), OwnRowsWorkload(local_rows=False), False),
            "uneven columns": (Grid(2, 2), OneTableWorkload(embedding_dim=101, padding_idx=0), False),
            "bfloat16": (Grid(4, 1), OneTableWorkload(2000, num_ids=600), True),
        },
    ),
)
def test_bytes_equal_the_prediction(grid: Grid, workload: Workload, autocast: bool) -> None:
    by_rank = on_ranks(grid.rows * grid.columns, workload, grid, autocast)
    assert_predicted(by_rank)


ROWS_OF_MANY = 100_000


class Language(nn.Module):
    """A table with `dim` columns and many rows, of which a batch reads few."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS_OF_MANY, dim, _weight=torch.empty(ROWS_OF_MANY, dim))  # values are never read
        self.out = nn.Linear(dim, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.table(ids)).square().mean()


def _planned(ranks: int, dim: int = 512, strategy: Any = "auto", ids: int = 3000) -> Any:
    model = Language(dim)
    optimizer = SGD(model.parameters(), 0.1)
    batch = torch.randint(ROWS_OF_MANY, (ids,), generator=torch.Generator().manual_seed(0))
    return embrace_fx.plan(model, batch, world_size=ranks, optimizer=optimizer, strategy=strategy)["table.weight"]


@pytest.mark.parametrize(
    ("ranks", "dim", "grid"),
    [
        (2, 512, None),
        (4, 512, None),
        (8, 512, None),
        (64, 512, Grid(16, 4)),
        (256, 512, Grid(64, 4)),
        (1024, 512, Grid(256, 4)),
        (8, 1024, None),
        (256, 100, Grid(256, 1)),
        (96, 300, Grid(48, 2)),
    ],
)
def test_many_ranks_share_rows_so_that_shards_stay_wide(ranks: int, dim: int, grid: Grid | None) -> None:
    decision = _planned(ranks, dim)
    assert (decision.strategy, decision.grid) == ("alltoall", grid)
    if grid is not None:
        width = -(-dim // grid.columns)
        assert width >= min(USEFUL_COLUMNS, dim)
        assert f"{grid}, {width} columns per rank" in decision.reason


def test_a_grid_sends_the_bytes_of_columns_and_must_clearly_save_handling() -> None:
    on_grid, columns = _planned(64), _planned(64, strategy=Grid(1, 64))
    assert on_grid.grid == Grid(16, 4)
    assert columns.grid is None
    assert on_grid.sent_bytes_per_step == pytest.approx(columns.sent_bytes_per_step, rel=1e-3)
    assert on_grid.predicted_ms < CLEARLY * columns.predicted_ms
    assert _planned(64, ids=20).grid is None  # with few ids, latency dominates
    assert _planned(FEWEST_RANKS - 1, dim=16, ids=5000).grid is None
    assert _planned(FEWEST_RANKS, dim=16, ids=5000).grid == Grid(FEWEST_RANKS, 1)


def test_where_rows_are_stepped_as_a_whole_no_grid_is_planned() -> None:
    """Training would have to undo it; one that is asked for keeps the table whole, and says why."""
    model = Language(512)
    batch = torch.randint(ROWS_OF_MANY, (3000,), generator=torch.Generator().manual_seed(0))
    ask = partial(embrace_fx.plan, model, batch, world_size=64, optimizer=embrace_fx.RowWiseAdagrad(model.parameters()))
    auto, asked = ask()["table.weight"], ask(strategy=Grid(16, 4))["table.weight"]
    assert (auto.strategy, auto.grid) == ("alltoall", None)
    assert 0 < auto.norm_bytes < auto.sent_bytes_per_step
    assert (asked.strategy, asked.reason) == ("allreduce", NOT_ON_A_GRID)


def test_explain_prints_the_grid() -> None:
    model = Language(512)
    batch = torch.randint(ROWS_OF_MANY, (1000,), generator=torch.Generator().manual_seed(0))
    plan = embrace_fx.plan(model, batch, world_size=256, optimizer=SGD(model.parameters(), 0.1))
    assert "alltoall, 64 x 4 grid" in plan.explain()
    assert "128 columns per rank" in " ".join(str(plan).split())
    assert plan.grids == {"table.weight": Grid(64, 4)}


def _compiles_a_bad_grid(rank: int, world_size: int) -> str:
    model = nn.Sequential(nn.Embedding(31, 10), nn.Linear(10, 2))
    compiled = embrace_fx.compile(model, optimizer=SGD(model.parameters(), 0.1), strategy={"0.*": Grid(3, 1)})
    with pytest.raises(ValueError, match="must be 2, the number of ranks") as raised:
        compiled(torch.arange(3))
    return str(raised.value)


def test_a_bad_grid_is_refused_on_every_rank() -> None:
    first, second = run_ranks(2, _compiles_a_bad_grid)
    assert first == second
