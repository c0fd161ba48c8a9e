"""When ranks ask for another plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import SGD

import embrace_fx
from embrace_fx.cost.sparsity import measure_sparsity, with_units_by_rank
from embrace_fx.passes.planner.asked_strategies import Strategy
from embrace_fx.passes.planner.decide import decide
from embrace_fx.passes.planner.plan_fit import used_parameters
from embrace_fx.passes.planner.pricing import Findings
from embrace_fx.passes.planner.replanning import CONFIRMED_BY, LOOK_EVERY, SparsityMonitor
from embrace_fx.planning.findings import collect_facts
from embrace_fx.runtime.tables.update_rule import KnownOptimizers
from tests.support.drifting import LINKS, OTHER, ROWS, TABLE, batch, make
from tests.support.graphs import analysed


@pytest.mark.parametrize("strategy", ["alltoall", pytest.param({"drifting.*": "zen"}, marks=pytest.mark.long)])
def test_what_was_asked_for_is_not_watched(strategy: Strategy) -> None:
    model = make()

    def watched(strategy: Strategy) -> tuple[str, ...]:
        optimizer = SGD(model.parameters(), 0.1)
        plan = embrace_fx.plan(model, [batch(0, 0), batch(0, 1)], optimizer=optimizer, cluster=LINKS, strategy=strategy)
        return plan.watched

    assert TABLE in watched("auto")
    assert TABLE not in watched(strategy)


def _findings() -> Findings:
    """Returns findings about the two tables, from the first batches of two ranks."""
    graph = analysed(make(), *batch(0, 0))
    facts = collect_facts(make(), graph, KnownOptimizers(), "exact", used_parameters(graph), {})
    legal = tuple(replace(fact, row_update_blocker=None) for fact in facts)
    rows = {TABLE: (8, 8), OTHER: (6, 6)}
    return Findings(graph, legal, rows, 2)


def _drift() -> SparsityMonitor:
    """Returns the monitor of rank 0."""
    findings = _findings()
    return SparsityMonitor(decide(findings, LINKS, links_are="given"), findings)


def _samples_until_wanted(drift: SparsityMonitor, rows: Callable[[int], int], limit: int = 200) -> int | None:
    for sample in range(limit):
        drift.observe({TABLE: (rows(sample),) * 2, OTHER: (6, 6)})
        if drift.wants_plan:
            return sample + 1
    return None


def test_a_shift_that_stays_is_answered_soon() -> None:
    found = _samples_until_wanted(_drift(), lambda sample: 115)
    assert found is not None
    assert found <= LOOK_EVERY * (CONFIRMED_BY + 1)


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(lambda sample: 8 + sample % 3, id="noise"),
        pytest.param(lambda sample: 115 if sample % 40 == 0 else 8, id="a batch unlike the others now and then"),
        pytest.param(lambda sample: 20, id="more rows, and the same strategy"),
        pytest.param(lambda sample: 8 if sample < 100 else -1, id="a rank that does not know"),
    ],
)
def test_what_changes_no_strategy_clearly_is_left_alone(rows: Callable[[int], int]) -> None:
    assert _samples_until_wanted(_drift(), rows) is None


def test_on_the_border_the_strategy_in_use_stays() -> None:
    """Between the two densities at which one strategy gives way to the other, either stays."""
    findings = _findings()
    plan = decide(findings, LINKS, links_are="given")
    at = {
        name: [
            decide(findings.with_rows({TABLE: (rows, rows)}), LINKS, current)[TABLE].strategy
            for rows in range(1, ROWS + 1)
        ]
        for name, current in (
            ("sharded", plan),
            ("replicated", decide(findings.with_rows({TABLE: (ROWS, ROWS)}), LINKS)),
        )
    }
    leaves_shards = at["sharded"].index("allreduce")
    leaves_replicas = ROWS - at["replicated"][::-1].index("alltoall")

    assert leaves_shards > 1.3 * leaves_replicas
    assert at["sharded"] == sorted(at["sharded"], reverse=True)  # changes once as ranks read more rows
    assert at["replicated"] == sorted(at["replicated"], reverse=True)


@given(st.integers(2, 6), st.integers(1, 200), st.integers(1, 200), st.integers(0, 10**6))
def test_ranks_have_as_much_in_common_with_other_numbers_of_rows(ranks: int, units: int, other: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    ids = [torch.randperm(200, generator=random)[:units] for _ in range(ranks)]
    found = measure_sparsity(ids, 200, 4, 8)
    same, moved = with_units_by_rank(found, (units,) * ranks), with_units_by_rank(found, (other,) * ranks)
    assert same.unions == pytest.approx(found.unions)
    assert moved.unions[0] == pytest.approx(other)
    assert all(other <= union <= min(200, k * other) + 1e-6 for k, union in enumerate(moved.unions, start=1))
    if units < 200:  # if all rows are read, the union is the whole table in any case
        alike = with_units_by_rank(measure_sparsity([ids[0]] * ranks, 200, 4, 8), (other,) * ranks)
        assert alike.unions == pytest.approx((other,) * ranks)
