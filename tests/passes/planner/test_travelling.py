"""The planner on tables that would share the start-ups of a joined table, and would not be sharded each for itself."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from embrace_fx.cost.links import Cluster, Handling
from embrace_fx.passes.planner.asked_strategies import Strategy
from embrace_fx.passes.planner.decide import decide
from embrace_fx.passes.planner.pricing import Findings, ParameterFacts
from embrace_fx.vocabulary.graph import TrainingGraph
from embrace_fx.vocabulary.plan import Plan
from tests.support.graphs import analysed
from tests.support.stacks import ROWS, Many

DIM = 64
FACTS = ParameterFacts("", (), 4, trainable=True, used=True, row_update_blocker=None)
SLOW_TO_START = Cluster(bandwidth_bytes_per_ms=1e5, latency_ms=0.5, handling=Handling(round_ms=0.0))
"""A row of `DIM` takes as long as 1/200 of a start-up."""
NAMES = tuple(f"tables.{k}.weight" for k in range(len(ROWS)))


@functools.cache
def graph() -> TrainingGraph:
    ids = torch.zeros(2, len(ROWS) + 1, dtype=torch.int64)
    return analysed(Many(DIM), ids, torch.zeros(2))


def planned(
    rows: tuple[int, ...],
    read: tuple[int, ...],
    strategy: Strategy = "auto",
    current: Plan | None = None,
    padded: int | None = None,
    blocked: int | None = None,
) -> Plan:
    """The plan on 4 ranks, each of which reads `read` of the `rows` of the tables.

    Args:
        padded, blocked: the table that has a padding row, or an optimizer that moves every row.
    """
    by_name = {table.parameter: table for table in graph().tables}
    tables, facts = [], []
    for k, name in enumerate(NAMES):
        uses = by_name[name].uses
        uses = tuple(replace(use, padding_idx=0) for use in uses) if k == padded else uses
        tables.append(replace(by_name[name], num_rows=rows[k], uses=uses))
        facts.append(
            replace(FACTS, name=name, shape=(rows[k], DIM), row_update_blocker="moves all" if k == blocked else None)
        )
    read_by = {name: (read[k],) * 4 for k, name in enumerate(NAMES)}
    found = Findings(replace(graph(), tables=tuple(tables)), tuple(facts), read_by, 4, strategy)
    return decide(found, SLOW_TO_START, current)


def sharded(plan: Plan) -> set[int]:
    return {k for k, name in enumerate(NAMES) if plan[name].strategy == "alltoall"}


LARGE, SMALL = 100_000, 200
ONE_LARGE = (LARGE, SMALL, SMALL, SMALL, SMALL)
FEW = (20,) * 5


def test_small_tables_travel_with_one_that_is_sharded_anyway() -> None:
    plan = planned(ONE_LARGE, FEW)
    assert sharded(plan) == {0, 1, 2, 3, 4}
    assert [set(space.tables) for space in plan.spaces] == [set(NAMES)]
    assert plan[NAMES[3]].reason == (
        "shares start-ups with 4 others; 20 of 200 rows read (10.00%), 16 columns per rank"
    )
    against = {c.strategy: c.rejected for c in plan[NAMES[3]].candidates}
    assert against["alltoall"] == ""
    assert against["allreduce"].endswith("times the time, but not without the start-ups that alltoall shares")


def test_without_it_they_stay_whole() -> None:
    assert sharded(planned((SMALL,) * 5, FEW)) == set()
    assert sharded(planned(ONE_LARGE, FEW, strategy={NAMES[0]: "allreduce"})) == set()


def test_they_travel_together_where_that_saves_more_than_start_ups() -> None:
    """Of 500 rows, one saves less than a third of them."""
    assert sharded(planned((500, 500, 500, SMALL, SMALL), (20, 500, 20, 200, 20))) == set()
    assert sharded(planned((500,) * 5, FEW)) == {0, 1, 2, 3, 4}


def test_what_is_read_densely_stays_whole() -> None:
    assert sharded(planned(ONE_LARGE, (20, 20, SMALL, 20, 20))) == {0, 1, 3, 4}


def test_a_padding_row_keeps_no_table_out() -> None:
    assert sharded(planned(ONE_LARGE, FEW, padded=2)) == {0, 1, 2, 3, 4}


def test_what_cannot_be_in_the_space_stays_whole() -> None:
    assert sharded(planned(ONE_LARGE, FEW, blocked=2)) == {0, 1, 3, 4}
    assert sharded(planned(ONE_LARGE, FEW, strategy={NAMES[2]: "allreduce"})) == {0, 1, 3, 4}


def test_a_plan_in_use_is_changed_where_the_other_is_clearly_faster() -> None:
    nearly = (20, 160, 160, 160, 160)
    mostly = (20, 195, 195, 195, 195)
    whole = planned(ONE_LARGE, (20, 200, 200, 200, 200))
    travelling = planned(ONE_LARGE, FEW)
    assert sharded(planned(ONE_LARGE, nearly)) == {0, 1, 2, 3, 4}
    assert sharded(planned(ONE_LARGE, nearly, current=whole)) == {0}
    anew = planned(ONE_LARGE, FEW, current=whole)
    assert sharded(anew) == {0, 1, 2, 3, 4}
    assert not any("in use" in candidate.rejected for candidate in anew[NAMES[3]].candidates)
    assert sharded(planned(ONE_LARGE, mostly)) == {0}
    assert sharded(planned(ONE_LARGE, mostly, current=travelling)) == {0, 1, 2, 3, 4}


def test_what_depends_on_rows_is_watched() -> None:
    assert set(planned(ONE_LARGE, FEW).watched) == set(NAMES)


def test_a_single_process_has_nothing_to_share() -> None:
    (fact,) = (replace(FACTS, name=NAMES[0], shape=(SMALL, DIM)),)
    plan = decide(Findings(graph(), (fact,), {NAMES[0]: (200,)}, 1))
    assert plan[NAMES[0]].strategy == "allreduce"
    assert plan[NAMES[0]].candidates == ()


def test_tables_share_start_ups_under_every_schedule() -> None:
    facts = tuple(replace(FACTS, name=name, shape=(500, DIM)) for name in NAMES)
    tables = tuple(replace(table, num_rows=500) for table in graph().tables)
    rows = dict.fromkeys(NAMES, (20,) * 4)
    naive, looking_ahead = (
        decide(Findings(replace(graph(), tables=tables), facts, rows, 4, schedule=schedule), SLOW_TO_START)
        for schedule in ("none", "2d")
    )
    assert (sharded(naive), len(naive.spaces)) == ({0, 1, 2, 3, 4}, 1)
    assert (sharded(looking_ahead), len(looking_ahead.spaces)) == ({0, 1, 2, 3, 4}, 1)
