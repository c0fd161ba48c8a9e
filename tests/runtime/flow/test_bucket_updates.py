"""Updates that run into the next forward: whatever user code does in between, it is as if torch had done all at once.

Each scenario runs on two ranks over a flow, where the gradients of its parameters are reduced and applied late, and in
one process over the mean loss of both ranks, in plain torch.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from embrace_fx.runtime.ranks.communicator import Communicator
from tests.support import late_gradients, late_steps
from tests.support.late_updates import WORLD, Deferred, Training, finish
from tests.support.ranks import run_ranks

SCENARIOS = {**late_steps.SCENARIOS, **late_gradients.SCENARIOS}


def all_scenarios(rank: int, world_size: int) -> dict[str, list[Any] | str]:
    communicator = Communicator(dist.group.WORLD)
    communicator.open_lanes()
    return {name: finish(Deferred(communicator), run) for name, run in SCENARIOS.items()}


@functools.cache
def found() -> list[dict[str, list[Any] | str]]:
    return run_ranks(WORLD, all_scenarios)


@pytest.mark.parametrize("name", SCENARIOS)
def test_as_in_plain_torch(name: str) -> None:
    expected = finish(Training(), SCENARIOS[name])

    for of_rank in found():
        assert not isinstance(of_rank[name], str), of_rank[name]
        torch.testing.assert_close(of_rank[name], expected, rtol=1e-12, atol=1e-12)
