"""Leaving communication to the next step: what is submitted, what is awaited, and that nothing else changes."""

from __future__ import annotations

import operator

import pytest
import torch

from embrace_fx.passes.relax import RelaxDependences
from embrace_fx.passes.verifier.invariants import verify
from embrace_fx.session.pipeline import relaxing_passes, run_passes, training_passes
from embrace_fx.vocabulary.graph import (
    Gradient,
    Parameter,
    PendingGradients,
    PendingRows,
    Result,
    RowGradient,
    Saved,
    Shard,
    TrainingGraph,
    inputs_of,
    outputs_of,
)
from embrace_fx.vocabulary.schedule import SCHEDULES
from tests.session.test_pipeline import OTHER, TABLE, many_uses, plan_of
from tests.support.golden import check_golden
from tests.support.graphs import IDS, analysed, classifier, tables_model, targets, text
from tests.support.table_cases import plain

DENSE = ("linear.bias", "linear.weight")


def partitioned(
    *sharded: str, buckets: tuple[tuple[str, ...], ...], forward: object = many_uses, reduce: bool = True
) -> TrainingGraph:
    plan = plan_of(*sharded, world_size=2, buckets=buckets)
    model = tables_model(forward)  # type: ignore[arg-type]
    return run_passes(analysed(model, IDS), training_passes(plan, {TABLE, OTHER}, 0, reduce=reduce)).graph


def relaxed(graph: TrainingGraph, buckets: tuple[tuple[str, ...], ...], horizontal: bool) -> TrainingGraph:
    result = RelaxDependences(buckets, horizontal)(graph)
    verify(result, after="RelaxDependences", captured=graph, previous=graph)
    return result


def ops(graph: TrainingGraph, phase: str, *kinds: str) -> list[str]:
    found = (name.split("::")[1] for name in targets(graph.phases[phase].graph))
    return [name for name in found if name.startswith(kinds)]


@pytest.mark.parametrize("horizontal", [False, True], ids=["rows", "rows_and_buckets"])
def test_golden(horizontal: bool) -> None:
    buckets = (("classify.weight", "classify.bias"),)
    plan = plan_of("words.weight", world_size=2, buckets=buckets)
    graph = run_passes(analysed(classifier(), IDS), training_passes(plan, {"words.weight"}, 0)).graph

    result = relaxed(graph, buckets, horizontal)

    phases = (f"# {name}\n{text(result.phases[name])}" for name in ("forward", "backward"))
    check_golden(f"relax_{'rows_and_buckets' if horizontal else 'rows'}", "\n".join(phases))


def test_a_graph_without_a_backward_is_left_alone() -> None:
    graph = partitioned(TABLE, buckets=())
    graph = TrainingGraph(graph.module, graph.tables, {n: graph.phases[n] for n in ("unique", "ids", "forward")})

    assert RelaxDependences((), horizontal=True)(graph) is graph


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_which_schedule_relaxes_what(schedule: str) -> None:
    passes = relaxing_passes(plan_of(TABLE, buckets=(DENSE,)), schedule, 0)

    expected = {"none": (), "vertical": (RelaxDependences((DENSE,), False),)}
    assert passes == expected.get(schedule, (RelaxDependences((DENSE,), True),))


def test_rows_are_submitted_and_awaited() -> None:
    buckets = (("vector", *DENSE),)
    graph = partitioned(TABLE, OTHER, buckets=buckets)

    result = relaxed(graph, buckets, horizontal=False)

    kinds = ("all_to_all", "await", "submit", "all_reduce", "wait_tensor", "lookup", "coalesce")
    assert sorted(ops(graph, "forward", *kinds)) == sorted(["lookup", "all_to_all_rows", "wait_tensor"] * 2)
    assert ops(result, "forward", *kinds) == ["await_rows"] * 2
    assert ops(result, "backward", *kinds).count("submit_rows") == 2
    assert ops(result, "backward", "all_reduce", "wait_tensor") == ["all_reduce_", "wait_tensor"]
    roles = [role for _, role in outputs_of(result.phases["backward"])]
    assert {role.table for role in roles if isinstance(role, PendingRows)} == {TABLE, OTHER}
    assert not any(isinstance(role, RowGradient) for role in roles)
    assert {role.of for role in roles if isinstance(role, Gradient)} == {Parameter(name) for name in buckets[0]}


def test_each_bucket_is_submitted_and_awaited_once() -> None:
    buckets = (("vector",), DENSE, (OTHER,))
    graph = partitioned(TABLE, buckets=buckets)

    result = relaxed(graph, buckets, horizontal=True)

    assert ops(result, "backward", "submit_bucket") == ["submit_bucket"] * 3
    assert not ops(result, "backward", "all_reduce", "wait_tensor", "unpack_bucket")
    roles = [role for _, role in outputs_of(result.phases["backward"])]
    pending = [role for role in roles if isinstance(role, PendingGradients)]
    assert pending == [PendingGradients(k, bucket) for k, bucket in enumerate(buckets)]
    assert not any(isinstance(role, Gradient) for role in roles)
    awaited = result.phases["forward"].graph.find_nodes(
        op="call_function", target=torch.ops.embrace.await_update.default
    )
    assert sorted(node.args[1] for node in awaited) == [0, 1, 2]


def test_a_parameter_is_awaited_just_before_its_first_reader() -> None:
    buckets = (("vector",), DENSE, (OTHER,))
    result = relaxed(partitioned(TABLE, buckets=buckets), buckets, horizontal=True)
    forward = result.phases["forward"]

    position = {node: k for k, node in enumerate(forward.graph.nodes)}
    for node, role in inputs_of(forward):
        if not isinstance(role, Parameter):
            continue
        (awaited,) = node.users  # nothing else reads the parameter itself
        assert awaited.target is torch.ops.embrace.await_update.default
        items = [item for item in awaited.users if item.target is operator.getitem]
        readers = [reader for item in items for reader in item.users]
        between = [n for n in position if position[awaited] < position[n] < min(map(position.__getitem__, readers))]
        assert set(between) <= set(items)


def test_what_stays_as_it_was() -> None:
    buckets = (("vector", *DENSE),)
    graph = partitioned(TABLE, OTHER, buckets=buckets)
    before = {name: text(module) for name, module in graph.phases.items()}

    result = relaxed(graph, buckets, horizontal=True)

    assert {name: text(module) for name, module in graph.phases.items()} == before  # a pass changes copies
    assert result.module is graph.module
    assert all(text(result.phases[name]) == before[name] for name in ("unique", "ids"))
    saved = {role for _, role in outputs_of(graph.phases["forward"]) if isinstance(role, Saved)}
    assert {role for _, role in outputs_of(result.phases["forward"]) if isinstance(role, Saved)} == saved
    results = [role for _, role in outputs_of(result.phases["forward"]) if isinstance(role, Result)]
    assert results == [Result(0)]


def test_without_tables_and_buckets_nothing_is_relaxed() -> None:
    graph = partitioned(buckets=(), forward=plain)

    result = relaxed(graph, (), horizontal=True)

    assert {name: text(m) for name, m in result.phases.items()} == {n: text(m) for n, m in graph.phases.items()}


def test_an_unread_table_is_no_input_of_the_backward() -> None:
    result = relaxed(partitioned(TABLE, OTHER, buckets=(("vector", *DENSE),)), (("vector", *DENSE),), horizontal=True)

    for module in result.phases.values():
        assert all(node.users for node, role in inputs_of(module) if isinstance(role, Parameter | Shard))
