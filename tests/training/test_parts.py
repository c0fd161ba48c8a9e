"""A part is never taken for the whole: loops that write, ask, gather and read tables, next to DDP on the same ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from embrace_fx.vocabulary.plan import Grid
from tests.support import part_deeds
from tests.support.part_deeds import Deed, train
from tests.support.parts import differs
from tests.support.ranks import run_ranks

DEEDS: Mapping[str, Mapping[str, Deed]] = {
    "views of the gradient": part_deeds.VIEWS_OF_THE_GRADIENT,
    "collectives": part_deeds.COLLECTIVES,
    "tables": part_deeds.TABLES,
}
WAYS: Mapping[str, dict[str, Any]] = {
    "columns": {"strategy": "alltoall"},
    "a grid": {"strategy": {"emb.weight": Grid(2, 1)}},
    "sweeps": {"strategy": "alltoall", "row_updates": "sweep"},
}
CASES = {
    f"{deeds}, {way}, {kind}, {ranks} ranks": (deeds, way, kind, ranks)
    for deeds in DEEDS
    for way, ranks in (("columns", 2), ("columns", 3), ("a grid", 2), ("sweeps", 2))
    for kind in ("adamw", "sgd")
}


def _both(rank: int, world_size: int, deeds: str, way: str, kind: str) -> tuple[dict[str, str], dict[str, str]]:
    """What differs, by deed; and what is refused."""
    found, refused = train(rank, DEEDS[deeds], None, kind, WAYS[way])
    expected, _ = train(rank, DEEDS[deeds], refused, kind, {})
    wrong = {name: how for name, values in found.items() if (how := differs(values, expected[name]))}
    return wrong, refused


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")  # collectives of torch that people call
@pytest.mark.parametrize(("deeds", "way", "kind", "ranks"), CASES.values(), ids=CASES)
def test_loops_do_as_under_ddp_or_are_refused_and_go_on(deeds: str, way: str, kind: str, ranks: int) -> None:
    outcomes = run_ranks(ranks, _both, deeds, way, kind)
    for wrong, refused in outcomes:
        assert not wrong
        assert refused.keys() == outcomes[0][1].keys()
        for told in refused.values():
            assert "expected " in told
            assert "emb.weight" in told
            assert any(remedy in told for remedy in ("full_tensor()", "full_state_dict()", "strategy="))
        if way != "a grid":  # of which a rank has some rows alone
            assert set(refused) == set(REFUSED[deeds])


REFUSED: Mapping[str, tuple[str, ...]] = {
    "views of the gradient": (),
    "collectives": tuple(part_deeds.COLLECTIVES),
    "tables": ("a copy that is saved", "a pickle", "a penalty of rows"),
}
"""Deeds that are refused; all others do as under DDP."""
