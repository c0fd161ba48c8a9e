"""Habits of DDP's users on 2 ranks: embrace_fx's losses, norms, parameters and buffers are DDP's."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import embrace_fx
import tests.support.published_habits  # noqa: F401  (enters its own)
from tests.support.habits import HABITS, Wrap
from tests.support.ranks import run_ranks

by_ddp = functools.partial(DistributedDataParallel, find_unused_parameters=True)


def _found(name: str, wrap: Wrap, rank: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.as_tensor(each, dtype=torch.float64) for each in HABITS[name](wrap, rank)]


def both(rank: int, world_size: int, name: str) -> dict[str, Any]:
    strategies: tuple[Any, ...] = ("alltoall", "auto")
    wraps: dict[str, Wrap] = {"DDP": by_ddp}
    wraps |= {each: functools.partial(embrace_fx.compile, strategy=each) for each in strategies}
    return {how: _found(name, wrap, rank) for how, wrap in wraps.items()}


@pytest.mark.long
@pytest.mark.parametrize("name", HABITS)
def test_a_habit_ends_where_it_ends_under_ddp(name: str) -> None:
    for found in run_ranks(2, both, name):
        expected = found.pop("DDP")
        for strategy, values in found.items():
            torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-6, msg=f"strategy {strategy!r}")
