"""State of tables on grids of ranks: checkpoints are of columns, plans made anew move it, meta models make it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adagrad, Adam, Optimizer

import embrace_fx
from embrace_fx.vocabulary.plan import Grid
from tests.support.ranks import run_ranks
from tests.support.training import whole, whole_parameters

ROWS, COLUMNS = 31, 10


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(ROWS, COLUMNS, padding_idx=3), nn.Linear(COLUMNS, 2)).double()


def _trained_model(
    rank: int, strategy: Any, steps: range, start: Callable[[embrace_fx.CompiledModel, Optimizer], None] | None = None
) -> tuple[embrace_fx.CompiledModel, Optimizer]:
    plain = _model()
    optimizer = Adam(plain.parameters(), lr=0.1, eps=1e-3)
    model = embrace_fx.compile(plain, optimizer=optimizer, strategy=strategy, row_updates="lazy")
    if start is not None:
        _train(model, optimizer, rank, range(1))
        start(model, optimizer)
    _train(model, optimizer, rank, steps)
    return model, optimizer


def _train(model: embrace_fx.CompiledModel, optimizer: Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)  # the same ids on all ranks, whose number may change
        model(torch.randint(ROWS, (3, 4), generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _loads_whole_values(rank: int, world_size: int, grid: Grid) -> bool:
    model, optimizer = _trained_model(rank, grid, range(1))
    torch.manual_seed(5)
    plain = _model()
    nn.init.normal_(next(plain.parameters()))
    state = plain.state_dict()
    model.load_state_dict(state)
    own = optimizer.state_dict()
    torch.manual_seed(6)
    momenta = torch.randn(ROWS, COLUMNS, dtype=torch.float64)
    own["state"][0]["exp_avg"] = momenta
    optimizer.load_state_dict(own)
    found = whole(model.state_dict().items())
    kept = optimizer.state_dict()["state"][0]["exp_avg"]
    return torch.equal(found["0.weight"], state["0.weight"]) and torch.equal(kept.full_tensor(), momenta)


@pytest.mark.long
def test_whole_values_are_loaded_into_a_grid() -> None:
    assert all(run_ranks(4, _loads_whole_values, Grid(2, 2)))


def _meta_values(rank: int, world_size: int, grid: Grid) -> dict[str, Tensor]:
    torch.manual_seed(5 + rank)
    with torch.device("meta"):
        plain = nn.Sequential(nn.Embedding(12_001, 100, padding_idx=3), nn.Linear(100, 3))
    optimizer = Adagrad(plain.parameters(), lr=0.1)
    model = embrace_fx.compile(plain, optimizer=optimizer, strategy=grid)
    model(torch.arange(4)).sum().backward()
    return whole_parameters(model)


@pytest.mark.long
@pytest.mark.parametrize("grid", [Grid(3, 1), Grid(2, 2)], ids=str)
def test_a_meta_model_has_the_values_of_one_rank(grid: Grid) -> None:
    torch.manual_seed(5)
    plain = nn.Sequential(nn.Embedding(12_001, 100, padding_idx=3), nn.Linear(100, 3))
    for found in run_ranks(grid.rows * grid.columns, _meta_values, grid):
        for name, value in plain.named_parameters():
            assert torch.equal(found[name], value), name


def _again_on_a_grid(rank: int, world_size: int) -> None:
    """On rank 0 the first model lives on, with its process groups; on the others it has gone."""
    kept = []
    for _ in range(2):
        model = embrace_fx.compile(nn.Embedding(8, 4), strategy={"weight": Grid(2, 2)})
        model(torch.tensor([rank])).sum().backward()
        kept.append(model if rank == 0 else None)
        del model
        gc.collect()


@pytest.mark.long
def test_a_second_model_on_a_grid_does_not_wait_for_groups_of_the_first() -> None:
    run_ranks(4, _again_on_a_grid)
