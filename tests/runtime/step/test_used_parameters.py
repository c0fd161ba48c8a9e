"""Which parameters backwards reach, summed over ranks in fields of a few bits."""

from __future__ import annotations

import pytest

from embrace_fx.runtime.step.used_parameters import UsedParameters

NAMES = [f"p{k}" for k in range(200)]


def _summed(*told: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*told, strict=True)))


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 513])
def test_absent_is_what_no_rank_reaches(world_size: int) -> None:
    """Each rank's program knows other parameters; the first of all is reached by every rank, some by one alone."""
    ranks = [
        UsedParameters(NAMES, {NAMES[0]: frozenset({0}), NAMES[1 + r % 150]: frozenset({1})}, NAMES, world_size)
        for r in range(world_size)
    ]
    counts = _summed(*(each.words((0, 1)) for each in ranks))
    absent = ranks[0].absent(counts)
    assert absent == frozenset(NAMES) - {NAMES[0], *(NAMES[1 + r % 150] for r in range(world_size))}


def test_a_sum_of_earlier_backwards_counts_as_reached() -> None:
    used = UsedParameters(NAMES, {"p1": frozenset({0}), "p2": frozenset({1})}, ["p1", "p2"], 2)
    assert used.absent(used.words((0,), {"p2"})) == frozenset()
