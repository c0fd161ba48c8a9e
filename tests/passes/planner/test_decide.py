"""Deciding strategies: what is legal comes first, then what was asked for, then what is cheaper."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embrace_fx.cost import links as cost
from embrace_fx.cost.sparsity import Sparsity
from embrace_fx.passes.planner.decide import decide
from embrace_fx.passes.planner.pricing import CLEARLY, Findings
from embrace_fx.passes.planner.step_cost import ROUNDS, UPDATE_PASSES, launches_per_step
from embrace_fx.vocabulary.plan import CANDIDATES, EXCHANGES, STRATEGIES, Decision, Plan
from embrace_fx.vocabulary.sizes import RowCounts
from tests.support.graphs import IDS, analysed, table_of, tables_model
from tests.support.planned import FACTS, OTHER, ROWS, TABLE, graph_of, planned
from tests.support.table_cases import ILLEGAL, example, plain


def first(plan: Plan) -> tuple[str, str]:
    return plan[TABLE].strategy, plan[TABLE].reason


def test_the_rows_of_all_ranks_are_in_the_plan() -> None:
    rows = {TABLE: (30, 50), OTHER: (0, 0)}
    assert planned(60, rows=rows, world_size=2).rows == {TABLE: RowCounts(50, 80, 60)}
    lying = Sparsity(60, 4, 8, (30, 50), (40.0, 52.6))
    assert planned(60, rows=rows, world_size=2, sparsity={TABLE: lying}).rows == {TABLE: RowCounts(50, 80, 53)}


CHOSEN: dict[str, tuple[dict[str, Any], str, str]] = {
    "few rows of a large table": ({}, "alltoall", "120 of 1000000 rows read (0.01%), 2 columns per rank"),
    "whole as asked for": ({"strategy": "allreduce"}, "allreduce", "requested"),
    "shards as asked for": ({"num_rows": 200, "strategy": "alltoall"}, "alltoall", "requested; 120 of 200 rows read"),
    "updated by rows": ({"num_rows": 200, "dense_update_policy": "lazy"}, "alltoall", "updated by rows;"),
    "not to be sharded": ({"row_update_blocker": "Adam moves", "strategy": "alltoall"}, "allreduce", "Adam moves"),
    "shards before exchanges": ({"num_rows": 4_000_000}, "alltoall", "120 of 4000000"),
}


@pytest.mark.parametrize(("facts", "strategy", "reason"), CHOSEN.values(), ids=CHOSEN)
def test_a_table_is_placed_and_the_plan_says_why(facts: dict[str, Any], strategy: str, reason: str) -> None:
    found = first(planned(**facts))
    assert found[0] == strategy
    assert found[1].startswith(reason)


def test_most_rows_of_a_small_table_are_not() -> None:
    strategy, reason = first(planned(200))
    ms = {c.strategy: c.predicted_ms for c in planned(200)[TABLE].candidates}
    assert strategy == "allreduce"
    assert reason.startswith("AllReduce adds 0.009 ms to a step, shards ")
    assert reason.endswith(f"{ms['alltoall']:.3f} ms: 120 of 200 rows read (60.00%), 2 columns per rank")


def test_what_is_nearly_as_fast_whole_is_sharded() -> None:
    strategy, reason = first(planned(80_000))
    ms = {c.strategy: c.predicted_ms for c in planned(80_000)[TABLE].candidates}
    assert 0.8 < ms["allreduce"] / ms["alltoall"] < 1
    assert (strategy, reason) == (
        "alltoall",
        "a whole table is not clearly faster; 120 of 80000 rows read (0.15%), 2 columns per rank",
    )
    assert first(planned(50_000))[0] == "allreduce"


def test_ids_that_are_always_the_same_are_not() -> None:
    assert (planned()[OTHER].strategy, planned()[OTHER].reason) == ("allreduce", "its ids do not depend on the batch")


@pytest.mark.parametrize(("rows", "expected"), [(100, "alltoall"), (6_000, "allreduce")])
def test_a_single_process_updates_by_rows_where_few_are_read(rows: int, expected: str) -> None:
    plan = planned(10_000, rows={TABLE: (rows,), OTHER: (3,)}, world_size=1)
    assert plan[TABLE].strategy == expected
    assert plan[TABLE].predicted_ms == 0.0
    assert plan.buckets == ()


def test_a_strategy_may_be_asked_for_by_a_pattern() -> None:
    assert planned(strategy={"other.*": "alltoall"})[OTHER].strategy == "alltoall"


@pytest.mark.parametrize("strategy", ["auto", "alltoall", "allreduce"])
@pytest.mark.parametrize("name", ["a tied projection", "a max bag", "ids from a parameter", "scaled by frequency"])
def test_an_illegal_table_stays_whole_whatever_was_asked_for(name: str, strategy: str) -> None:
    case, (_, graph) = ILLEGAL[name], example(name)
    facts = (replace(FACTS, name=TABLE, shape=(10, 4), dense_update_policy="lazy"),)
    decision = decide(Findings(graph, facts, {TABLE: (3, 3)}, 2, strategy))[TABLE]
    assert decision.strategy == "allreduce"
    assert str(case.blocker) in decision.reason


@pytest.mark.parametrize(
    ("facts", "strategy", "sent"),
    [({"trainable": False}, "frozen", 0), ({"used": False}, "unused", 0), ({}, "alltoall", None)],
)
def test_parameters_that_need_no_exchange(facts: dict[str, Any], strategy: str, sent: int | None) -> None:
    decision = planned(**facts)[TABLE]
    assert decision.strategy == strategy
    assert sent is None or decision.sent_bytes_per_step == sent


def test_every_parameter_has_a_decision_and_only_replicas_are_bucketed() -> None:
    plan = planned()
    assert [decision.parameter for decision in plan] == [TABLE, OTHER, "linear.weight", "linear.bias"]
    assert [decision.is_table for decision in plan] == [True, True, False, False]
    assert {name for bucket in plan.buckets for name in bucket} == {OTHER, "linear.weight", "linear.bias"}


def test_max_norm_tables_are_kept_equal() -> None:
    graph = analysed(tables_model(plain, max_norm=1.0), IDS)
    facts = (replace(FACTS, name=TABLE, shape=(10, 4)),)
    assert decide(Findings(graph, facts, {TABLE: (4, 4)}, 2)).renormed == (TABLE,)
    assert decide(Findings(graph, facts, {TABLE: (4,)}, 1)).renormed == ()


LARGE = 4_000_000
"""Rows of which 120 are read: no AllReduce of the whole table can be fast."""
MOVES = "Adam moves every row"


def test_a_large_table_that_cannot_be_sharded_is_exchanged_sparsely() -> None:
    plan = planned(LARGE, row_update_blocker=MOVES)
    assert plan[TABLE].strategy in EXCHANGES
    assert plan[TABLE].reason == f"{MOVES}; 120 of {LARGE} rows read (0.00%)"
    assert plan.exchanged == (TABLE,)
    assert plan.sharded == ()


def test_an_exchange_that_sends_as_much_as_allreduce_is_not_chosen() -> None:
    """The measured rates of links do not matter."""
    rows = 1_000
    facts = (replace(FACTS, name=TABLE, shape=(rows, 4), row_update_blocker=MOVES),)
    slow, fast = cost.Link(1e3, 1.0), cost.Link(1e7, 1e-3)
    links = cost.Cluster(1e3, 1.0, (("all_reduce", slow), ("all_to_all", fast), ("all_gather", fast)))
    decision = decide(Findings(graph_of(rows), facts, {TABLE: (rows, rows), OTHER: (3, 3)}, 2), links)[TABLE]
    assert decision.strategy == "allreduce"
    took_ms = {each.strategy: each.predicted_ms for each in decision.candidates}
    assert min(took_ms[name] for name in EXCHANGES if name in took_ms) < took_ms["allreduce"]


def test_a_table_that_is_read_densely_counts_as_dense() -> None:
    _, graph = example("a tied projection")
    table = replace(table_of(graph), num_rows=LARGE)
    facts = (replace(FACTS, name=TABLE, shape=(LARGE, 4)),)
    decision = decide(Findings(replace(graph, tables=(table,)), facts, {TABLE: (3, 3)}, 2))[TABLE]
    assert decision.strategy == "allreduce"
    by_name = {candidate.strategy: candidate for candidate in decision.candidates}
    assert by_name["allgather"].sent_bytes_per_step > by_name["allreduce"].sent_bytes_per_step


@given(st.sampled_from([200, 10_000, 300_000, LARGE]), st.sampled_from([2, 4, 16]), st.booleans())
def test_a_sparse_exchange_is_chosen_where_it_takes_less_than_what_others_add_to_a_step(
    rows: int, ranks: int, blocked: bool
) -> None:
    read = {TABLE: (100,) * ranks, OTHER: (3,) * ranks}
    decision = planned(rows, read, ranks, row_update_blocker=MOVES if blocked else None)[TABLE]

    legal = [c for c in decision.candidates if c.strategy != "alltoall" or not blocked]
    sparse = [c.predicted_ms for c in legal if c.strategy in EXCHANGES]
    others = [c for c in legal if c.strategy not in EXCHANGES]
    launch_ms = (ranks - 1) * 0.05
    shared_ms = {
        "allreduce": 2 * launch_ms,
        "alltoall": launches_per_step("2d") * (launch_ms + ROUNDS * cost.Handling().round_ms),
    }
    part = {"allreduce": 1.0, "alltoall": CLEARLY}
    limit_ms = min(part[c.strategy] * (c.predicted_ms - shared_ms[c.strategy]) for c in others)
    if decision.strategy in EXCHANGES:
        assert decision.predicted_ms == min(sparse) < limit_ms
    else:
        assert min(sparse) >= limit_ms * (1 - 1e-9)
        added_ms = {c.strategy: c.predicted_ms - (c.strategy == "allreduce") * shared_ms["allreduce"] for c in others}
        assert added_ms[decision.strategy] == min(added_ms.values())


def test_a_processor_that_is_slow_to_search_has_dense_gradients_summed() -> None:
    """A sparse exchange reads the whole gradient to find its nonzero rows, which an AllReduce need not do."""
    facts = (replace(FACTS, name=TABLE, shape=(LARGE, 4), row_update_blocker=MOVES),)

    def chosen(scan_bytes_per_ms: float) -> str:
        links = cost.Cluster(handling=cost.Handling(scan_bytes_per_ms=scan_bytes_per_ms))
        return decide(Findings(graph_of(LARGE), facts, ROWS, 2), links)[TABLE].strategy

    assert chosen(8e6) in EXCHANGES
    assert chosen(1e6) == "allreduce"


def test_the_update_of_every_row_speaks_against_replicas() -> None:
    """Two ranks on a fast link exchange few rows in next to no time; what costs is an update of 22,000 rows."""
    rows, width = 22_000, 128
    table = replace(table_of(graph_of(rows)), embedding_dim=width)
    facts = (replace(FACTS, name=TABLE, shape=(rows, width), itemsize=4),)
    links = cost.Cluster(bandwidth_bytes_per_ms=200e6 / 8 / 1e3)
    plan = decide(Findings(replace(graph_of(rows), tables=(table,)), facts, {TABLE: (240, 240)}, 2), links)
    assert plan[TABLE].strategy == "alltoall"
    replicas = [c for c in plan[TABLE].candidates if c.strategy != "alltoall"]
    assert min(c.predicted_ms for c in replicas) > UPDATE_PASSES * rows * width * 4 / 1e7


@pytest.mark.parametrize("strategy", EXCHANGES)
@pytest.mark.parametrize("blocker", [None, MOVES])
def test_a_sparse_exchange_may_be_asked_for_whatever_the_optimizer(strategy: str, blocker: str | None) -> None:
    plan = planned(200, strategy=strategy, row_update_blocker=blocker)
    assert first(plan) == (strategy, "requested; 120 of 200 rows read (60.00%)")
    assert plan[OTHER].strategy == strategy
    assert plan["linear.weight"].strategy == "allreduce"


def test_a_dense_parameter_may_be_asked_for_by_name() -> None:
    plan = planned(strategy={"linear.weight": "omnireduce", TABLE: "zen"})
    assert plan.exchanged == (TABLE, "linear.weight")
    assert plan["linear.weight"].reason == "requested; predicted for a gradient without zeros"
    assert plan["linear.bias"].strategy == "allreduce"
    with pytest.raises(ValueError, match="matches no table"):
        planned(strategy={"linear.weight": "alltoall"})


def test_zen_has_the_scheme_that_takes_less_time() -> None:
    """Sixteen ranks with a hundred rows each: doubling has fewer start-ups. With many bytes, hashing sends fewer."""
    rows = {TABLE: (100,) * 16, OTHER: (3,) * 16}
    assert planned(rows=rows, world_size=16, strategy="zen")[TABLE].scheme == "hierarchical"
    rows = {TABLE: (400_000,) * 16, OTHER: (3,) * 16}
    assert planned(LARGE, rows, world_size=16, strategy="zen")[TABLE].scheme == "balanced"
    assert planned(strategy="ps")[TABLE].scheme == ""


def test_every_candidate_is_weighed_and_one_chosen() -> None:
    candidates = planned()[TABLE].candidates
    assert {c.strategy for c in candidates} == set(CANDIDATES)
    assert [c.strategy for c in candidates if not c.rejected] == ["alltoall"]
    assert [c.predicted_ms for c in candidates] == sorted(c.predicted_ms for c in candidates)
    blocked = {c.strategy: c.rejected for c in planned(row_update_blocker=MOVES)[TABLE].candidates}
    assert blocked["alltoall"] == MOVES
    forced = {c.strategy: c.rejected for c in planned(strategy="ps")[TABLE].candidates}
    assert forced["zen"] == "ps was requested"
    assert planned()["linear.bias"].candidates == ()


def test_what_auto_never_picks_is_weighed_where_it_is_asked_for() -> None:
    assert set(STRATEGIES) - set(CANDIDATES) == {"omnireduce", "vocabulary"}
    candidates = planned(strategy="omnireduce")[TABLE].candidates
    assert {c.strategy for c in candidates} == {*CANDIDATES, "omnireduce"}
    assert [c.strategy for c in candidates if not c.rejected] == ["omnireduce"]


def test_a_plan_in_use_is_weighed_with_the_strategy_that_it_has() -> None:
    forced = planned(LARGE, strategy="omnireduce")
    facts = (replace(FACTS, name=TABLE, shape=(LARGE, 4)),)
    anew = decide(Findings(graph_of(LARGE), facts, ROWS, 2), current=forced)[TABLE]
    assert anew.strategy == "alltoall"
    assert {c.strategy for c in anew.candidates} == {*CANDIDATES, "omnireduce"}


@pytest.mark.parametrize("so_far", ["unused", "frozen"])
def test_a_table_that_no_plan_has_exchanged_is_chosen_for_anew(so_far: str) -> None:
    fresh = planned()
    facts = tuple(replace(FACTS, name=d.parameter, shape=d.shape) for d in fresh)
    before = replace(fresh, decisions=tuple(replace(d, strategy=so_far) for d in fresh))
    anew = decide(Findings(graph_of(1_000_000), facts, ROWS, 2), current=before)
    assert [d.strategy for d in anew] == [d.strategy for d in fresh]


def test_ids_that_ranks_share_make_unions_small_and_zen_cheap() -> None:
    rows = {TABLE: (100_000,) * 8, OTHER: (3,) * 8}
    apart = planned(LARGE, rows, 8, strategy="zen")[TABLE]
    shared = Sparsity(LARGE, 4, 8, (100_000,) * 8, (100_000.0,) * 8)
    facts = tuple(replace(FACTS, name=d.parameter, shape=d.shape) for d in planned(LARGE))
    together = decide(Findings(graph_of(LARGE), facts, rows, 8, "zen", sparsity={TABLE: shared}))[TABLE]
    assert together.sent_bytes_per_step < 0.6 * apart.sent_bytes_per_step


def test_start_ups_decide_on_slow_links_and_bytes_on_narrow_ones() -> None:
    """A sharded table sends fewer bytes in more messages than a replica."""
    facts = (replace(FACTS, name=TABLE, shape=(10_000, 4)),)

    def chosen(links: cost.Cluster) -> str:
        return decide(Findings(graph_of(10_000), facts, ROWS, 2), links)[TABLE].strategy

    assert chosen(cost.Cluster(1e6, 10.0)) == "allreduce"
    assert chosen(cost.Cluster(1e3, 0.01)) == "alltoall"


def test_the_plan_keeps_what_it_was_cut_for() -> None:
    links = cost.Cluster(1000.0, 1.0)
    facts = (replace(FACTS, name=TABLE, shape=(10_000, 4)),)
    assert decide(Findings(graph_of(10_000), facts, ROWS, 2), links).links == links
    assert planned().links == cost.Cluster()


@pytest.mark.long
def test_bytes_of_a_sharded_table_do_not_depend_on_its_rows() -> None:
    def of(rows: int) -> Decision:
        return planned(rows, strategy={TABLE: "alltoall"})[TABLE]

    assert of(1_000).sent_bytes_per_step == of(1_000_000).sent_bytes_per_step
    assert of(1_000_000).ddp_bytes_per_step == 1000 * of(1_000).ddp_bytes_per_step
