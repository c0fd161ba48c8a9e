"""Plans that a later batch does not fit: what they lack, and what is added, as plain data."""

from __future__ import annotations

from dataclasses import replace

from embrace_fx.passes.planner.decide import decide
from embrace_fx.passes.planner.pricing import Findings
from embrace_fx.planning.findings import WHOLE
from embrace_fx.planning.plan_fit import LATE, PlanViolation, fitted, violation
from embrace_fx.vocabulary.plan import Plan
from embrace_fx.vocabulary.row_space import RowSpace
from tests.support.planned import FACTS, OTHER, ROWS, TABLE, graph_of, planned

SHAPES = {TABLE: (1_000_000, 4), OTHER: (10, 4), "linear.weight": (4, 4), "linear.bias": (4,)}


def plan_without(*unused: str, world_size: int = 2) -> Plan:
    """One for a first batch that gave some parameters no gradient."""
    facts = tuple(replace(FACTS, name=name, shape=shape, used=name not in unused) for name, shape in SHAPES.items())
    return decide(Findings(graph_of(1_000_000), facts, ROWS, world_size, {TABLE: "alltoall"}))


def test_a_parameter_that_is_first_used_later_is_late() -> None:
    graph = graph_of(1_000_000)
    assert violation(plan_without("linear.bias"), graph) == PlanViolation(late=("linear.bias",))
    assert not violation(plan_without(), graph)


def test_neither_what_each_rank_has_for_itself_nor_what_a_single_rank_has_is_late() -> None:
    graph = graph_of(1_000_000)
    assert not violation(plan_without("linear.bias"), graph, ignored=["linear.bias"])
    assert not violation(plan_without("linear.bias", world_size=1), graph)


def test_a_sharded_table_with_a_hook_is_wanted_whole_and_a_replica_is_not() -> None:
    graph = graph_of(1_000_000)
    assert violation(plan_without(), graph, hooked=[TABLE, "linear.weight"]) == PlanViolation(whole=(TABLE,))


def test_a_table_that_is_read_densely_is_wanted_whole() -> None:
    graph = graph_of(1_000_000)
    tables = tuple(replace(t, dense_users=("mm",)) if t.parameter == TABLE else t for t in graph.tables)
    assert violation(plan_without(), replace(graph, tables=tables)) == PlanViolation(whole=(TABLE,))


def test_what_ranks_lack_is_reduced_in_buckets_of_its_own_and_the_rest_stays() -> None:
    old = plan_without("linear.bias")
    new = fitted(old, [PlanViolation(late=("linear.bias",)), PlanViolation(), PlanViolation(whole=(TABLE,))])
    assert (new["linear.bias"].strategy, new["linear.bias"].reason) == ("allreduce", LATE)
    assert (new[TABLE].strategy, new[TABLE].reason) == ("allreduce", WHOLE)
    assert new[TABLE].sent_bytes_per_step == old[TABLE].ddp_bytes_per_step
    assert new.buckets == (*old.buckets, ("linear.bias",), (TABLE,))
    assert [new[name] for name in (OTHER, "linear.weight")] == [old[name] for name in (OTHER, "linear.weight")]


def test_the_order_in_which_ranks_lack_things_does_not_matter() -> None:
    old, needed = plan_without("linear.bias"), [PlanViolation(late=("linear.bias",)), PlanViolation(whole=(TABLE,))]
    assert fitted(old, needed) == fitted(old, needed[::-1])


def test_a_row_space_goes_on_without_a_table_that_is_made_whole() -> None:
    old = planned(strategy="alltoall")
    names = (TABLE, OTHER, "third.weight")
    third = replace(old[OTHER], parameter=names[2], shape=(7, 4))
    joined = replace(old, decisions=(*old, third), spaces=(RowSpace(names, (0, 1_000_000, 1_000_010, 1_000_017)),))
    left = RowSpace((TABLE, names[2]), (0, 1_000_000, 1_000_007))
    assert fitted(joined, [PlanViolation(whole=(OTHER,))]).spaces == (left,)
    assert fitted(joined, [PlanViolation(whole=(OTHER, TABLE))]).spaces == ()  # one table is no space
