"""A table beyond memory moves as the same table in memory: to the bit, however long rows rest, and on any ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from embrace_fx.runtime.tiers.record_file import TierError
from tests.support.ranks import run_ranks_expecting_errors
from tests.support.tiers import OPTIMIZERS, Run, beyond_memory, in_memory, same_losses, train

V, D = 300, 5


@pytest.mark.parametrize(
    "share", [pytest.param(0.5, marks=pytest.mark.long), pytest.param(0.1, marks=pytest.mark.long), 0.02]
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_rows_that_rest_move_as_in_memory(optimizer: str, share: float, tmp_path: Path) -> None:
    """Rows rest for up to 250 steps; histories end where parameters are asked for, at steps 60 and 170."""
    generator = torch.Generator().manual_seed(3)
    table = torch.randn(V, D, generator=generator)
    expected = in_memory(table, OPTIMIZERS[optimizer])
    found = beyond_memory(table, OPTIMIZERS[optimizer], round(share * V), tmp_path)
    with torch.no_grad():
        for step in range(250):
            ids = (V ** torch.rand(4, generator=generator) - 1).long()
            assert torch.equal(found.look_up(ids), expected.look_up(ids)), step
            ids = ids.unique()
            rows = torch.randn(len(ids), D, generator=generator)
            for each in (found, expected):
                each.update_rows(ids, rows)
                if step in (60, 170):
                    each.settle()
        for ids in torch.arange(V).split(6):
            assert torch.equal(found.look_up(ids), expected.look_up(ids))
    moved = not optimizer.startswith(("sgd", "adagrad", "row-wise")) or optimizer == "sgd, decayed"
    assert found.memory.counts.written > (V // 2 if moved and share < 0.1 else 0)


@pytest.mark.parametrize(("world_size", "optimizer", "schedule"), [(2, "adamw", "2d"), (1, "momentum", "none")])
def test_model_trains_as_in_memory(world_size: int, optimizer: str, schedule: str) -> None:
    same_losses(world_size, Run(optimizer, schedule, 0.2))


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["none", "2d"])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_on_ranks(optimizer: str, world_size: int, schedule: str) -> None:
    same_losses(world_size, Run(optimizer, schedule, 0.25))


def test_batch_larger_than_memory_is_an_error_on_every_rank() -> None:
    errors = run_ranks_expecting_errors(2, train, Run(memory=0.01))
    for error in errors:
        assert "2 rows of memory for" in str(error)


def test_all_rows_at_once_are_refused(tmp_path: Path) -> None:
    table = beyond_memory(torch.randn(V, D), OPTIMIZERS["adamw"], 30, tmp_path)
    for ask in (lambda: table.parameter + 1, table.parameter.norm, table.open_gradient().memory):
        with pytest.raises(RuntimeError, match="expected"):
            ask()
    with pytest.raises(TierError, match="30 rows of memory for 31"):
        table.places(torch.arange(31))
