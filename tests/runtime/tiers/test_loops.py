"""What training loops do to tables beyond memory: the same losses as in memory, to the bit."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import Any

import pytest
import torch

import embrace_fx
from tests.support.ranks import run_ranks
from tests.support.tiers import ROWS, Loop, TwoTables, assert_same_loop, run_loop

LOOPS = {
    "clip": ("clip",),
    "accumulate": ("accumulate", "accumulate", "rate"),
    "skip": ("update", "skip", "update", "clip"),
    "ask": ("ask", "update", "update", "rate", "update"),
    "evaluate": ("evaluate", "empty", "update", "update"),
    "plan anew": ("update", "update", "plan anew", "accumulate", "update"),
    "go back": ("update", "save", "update", "accumulate", "update", "load", "evaluate"),
}


@pytest.mark.long
@pytest.mark.parametrize("memory", [0.4, {"words.*": 0.4}], ids=["both", "one"])
@pytest.mark.parametrize("habit", LOOPS)
def test_loop_does_what_it_does_in_memory(habit: str, memory: float | Mapping[str, float]) -> None:
    assert_same_loop(2, Loop(memory, (LOOPS[habit] * 24)[:24], epoch=17))


@pytest.mark.parametrize("memory", [0.3, pytest.param({"words.*": 0.3}, marks=pytest.mark.long)], ids=["all", "one"])
def test_stack_trains_as_in_memory(memory: Any) -> None:
    assert_same_loop(2, Loop(memory, ("update", "clip", "update", "update", "rate", "update") * 2, alike=True))


def test_table_named_where_none_is_is_an_error() -> None:
    with pytest.raises(Exception, match=r"'nothing\*' matches no parameter"):
        run_ranks(1, run_loop, Loop({"nothing*": 0.4}, ("update",)))


def joins(rank: int, world_size: int) -> str:
    model = TwoTables(ROWS)
    optimizer = torch.optim.AdamW(model.parameters())
    compiled = embrace_fx.compile(model, optimizer=optimizer, table_memory=0.5, spill_to=tempfile.gettempdir())
    with pytest.raises(ValueError, match=r"join\(\) does not work with table_memory") as refused, compiled.join():
        raise AssertionError("a rank has come in")
    return str(refused.value)


def test_joining_is_refused_before_the_first_batch() -> None:
    assert len(set(run_ranks(2, joins))) == 1
