"""What a first step costs, by counts of calls: it grows with tables and parameters, and no faster."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable

import pytest
import torch
from torch import nn

import embrace_fx
from benchmarks.micro.first_step import Chain, Tables


def _calls(model: nn.Module) -> int:
    """Returns how many Python functions are called to capture, plan, compile and schedule a model for two ranks."""
    ids = torch.randint(2_000, (8, 16))
    profiler = cProfile.Profile()
    with profiler:
        planned = embrace_fx.plan(model, ids, cluster=embrace_fx.Cluster(1e4, 0.1), world_size=2)
        _ = planned.schedule
    return pstats.Stats(profiler).total_calls  # type: ignore[attr-defined]


@pytest.mark.long
@pytest.mark.parametrize(("make", "sizes"), [(Tables, (6, 12, 24)), (Chain, (12, 24, 48))])
def test_calls_grow_in_proportion(make: Callable[[int], nn.Module], sizes: tuple[int, int, int]) -> None:
    _calls(make(sizes[0]))  # warm up: imports and caches
    few, more, many = (_calls(make(size)) for size in sizes)
    assert (many - more) < 2.2 * (more - few)  # 2 if calls grow linearly, 4 if quadratically
