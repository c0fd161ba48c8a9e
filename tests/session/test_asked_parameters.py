"""What rank 0 is told: one line of what was decided; once, what a loop costs that asks for parameters in every step."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import embrace_fx
from embrace_fx.runtime.tables.model_state import ParameterReads
from embrace_fx.runtime.tables.update_rule import DenseUpdate
from embrace_fx.session.state_hooks import PlacedTables, StateHook
from tests.support.inside import session_of
from tests.support.messages import logged
from tests.support.ranks import run_ranks

ASKED = "reads the parameters"


def train(rank: int, world_size: int, clips_by_model: bool) -> tuple[list[str], bool]:
    """Takes six clipped steps with two optimizers. Returns log lines, and whether all rows of the table are updated."""
    torch.manual_seed(0)
    model = embrace_fx.compile(
        nn.Sequential(nn.EmbeddingBag(1_000, 8), nn.Linear(8, 1)), strategy="alltoall", row_updates="exact"
    )
    table, *others = model.parameters()
    optimizers = [torch.optim.AdamW([table], lr=0.1), torch.optim.AdamW(others, lr=0.1)]
    clip: Callable[[], object] = (
        (lambda: model.clip_grad_norm_(1.0))
        if clips_by_model
        else (lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    )
    with logged() as told:
        for _ in range(6):
            model(torch.randint(1_000, (4, 3))).square().mean().backward()
            clip()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        (sharded,) = session_of(model).state.tables.values()
        is_swept = sharded.rule is DenseUpdate
        assert sharded.predicted_bytes(2)[:2] == (16_000, 16_000 * is_swept)  # a sweep gives all rows a gradient
    model.close()
    return [line for line in told if ASKED in line or "sharded" in line], is_swept


@pytest.mark.long
def test_a_loop_that_asks_in_every_step_is_told_once() -> None:
    first, second = run_ranks(2, train, False)
    decided, asked = first[0]
    assert decided.startswith("1 table sharded: 0.weight, 0 whole; a rank sends ")
    assert decided.endswith("; model.report() says why")
    assert ASKED in asked
    assert second[0] == []
    assert first[1]
    assert second[1]


def test_clipping_by_the_model_asks_for_none() -> None:
    assert not any(ASKED in line for told, _ in run_ranks(2, train, True) for line in told)


def test_a_step_that_is_not_read_starts_the_count_anew() -> None:
    reads, optimizer, found = ParameterReads(), torch.optim.SGD([torch.ones(1)]), []
    for steps in (1, 2, 1, 1):
        for _ in range(steps):
            reads.record_step(optimizer)
        reads.record()
        found.append(reads.in_every_step)
    assert found == [False, False, True, True]


@pytest.mark.parametrize(("rank", "lines"), [(0, 1), (1, 0)])
def test_rank_0_is_told_of_a_copy_made_before_tables_are_sharded(rank: int, lines: int) -> None:
    placed = PlacedTables()
    placed.copies.add(kept := StateHook(print, None, placed))
    with logged() as told:
        placed.record(Mock(**{"state.layouts": {"words": kept}, "communicator.rank": rank}))
    assert len(told) == lines
