"""The soak, some seconds of it: random loops of a seed, and a random fault of each way to end."""

from __future__ import annotations

import pytest

from tests.soak.__main__ import soak
from tests.soak.faults import KINDS, Fault, draw, try_fault
from tests.support.ranks import fresh_ranks


@pytest.mark.long
def test_random_loops_end_where_ddps_do() -> None:
    for outcome in fresh_ranks(2, soak, 136, 10.0, 1, 1):
        assert outcome.exception is None, outcome
        assert outcome.result == 137


def _first(kind: str) -> Fault:
    return next(fault for fault in (draw(seed, 2) for seed in range(1000)) if fault.kind == kind)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_a_random_fault_ends_as_it_should(kind: str) -> None:
    found = try_fault(_first(kind), 2)
    assert not found.wrong, found
