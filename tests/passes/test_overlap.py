"""Leaving communication to the next step: what is submitted, what is awaited, and that nothing else changes."""

from __future__ import annotations

import pytest

from embrace_fx.passes.pipeline import overlap_passes, run_passes, training_passes
from embrace_fx.passes.verifier.invariants import verify
from embrace_fx.vocabulary.graph import Parameter, TrainingGraph
from embrace_fx.vocabulary.schedule import SCHEDULES, Cuts
from tests.support.golden import check_golden
from tests.support.graphs import IDS, analysed, classifier, tables_model, text
from tests.support.many_uses import OTHER, TABLE, many_uses, plan_of
from tests.support.table_cases import plain


def partitioned(*sharded: str, buckets: tuple[tuple[str, ...], ...], forward: object = many_uses) -> TrainingGraph:
    plan = plan_of(*sharded, world_size=2, buckets=buckets)
    model = tables_model(forward)  # type: ignore[arg-type]
    return run_passes(analysed(model, IDS), training_passes(plan, {TABLE, OTHER}, 0)).graph


def overlapped(
    graph: TrainingGraph,
    buckets: tuple[tuple[str, ...], ...],
    schedule: str,
    tables: tuple[str, ...] = (TABLE, OTHER),
) -> TrainingGraph:
    """After the passes of a schedule; each bucket in two chunks, each table's delayed gradients in two pieces."""
    parameters = {role.name: node.meta["val"] for node, role in graph.inputs() if isinstance(role, Parameter)}
    sizes = [sum(parameters[name].numel() for name in bucket) for bucket in buckets]
    cuts = Cuts(tuple((size - size // 2, size // 2) for size in sizes), tuple((table, 2) for table in tables))
    result = graph
    for each in overlap_passes(plan_of(world_size=2, buckets=buckets), schedule, 0, cuts):
        before, result = result, each(result)
        verify(result, after=type(each).__name__, captured=graph, previous=before)
    return result


@pytest.mark.parametrize("schedule", SCHEDULES[1:])
def test_golden(schedule: str) -> None:
    buckets = (("classify.weight", "classify.bias"),)
    plan = plan_of("words.weight", world_size=2, buckets=buckets)
    graph = run_passes(analysed(classifier(), IDS), training_passes(plan, {"words.weight"}, 0)).graph
    result = overlapped(graph, buckets, schedule, tables=("words.weight",))
    phases = (f"# {name}\n{text(result.phases[name])}" for name in ("forward", "backward"))
    check_golden(f"overlap_{schedule}", "\n".join(phases))


def test_a_graph_without_a_backward_is_left_alone() -> None:
    graph = partitioned(TABLE, buckets=())
    graph = TrainingGraph(graph.module, graph.tables, {n: graph.phases[n] for n in ("unique", "ids", "forward")})
    for each in overlap_passes(plan_of(TABLE, buckets=()), "2d", 0, Cuts((), ((TABLE, 1),))):
        assert each(graph) is graph


def test_without_tables_and_buckets_nothing_is_overlapped() -> None:
    graph = partitioned(buckets=(), forward=plain)
    result = overlapped(graph, (), "horizontal")
    assert {name: text(m) for name, m in result.phases.items()} == {n: text(m) for n, m in graph.phases.items()}
