"""Leaving communication to the next step: what is submitted, what is awaited, and that nothing else changes."""

from __future__ import annotations

import operator
from functools import partial

import pytest
import torch
from torch import fx

from embrace_fx.passes.overlap.await_late import AwaitRowsLate
from embrace_fx.passes.overlap.buckets import ChunkBuckets, UpdateBeforeRead
from embrace_fx.passes.overlap.rows import SubmitRows
from embrace_fx.passes.overlap.split import SplitRows
from embrace_fx.passes.overlap.submit_early import SubmitGradientsEarly
from embrace_fx.passes.pipeline import overlap_passes, run_passes, training_passes
from embrace_fx.passes.verifier.invariants import verify
from embrace_fx.vocabulary.graph import (
    Gradient,
    GradientOfRows,
    Parameter,
    PendingGradients,
    PendingRows,
    Result,
    Saved,
    Shard,
    TrainingGraph,
    inputs_of,
    outputs_of,
)
from embrace_fx.vocabulary.ops import launch_of, op_name
from embrace_fx.vocabulary.schedule import SCHEDULES, Cuts
from tests.support.golden import check_golden
from tests.support.graphs import IDS, analysed, classifier, tables_model, targets, text
from tests.support.many_uses import OTHER, TABLE, many_uses, plan_of
from tests.support.table_cases import plain

DENSE = ("linear.bias", "linear.weight")


def partitioned(
    *sharded: str, buckets: tuple[tuple[str, ...], ...], forward: object = many_uses, reduce: bool = True
) -> TrainingGraph:
    plan = plan_of(*sharded, world_size=2, buckets=buckets)
    model = tables_model(forward)  # type: ignore[arg-type]
    return run_passes(analysed(model, IDS), training_passes(plan, {TABLE, OTHER}, 0, reduce=reduce)).graph


