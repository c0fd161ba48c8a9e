"""Rows of a working set are there before they are used, and stay while a known step reads them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.tiers import OPTIMIZERS, beyond_memory

V, AHEAD = 1200, 3


@pytest.mark.parametrize(
    ("slots", "ahead", "looked_up", "updated", "brought"),
    [
        pytest.param(80, 3, 1, -2, 580, id="rows stay until their gradients are applied"),
        pytest.param(48, 4, 0, -1, 558, id="rows of six steps do not fit"),  # at the end, 22 rows still wait for room
    ],
)
def test_rows_are_read_once_as_soon_as_there_is_room(
    slots: int, ahead: int, looked_up: int, updated: int, brought: int, tmp_path: Path
) -> None:
    """Rows are read `ahead` steps early, looked up in the step before or their own, and updated later. Those that find
    no room are read later, in time; none goes that is still needed."""
    table, steps = beyond_memory(torch.randn(V, 2), OPTIMIZERS["adamw"], slots, tmp_path), torch.arange(V).split(10)
    memory = table.store.memory
    with torch.no_grad():
        for step in range(2, 60):
            memory.begin_step(step)
            if step + updated >= 2 + ahead:
                table.begin_step().finish([(steps[step + updated], torch.randn(10, 2))])
            memory.read_ahead(steps[step + ahead], step + ahead)
            if step + looked_up >= 2 + ahead:
                table.look_up(steps[step + looked_up])
    assert memory.counts.missed == 0
    assert memory.counts.brought == brought
    assert len(memory.row_of.unique()) == slots, "all slots are used"


def test_rows_of_the_nearest_step_are_read_first(tmp_path: Path) -> None:
    """A farther step's, which have been told before and fill all slots, make room, and those that wait go on to."""
    memory = beyond_memory(torch.randn(V, 2), OPTIMIZERS["adamw"], 20, tmp_path).store.memory
    memory.begin_step(1)
    for due, rows in ((4, torch.arange(40)), (2, torch.arange(40, 60))):
        for _ in range(4):  # each call reads a fourth of the slots
            memory.read_ahead(rows, due)
    assert sorted(memory.row_of.tolist()) == [*range(40, 60)]
