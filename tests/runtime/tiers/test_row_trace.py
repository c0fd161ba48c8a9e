"""Rows of a working set are there before they are used, and stay while a known step reads them."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.support.tiers import OPTIMIZERS, beyond_memory

V, AHEAD = 1200, 3


def test_rows_looked_up_early_stay_until_their_gradients_are_applied(tmp_path: Path) -> None:
    """Rows are read ahead, looked up before their step begins, and updated two steps later: each comes once."""
    table, steps = (
        beyond_memory(torch.randn(V, 2), OPTIMIZERS["adamw"], 80, tmp_path),
        torch.arange(V).split(10),
    )
    with torch.no_grad():
        for step in range(2, 60):
            table.store.memory.begin_step(step)
            if step > 6:
                table.begin_step().finish([(steps[step - 2], torch.randn(10, 2))])
            table.store.memory.read_ahead(steps[step + AHEAD], step + AHEAD)
            if step > 3:
                table.look_up(steps[step + 1])
    assert table.store.memory.counts.brought == 10 * len(range(2 + AHEAD, 60 + AHEAD))


def test_rows_are_read_as_soon_as_there_is_room(tmp_path: Path) -> None:
    """Rows of six steps do not fit. Those that find no room are read later, in time; none goes that is still needed."""
    table, steps = (
        beyond_memory(torch.randn(V, 2), OPTIMIZERS["adamw"], 48, tmp_path),
        torch.arange(V).split(10),
    )
    with torch.no_grad():
        for step in range(2, 60):
            table.store.memory.begin_step(step)
            if step > 10:
                table.begin_step().finish([(steps[step - 1], torch.randn(10, 2))])
            table.store.memory.read_ahead(steps[step + 4], step + 4)
            if step > 6:
                table.look_up(steps[step])
    assert table.store.memory.counts.missed == 0
    assert len(table.store.memory.row_of.unique()) == 48, "all slots are used"


def test_rows_of_the_nearest_step_are_read_first(tmp_path: Path) -> None:
    """A farther step's, which have been told before and fill all slots, make room, and those that wait go on to."""
    memory = beyond_memory(torch.randn(V, 2), OPTIMIZERS["adamw"], 20, tmp_path).store.memory
    memory.begin_step(1)
    for due, rows in ((4, torch.arange(40)), (2, torch.arange(40, 60))):
        for _ in range(4):  # each call reads a fourth of the slots
            memory.read_ahead(rows, due)
    assert sorted(memory.row_of.tolist()) == [*range(40, 60)]
