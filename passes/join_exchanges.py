"""Makes every rank take part in every exchange of the plan, even if its batch does not use a table or parameter.

Contract
    A batch may skip a branch on one rank or on all. Its graph still launches all exchanges of the plan, so that ranks
    whose batches take different branches have the same collectives. Results, and gradients of parameters that the batch
    uses, are unchanged. Ranks determine separately which parameters have a gradient from any rank
    (`embrace_fx.runtime.step.used_parameters`).

    rewrite, a table that the graph does not read, a parameter that it gives no gradient:
        return (loss, grad_p)
    ->  no_ids = aten.full([0], 0); none = aten.embedding(weight, no_ids, pad)
        no_gradient = aten.zeros_like(none)
        grad_w = aten.embedding_dense_backward(no_gradient, no_ids, V, pad, False)
        return (loss, grad_p, grad_w)                  # ReduceGradients adds zeros for parameters without a gradient
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from embrace_fx.passes.rewriter import Rewriter
from embrace_fx.passes.tables import find_tables
from embrace_fx.vocabulary.graph import (
    Gradient,
    Parameter,
    Result,
    TrainingGraph,
    gradients_of,
    parameters_of,
    set_outputs,
)
from embrace_fx.vocabulary.ops import argument

aten = torch.ops.aten


@dataclass(frozen=True)
class ExchangedParameter:
    """A parameter whose rows or gradient the ranks exchange in every step.

    Attributes:
        shape, dtype, device: the properties of the whole parameter.
        padding_idx: the row of a sharded table that gets no gradient, or -1 if there is none. None if the parameter is
            not sharded.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    padding_idx: int | None = None


@dataclass(frozen=True)
class JoinExchanges:
    """The pass that makes a rank take part in all exchanges of the plan, even if its batch does not use some
    parameters. The rank then sends no rows of an unused table, and zeros for another unused parameter.

    Attributes:
        exchanged: the parameters of the plan's exchanges by name, in the order of the plan.
        renormed: unsharded tables with `max_norm`. Every rank must read them, to rescale the rows that other ranks look
            up.
    """

    exchanged: Mapping[str, ExchangedParameter] = field(default_factory=dict)
    renormed: tuple[str, ...] = ()

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        if unread := set(self.renormed) - {table.parameter for table in graph.tables}:
            raise ValueError(
                f"This batch has no lookup in {', '.join(sorted(unread))}, which has max_norm. All ranks rescale the "
                "rows of such a table together, so forward() must look it up for every batch. Change forward(), "
                "or remove max_norm."
            )
        trained = gradients_of(graph.module)
        unread = self.exchanged.keys() - parameters_of(graph.module)
        idle = [n for n, each in self.exchanged.items() if each.padding_idx is not None and n not in trained]
        if not unread and not idle:
            return graph
        result = graph.edit()
        rewriter = Rewriter(result.module)
        # Reversed, because each placeholder is inserted before the others.
        for name, each in reversed([*self.exchanged.items()]):
            if name in unread:
                with rewriter.before(next(iter(rewriter.graph.nodes))):
                    rewriter.placeholder(name, Parameter(name), each.shape, each.dtype, each.device)
        for name in idle:
            _add_empty_lookup(result, rewriter, name, self.exchanged[name])
        return replace(result, tables=find_tables(result))


def idle_graph(name: str, parameter: Tensor) -> TrainingGraph:
    """Returns the training graph of a rank that has no batch. Its result is a zero that is computed from one parameter:
    `aten.new_zeros(parameter, [])`.
    """
    graph = fx.Graph()
    with FakeTensorMode(shape_env=ShapeEnv()):  # under this mode the number of rows is a new symbol
        value = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        nothing = value.new_zeros([])
    read = graph.create_node("placeholder", name, name=name)  # torch converts the name to an identifier
    read.target = read.name
    read.meta |= {"role": Parameter(name), "val": value}
    zero = graph.call_function(aten.new_zeros.default, (read, []))
    zero.meta["val"] = nothing
    graph.output((zero,)).meta["roles"] = (Result(0),)
    return TrainingGraph(fx.GraphModule(nn.Module(), graph))


def _add_empty_lookup(graph: TrainingGraph, rewriter: Rewriter, name: str, parameter: ExchangedParameter) -> None:
    """Adds a lookup of zero rows of a table, and the gradient of the lookup, so that a rank whose batch does not use
    the table takes part in its exchange.

    Args:
        name: the table's name.
        parameter: the table's shape, dtype, device and padding row.
    """
    weight = parameters_of(graph.module)[name]
    lookups = [graph.node(use.lookup) for table in graph.tables if table.parameter == name for use in table.uses]
    padding = argument(lookups[0], "padding_idx") if lookups else parameter.padding_idx
    with rewriter.before(graph.graph.output_node()):
        none = rewriter.call(
            aten.full.default, [0], 0, dtype=torch.int64, device=parameter.device, name=f"{name}_no_ids"
        )
        rows = rewriter.call(aten.embedding.default, weight, none, padding, name=f"{name}_no_rows")
        zeros = rewriter.call(aten.zeros_like.default, rows, name=f"{name}_nothing")
        backward = aten.embedding_dense_backward.default
        gradient = rewriter.call(backward, zeros, none, parameter.shape[0], padding, False, name=f"{name}_no_gradient")
    role = Gradient(Parameter(name))
    outputs: list[tuple[fx.Node | None, object]] = [(v, r) for v, r in graph.outputs() if r != role]
    set_outputs(graph.module, [*outputs, (gradient, role)])  # type: ignore[list-item]