def overlapped(
    graph: TrainingGraph,
    buckets: tuple[tuple[str, ...], ...],
    schedule: str,
    pieces: int = 2,
    tables: tuple[str, ...] = (TABLE, OTHER),
) -> TrainingGraph:
    """After the passes of a schedule; each bucket in two chunks, each table's delayed gradients in `pieces`."""
    parameters = {role.name: node.meta["val"] for node, role in graph.inputs() if isinstance(role, Parameter)}
    sizes = [sum(parameters[name].numel() for name in bucket) for bucket in buckets]
    cuts = Cuts(tuple((size - size // 2, size // 2) for size in sizes), tuple((table, pieces) for table in tables))
    result = graph
    for each in overlap_passes(plan_of(world_size=2, buckets=buckets), schedule, 0, cuts):
        before, result = result, each(result)
        verify(result, after=type(each).__name__, captured=graph, previous=before)
    return result


def ops(graph: TrainingGraph, phase: str, *kinds: str) -> list[str]:
    found = (name.split("::")[1] for name in targets(graph.phases[phase].graph))
    return [name for name in found if name.startswith(kinds)]


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


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_which_schedule_overlaps_what(schedule: str) -> None:
    cuts = Cuts(((10,),), ((TABLE, 3),))
    passes = overlap_passes(plan_of(TABLE, buckets=(DENSE,)), schedule, 0, cuts)
    rows, chunks = [SubmitRows()], ChunkBuckets(cuts.chunks)
    split, updates = SplitRows(cuts.pieces), UpdateBeforeRead((DENSE,), cuts.chunks)
    moved = [AwaitRowsLate(), SubmitGradientsEarly()]
    expected = {
        "none": [],
        "horizontal": [*rows, chunks, updates, *moved],
        "vertical": [*rows, split, chunks, *moved],
        "2d": [*rows, split, chunks, updates, *moved],
    }
    assert list(passes) == expected[schedule]


def launched(module: fx.GraphModule, *ops: str) -> list[str]:
    """The launches that nodes of these ops are for, as they are printed."""
    found = [node for node in module.graph.nodes if op_name(node) in {f"embrace::{op}" for op in ops}]
    assert all(str(launch_of(node)) == node.args[-1] for node in found)
    return [str(launch_of(node)) for node in found]


def _serves(table: str, launch: str) -> bool:
    return launch.startswith(f"{table} ")


def test_rows_are_submitted_and_awaited() -> None:
    buckets = (("vector", *DENSE),)
    graph = partitioned(TABLE, OTHER, buckets=buckets)

    result = overlapped(graph, buckets, "vertical")
    forward, backward = result.phases["forward"], result.phases["backward"]

    assert not ops(result, "forward", "all_to_all", "lookup", "wait_tensor")
    assert launched(forward, "submit_ids") == launched(backward, "await_ids") == ["ids"]
    for table in (TABLE, OTHER):
        pieces = [f"{table} delayed [0]", f"{table} delayed [1]"]
        of_table = partial(filter, partial(_serves, table))
        assert list(of_table(launched(backward, "submit_gradients"))) == [f"{table} prior", *pieces]
        assert list(of_table(launched(backward, "update_rows"))) == pieces
        assert list(of_table(launched(forward, "update_rows"))) == [f"{table} prior"]
        assert list(of_table(launched(backward, "submit_rows"))) == [f"{table} early rows"]
        assert list(of_table(launched(forward, "submit_rows"))) == [f"{table} rows"]
        assert list(of_table(launched(forward, "await_rows"))) == [f"{table} early rows", f"{table} rows"]
    assert launched(backward, "submit_chunk") == launched(backward, "await_chunk") == ["bucket 0 [0]", "bucket 0 [1]"]
    roles = [role for _, role in outputs_of(backward)]
    assert {role.table for role in roles if isinstance(role, PendingRows)} == {TABLE, OTHER}
    assert not any(isinstance(role, GradientOfRows) for role in roles)
    assert {role.of for role in roles if isinstance(role, Gradient)} == {Parameter(name) for name in buckets[0]}


def test_each_bucket_is_submitted_and_awaited_once() -> None:
    buckets = (("vector",), DENSE, (OTHER,))
    graph = partitioned(TABLE, buckets=buckets)

    result = overlapped(graph, buckets, "horizontal")

    chunks = [f"bucket {k} [{i}]" for k in range(3) for i in range(2)]
    assert launched(result.phases["backward"], "submit_chunk") == chunks
    assert sorted(launched(result.phases["forward"], "await_chunk")) == chunks
    assert not ops(result, "backward", "all_reduce", "wait_tensor", "await", "unpack_bucket")
    roles = [role for _, role in outputs_of(result.phases["backward"])]
    pending = [role for role in roles if isinstance(role, PendingGradients)]
    assert pending == [PendingGradients(k, bucket) for k, bucket in enumerate(buckets)]
    assert not any(isinstance(role, Gradient) for role in roles)
    updated = result.phases["forward"].graph.find_nodes(
        op="call_function", target=torch.ops.embrace.update_bucket.default
    )
    assert sorted(node.args[1] for node in updated) == [0, 1, 2]


def test_a_parameter_is_awaited_just_before_its_first_reader() -> None:
    buckets = (("vector",), DENSE, (OTHER,))
    result = overlapped(partitioned(TABLE, buckets=buckets), buckets, "horizontal")
    forward = result.phases["forward"]

    position = {node: k for k, node in enumerate(forward.graph.nodes)}
    for node, role in inputs_of(forward):
        if not isinstance(role, Parameter):
            continue
        (reader,) = node.users  # nothing else reads the parameter itself
        while op_name(reader) == "embrace::await_chunk":
            (reader,) = reader.users
        assert op_name(reader) == "embrace::update_bucket"
        items = [item for item in reader.users if item.target is operator.getitem]
        readers = [user for item in items for user in item.users]
        between = [n for n in position if position[reader] < position[n] < min(map(position.__getitem__, readers))]
        assert set(between) <= set(items)


def test_what_stays_as_it_was() -> None:
    buckets = (("vector", *DENSE),)
    graph = partitioned(TABLE, OTHER, buckets=buckets)
    before = {name: text(module) for name, module in graph.phases.items()}
    result = overlapped(graph, buckets, "horizontal")
    assert {name: text(module) for name, module in graph.phases.items()} == before  # a pass changes copies
    assert result.module is graph.module
    assert all(text(result.phases[name]) == before[name] for name in ("unique", "ids"))
    saved = {role for _, role in outputs_of(graph.phases["forward"]) if isinstance(role, Saved)}
    assert {role for _, role in outputs_of(result.phases["forward"]) if isinstance(role, Saved)} == saved
    results = [role for _, role in outputs_of(result.phases["forward"]) if isinstance(role, Result)]
    assert results == [Result(0)]


def test_without_tables_and_buckets_nothing_is_overlapped() -> None:
    graph = partitioned(buckets=(), forward=plain)
    result = overlapped(graph, (), "horizontal")
    assert {name: text(m) for name, m in result.phases.items()} == {n: text(m) for n, m in graph.phases.items()}


def test_an_unread_table_is_no_input_of_the_backward() -> None:
    result = overlapped(partitioned(TABLE, OTHER, buckets=(("vector", *DENSE),)), (("vector", *DENSE),), "2d")
    for module in result.phases.values():
        assert all(node.users for node, role in inputs_of(module) if isinstance(role, Parameter | Shard))
