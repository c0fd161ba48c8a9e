"""The order of compute, found together with that of launches: never slower, near the best, within what is held."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn

from embrace_fx.passes.overlap.order import BackwardUnits
from embrace_fx.passes.scheduler.compute_order import LEAST_GAIN, Atoms, reorder_steps, search_order
from embrace_fx.passes.scheduler.launch_order import schedule
from embrace_fx.vocabulary.operation_id import OperationId, chunk_id, compute_id, gradients_id
from embrace_fx.vocabulary.schedule import Dependence, Operation, StepGraph


def backward(values: list[list[int]], sent: list[OperationId], reads: list[int]) -> fx.GraphModule:
    """Node k reads the nodes `values[k]`, or what comes in; `sent`, each behind the value that `reads` says."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    nodes: list[fx.Node] = []
    for inputs in values:
        nodes.append(graph.call_function(torch.ops.aten.stack.default, ([nodes[i] for i in inputs] or [x],)))
    submitted = []
    last: dict[int, fx.Node] = {}
    for launch, value in zip(sent, reads, strict=True):
        if launch.kind == "all_reduce":
            node = graph.call_function(torch.ops.embrace.submit_chunk.default, (nodes[value], 0, 1, str(launch)))
        else:
            rest = (nodes[value], nodes[value], nodes[value], launch.what, -1, 1.0, str(launch))
            node = graph.call_function(torch.ops.embrace.submit_gradients.default, rest)
        node.meta["launch"] = launch
        last.get(value, nodes[value]).append(node)
        last[value] = node
        submitted.append(node)
    graph.output(tuple(submitted))
    return fx.GraphModule(nn.Module(), graph)


@st.composite
def cases(draw: st.DrawFn) -> tuple[StepGraph, Atoms]:
    """A step whose backward has a few units."""
    lengths = st.integers(0, 12).map(float)
    count = draw(st.integers(1, 4))
    sent = [chunk_id(k, 0) if draw(st.booleans()) else gradients_id(f"table {k}", "whole") for k in range(count)]
    size = draw(st.integers(count, 6))
    values = [sorted(set(draw(st.lists(st.integers(0, k - 1), max_size=2)))) if k else [] for k in range(size)]
    reads = [draw(st.integers(0, size - 1)) for _ in range(count)]
    found = BackwardUnits.find(backward(values, sent, reads))
    node_ms = {node: draw(lengths) for node in found.needed_by}
    atoms = Atoms.build(found, node_ms.__getitem__, {})
    durations = atoms.durations(found.units)
    computed = [Operation.from_id(compute_id("backward", unit), durations[unit]) for unit in found.units]
    forward = [Operation.from_id(compute_id("forward", each.what), draw(lengths)) for each in reversed(sent)]
    launched = [Operation.from_id(each, draw(lengths), 1000) for each in sent]
    dependences = [Dependence(str(compute_id("backward", each.what)), str(each)) for each in sent]
    dependences += [Dependence(str(each), str(compute_id("forward", each.what))) for each in sent]
    names = tuple(each.name for each in (*computed, *forward))
    return StepGraph((*computed, *forward, *launched), tuple(dependences), names), atoms


def step_ms(steps: StepGraph) -> float:
    return schedule(steps, "2d").diagnostics().step_ms


@settings(max_examples=80, deadline=None)
@given(cases())
def test_never_slower_and_near_the_best_of_all_orders(case: tuple[StepGraph, Atoms]) -> None:
    steps, atoms = case
    found, order = search_order(steps, "2d", atoms, lambda order: 0, 0)
    assert found.diagnostics().step_ms <= step_ms(steps) * (1 + 1e-9)
    assert found.steps == reorder_steps(steps, atoms, order)
    best_ms = min(step_ms(reorder_steps(steps, atoms, each)) for each in permutations(atoms.units))
    assert found.diagnostics().step_ms <= best_ms * 1.1 + 1e-9


@settings(max_examples=80, deadline=None)
@given(cases())
def test_all_orders_compute_the_same_in_all(case: tuple[StepGraph, Atoms]) -> None:
    _, atoms = case
    total = sum(atoms.ms.values())
    for order in permutations(atoms.units):
        assert sum(atoms.durations(order).values()) == pytest.approx(total)


CHAIN = backward([[], [0], [0], [2]], [chunk_id(0, 0), gradients_id("words", "whole")], [1, 3])
"""The gradient of a layer's weights, node 1, stands before what the table's gradient hangs on, nodes 2 and 3."""


def of_chain(weights_ms: float = 6.0) -> tuple[StepGraph, Atoms]:
    found = BackwardUnits.find(CHAIN)
    by_name = dict(zip(found.needed_by, (1.0, weights_ms, 0.0, 1.0, 1.0, 0.0), strict=True))
    atoms = Atoms.build(found, by_name.__getitem__, {})
    durations = atoms.durations(found.units)
    table, bucket = gradients_id("words", "whole"), chunk_id(0, 0)
    operations = (
        *(Operation.from_id(compute_id("backward", unit), durations[unit]) for unit in found.units),
        Operation.from_id(compute_id("forward", "words"), 1.0),
        Operation.from_id(bucket, 1.0, 1000),
        Operation.from_id(table, 8.0, 8000),
    )
    dependences = tuple(
        Dependence(a, b)
        for each in (table, bucket)
        for a, b in ((str(compute_id("backward", each.what)), str(each)), (str(each), "forward words"))
    )
    names = tuple(o.name for o in operations if not o.is_communication)
    return StepGraph(operations, dependences, names), atoms


def test_the_table_goes_ahead_where_its_rows_take_longest() -> None:
    steps, atoms = of_chain()
    found, order = search_order(steps, "2d", atoms, lambda order: 0, 0)
    assert atoms.units == ("bucket 0", "words")
    assert order == ("words", "bucket 0")
    assert atoms.durations(order) == {"words": 3.0, "bucket 0": 6.0}
    assert step_ms(steps) == 18.0  # 1 + 6 + 2 of backward, 8 of rows, 1 of forward
    assert found.diagnostics().step_ms == 13.0  # 1 + 2 of backward, 8 of rows, 1 of bucket, 1 of forward


def test_nothing_moves_for_the_naive_schedule() -> None:
    steps, atoms = of_chain()
    assert search_order(steps, "none", atoms, lambda order: 0, 0)[1] == ()


def test_what_is_held_bounds_the_search() -> None:
    steps, atoms = of_chain()
    held: dict[tuple[str, ...], int] = {("bucket 0", "words"): 100, ("words", "bucket 0"): 106}
    assert search_order(steps, "2d", atoms, lambda order: held[tuple(order)], 105)[1] == ()
    assert search_order(steps, "2d", atoms, lambda order: held[tuple(order)], 106)[1] == (
        "words",
        "bucket 0",
    )


def test_a_gain_that_is_none_moves_nothing() -> None:
    steps, atoms = of_chain(weights_ms=LEAST_GAIN)
    assert search_order(steps, "2d", atoms, lambda order: 0, 0)[1] == ()
