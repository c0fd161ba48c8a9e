"""Keeps the gradients of unsharded tables sparse if all lookups request it, as autograd does.

Contract
    Same values, without rows that no lookup reads. A table that a graph does not use gets a gradient without rows, so
    that the layout is equal on all ranks. A table that the graph also reads densely gets a dense gradient, as with
    autograd.

    rewrite:  grad_w = aten.embedding_dense_backward(g, x, V, pad, False); return (..., grad_w)
    ->        rows_w = embrace.sparse_gradient(grad_w, [x], [pad]); return (..., rows_w)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from embrace_fx.passes.rewriter import Rewriter
from embrace_fx.vocabulary.graph import (
    FROM_GRADIENT,
    Gradient,
    Parameter,
    TrainingGraph,
    gradients_of,
    parameters_of,
    set_outputs,
)

aten = torch.ops.aten
SPARSE = torch.ops.embrace.sparse_gradient.default


@dataclass(frozen=True)
class SparseGradients:
    """Graph pass that makes gradients of unsharded embedding tables sparse (COO tensors).

    Attributes:
        tables: parameter names of the tables.
        exchanged: parameters that may have a gradient on other ranks. If such a parameter has no gradient in this
            graph, an empty gradient is added.
    """

    tables: tuple[str, ...]
    exchanged: tuple[str, ...] = ()

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        if not self.tables:
            return graph
        result = graph.edit()
        for name in self.tables:
            if gradients_of(result.module).get(name) is not None:
                _make_sparse(result, name)
            elif name in self.exchanged:
                _add_empty_gradient(result, name)
        return result


def _make_sparse(graph: TrainingGraph, name: str) -> None:
    """Converts a table's gradient to a COO tensor in the graph, in place, if all of the table's lookups request it."""
    table = next((table for table in graph.tables if table.parameter == name), None)
    if table is None or not table.has_sparse_gradient or any(use.kind == FROM_GRADIENT for use in table.uses):
        return
    role = Gradient(Parameter(name))
    gradient = next(value for value, each in graph.outputs() if each == role)
    assert gradient is not None
    lookups = list(dict.fromkeys((graph.node(use.ids), use.padding_idx) for use in table.uses))
    rewriter = Rewriter(graph.module)
    with rewriter.before(gradient.next):
        ids, paddings = [node for node, _ in lookups], [padding for _, padding in lookups]
        sparse = rewriter.call(SPARSE, gradient, ids, paddings, name=f"{gradient.name}_sparse")
    outputs = [(sparse if each == role else value, each) for value, each in graph.outputs()]
    set_outputs(graph.module, outputs)


def _add_empty_gradient(graph: TrainingGraph, name: str) -> None:
    """Adds an empty COO gradient of a table to the graph's outputs, in place."""
    rewriter, weight = Rewriter(graph.module), parameters_of(graph.module)[name]
    with rewriter.before(graph.graph.output_node()):
        zeros = rewriter.call(aten.zeros_like.default, weight, name=f"{weight.name}_no_gradient")
        sparse = rewriter.call(SPARSE, zeros, [], [], name=f"{weight.name}_no_rows")
    set_outputs(graph.module, [*graph.outputs(), (sparse, Gradient(Parameter(name)))])
