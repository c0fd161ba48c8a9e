"""Builds the graph that exchanges gradients when the forward is not captured (the eager route).

Passes, planner, scheduler and runtime treat it like any training graph. Its backward begins with the gradients that
autograd has accumulated, and its forward computes nothing.

    def joint(p1, p2, rows_p1, gradient_p1, gradient_p2):
        zero = aten.new_zeros(p1, [])
        return (zero, gradient_p1, gradient_p2)

`rows_p1` are the rows of a table in an earlier step's gradient, for which the planner prices exchanges.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from embrace_fx.capture import Captured
from embrace_fx.capture.guards import Conditions
from embrace_fx.capture.read_values import NO_VALUES
from embrace_fx.vocabulary.graph import (
    FROM_GRADIENT,
    BatchInput,
    Gradient,
    InputRole,
    OutputRole,
    Parameter,
    Result,
    TableSpec,
    TableUse,
    Tangent,
    TrainingGraph,
)

ROUTE = "eager"


def gradient_graph(
    parameters: Mapping[str, Tensor],
    tables: Sequence[str],
    whole: Mapping[str, torch.Size],
    in_rows: Collection[str],
) -> TrainingGraph:
    """Builds the graph that exchanges gradients if the forward is not captured. Its inputs include the gradients that
    autograd has computed, in the order of `parameters`.

    Args:
        parameters: the trained parameters by name, in the order in which the forward probably reads them.
        tables: names of the embedding tables among them. Batch input k of the graph contains the row ids in the
            gradient of the k-th table.
        whole: maps the name of a sharded table to the shape of the whole table.
        in_rows: names of the tables whose gradients are sparse.
    """
    graph = fx.Graph()
    with FakeTensorMode(shape_env=ShapeEnv()):
        shapes = {name: parameter.shape for name, parameter in parameters.items()} | dict(whole)
        values = {n: torch.empty(shapes[n], dtype=p.dtype, device=p.device) for n, p in parameters.items()}
        no_rows = torch.empty((0,), dtype=torch.int64, device="cpu")
        nothing = next(iter(values.values())).new_zeros([])
    read = {name: _placeholder(graph, name, Parameter(name), value) for name, value in values.items()}
    rows = [_placeholder(graph, f"rows_{name}", BatchInput(k), no_rows) for k, name in enumerate(tables)]
    numbered = enumerate(values.items())
    gradients = {n: _placeholder(graph, f"gradient_{n}", Tangent(k), value) for k, (n, value) in numbered}
    zero = graph.call_function(torch.ops.aten.new_zeros.default, (next(iter(read.values())), []))
    zero.meta["val"] = nothing
    roles: list[OutputRole] = [Result(len(values)), *(Gradient(Parameter(name)) for name in values)]
    graph.output((zero, *gradients.values())).meta["roles"] = tuple(roles)
    read_by = zip(tables, rows, strict=True)
    found = tuple(_table_of_gradient(n, values[n], node, sparse=n in in_rows) for n, node in read_by)
    behind = {name: frozenset({k}) for k, name in enumerate(values)}
    return TrainingGraph(fx.GraphModule(nn.Module(), graph), found, results_behind=behind)


def with_assumed_lookups(graph: TrainingGraph) -> TrainingGraph:
    """Returns a copy of a gradient graph that reads each table like a summing `EmbeddingBag`. The real lookups are
    unknown, because the forward is not captured, but most captures find lookups of this kind.
    """
    tables = (replace(t, uses=tuple(replace(use, kind="bag:sum") for use in t.uses)) for t in graph.tables)
    return replace(graph, tables=tuple(tables))


def wrap_as_captured(graph: TrainingGraph) -> Captured:
    """Returns a gradient graph as a `Captured` that is valid for every batch."""
    return Captured(graph, pytree.tree_structure(()), {}, ROUTE, None, (), (), Conditions(NO_VALUES))


def _placeholder(graph: fx.Graph, name: str, role: InputRole, value: Tensor) -> fx.Node:
    """Adds a placeholder to a graph, and returns it.

    Args:
        role: what the input is, such as a parameter or a gradient.
        value: the traced value.
    """
    node = graph.placeholder(re.sub(r"\W|^(?=\d)", "_", name))
    node.meta |= {"role": role, "val": value}
    return node


def _table_of_gradient(name: str, weight: Tensor, rows: fx.Node, *, sparse: bool) -> TableSpec:
    """Describes an embedding table of which only the gradient is known, because its lookups are not captured.

    Args:
        weight: the whole table.
        rows: the graph's input with the row ids in the gradient.
        sparse: whether the gradient is sparse.
    """
    use = TableUse("", (), rows.name, -1, FROM_GRADIENT, False, True, False, "", sparse)
    return TableSpec(name, weight.shape[0], weight.shape[1], weight.dtype, (use,), (), False)
