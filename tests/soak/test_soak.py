"""The soak, some seconds of it: a model's random life, and a random fault of each way to end."""

from __future__ import annotations

import pytest

from benchmarks.namespaces import obstacle
from tests.soak.faults import KINDS, Fault, draw, table, try_fault
from tests.soak.links import soak_on_links
from tests.soak.plan import FAULTS, draw_round
from tests.soak.rounds import soak
from tests.support.ranks import fresh_ranks

SEED = 136
"""Of a life that meets sharded tables and lookahead."""


@pytest.mark.long
def test_a_random_life_ends_where_the_reference_does() -> None:
    outcomes = fresh_ranks(2, soak, SEED, 10.0, 1, 6, None)
    for outcome in outcomes:
        assert outcome.exception is None, outcome
        assert outcome.result is not None
        assert [lived.wrong for lived in outcome.result] == [[]]


def test_a_seed_is_a_life() -> None:
    life = draw_round(SEED, 2, 6)
    assert life == draw_round(SEED, 2, 6)
    assert life.strategy == "alltoall"
    assert life.schedule == "2d"
    kinds = {deed.kind for epoch in draw_round(SEED, 2, 200).epochs for deed in epoch.deeds}
    assert kinds.issuperset(FAULTS)


def _first(kind: str) -> Fault:
    return next(fault for fault in (draw(seed, 2) for seed in range(1000)) if fault.kind == kind)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_random_fault_ends_as_it_should(kind: str) -> None:
    found = try_fault(_first(kind), 2)
    assert not found.wrong, found
    assert f"| {kind} | 1 |" in table([found], 2)


@pytest.mark.long
@pytest.mark.skipif(bool(obstacle()), reason=obstacle())
def test_links_that_slow_down_change_nothing_but_the_time() -> None:
    told = soak_on_links(2, SEED, 10.0, 2, 3, timeout_s=200.0)
    assert told.startswith("2 models, ")
    assert "0 models differ" in told
