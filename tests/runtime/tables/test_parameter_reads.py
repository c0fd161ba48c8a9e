"""A loop that asks for parameters in every step is told from one that does now and then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import embrace_fx
from embrace_fx.runtime.tables.model_state import ParameterReads
from tests.support.inside import session_of
from tests.support.ranks import run_ranks

FIRST, SECOND = (torch.optim.SGD([nn.Parameter(torch.zeros(1))]) for _ in range(2))


@pytest.mark.parametrize(
    ("loop", "often"),
    [
        ("a 1 a 1 a", True),  # gradients are clipped
        ("1 a 1 a", True),  # an average is kept
        ("1 2 a 1 2 a", True),  # of two optimizers
        ("1 a a a", False),  # in one place, again and again
        ("1 a 1 1 a", False),  # every second time
        ("1 a 1 a 1 1 a", False),  # no longer
        ("1 a 1 a 1 1", True),  # nothing changes between two askings
    ],
)
def test_asked_for_in_every_step(loop: str, often: bool) -> None:
    asked = ParameterReads()
    for each in loop.split():
        asked.note() if each == "a" else asked.stepped(FIRST if each == "1" else SECOND)

    assert asked.in_every_step == often


def _changed_after_each_step(rank: int, world_size: int) -> bool:
    model: Any = embrace_fx.compile(nn.Sequential(nn.Embedding(50, 4), nn.Linear(4, 1)), strategy="alltoall")
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(4):
        model(torch.arange(3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        session_of(model).programs.change(model.plan, "a test")
    found: bool = session_of(model).state.reads.in_every_step
    model.close()
    return found


def test_a_change_of_the_plan_is_no_read_of_the_loop() -> None:
    assert run_ranks(2, _changed_after_each_step) == [False, False]
