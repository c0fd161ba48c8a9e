"""Whatever loops do, they end under a compiled model where they end under DDP: `tests.support.scenarios`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from embrace_fx.vocabulary.plan import Grid
from tests.support.ranks import run_ranks
from tests.support.scenario import SCENARIOS
from tests.support.scenarios import ROOMS, compare

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:Grad strides do not match bucket view strides:UserWarning"),  # DDP's
    pytest.mark.filterwarnings("ignore:.torch.jit"),  # deprecated, and still used
]

WAYS: Mapping[str, tuple[int, dict[str, Any]]] = {
    "2 ranks": (2, {"strategy": "alltoall"}),
    "3 ranks": (3, {"strategy": "alltoall"}),
    "4 ranks, momentum": (4, {"strategy": "alltoall", "optimizer": "momentum"}),
    "sgd": (2, {"strategy": "alltoall", "optimizer": "sgd"}),
    "sweeps": (2, {"strategy": "alltoall", "row_updates": "sweep"}),
    "auto": (2, {"strategy": "auto"}),
    "a grid": (2, {"strategy": Grid(2, 1)}),
    "none": (2, {"strategy": "alltoall", "schedule": "none"}),
}
QUICK = {
    room: [name for name in names if not SCENARIOS[name].fresh]
    for room, names in ROOMS.items()
    if room not in ("schemes", "papers")
} | {
    "models of their own": ["pseudo labels", "adversaries", "losses of some results, momentum, at once"],
    "attributes": ["synced by attribute", "buffers shared by attribute", "attributes that trainers ask for"],
}
"""Those that share one model."""


def _check(names: list[str], ranks: int, options: Mapping[str, Any]) -> None:
    __tracebackhide__ = True
    for wrong in run_ranks(ranks, compare, names, options, timeout_s=280.0):
        assert not wrong, "\n".join(f"{name}: {how}" for name, how in wrong.items())


@pytest.mark.parametrize("room", QUICK)
def test_scenarios_end_where_ddp_does(room: str) -> None:
    _check(QUICK[room], *WAYS["2 ranks"])


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("room", ROOMS)
def test_scenarios_end_where_ddp_does_in_every_way(room: str, way: str) -> None:
    _check(ROOMS[room], *WAYS[way])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.xfail(reason=each.wrong, raises=AssertionError))
        for name, each in SCENARIOS.items()
        if each.wrong
    ],
)
def test_scenarios_that_end_elsewhere(name: str) -> None:
    _check([name], *WAYS["2 ranks"])
