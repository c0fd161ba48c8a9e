"""Row gradients are rounded, before they are sent, to the format in which they travel.

Contract
    Only tables that travel in fewer bits are changed. The forward's rows are rounded by the launch that sends them.

    rewrite:  split_columns(grad_rows, N)
    ->        split_columns(round_rows(grad_rows, rows_of_batch, "int8", N, table), N)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

import embrace_fx.vocabulary.ops  # noqa: F401  (declares the ops)
from embrace_fx.cost.wire import Format, Wire
from embrace_fx.passes.rewriter import Rewriter
from embrace_fx.vocabulary.graph import TrainingGraph

embrace = torch.ops.embrace
ON_GRID = 5
"""Number of arguments of a launch on a grid of one row."""


@dataclass(frozen=True)
class RoundRowGradients:
    """Rounds row gradients.

    Attributes:
        form: the format in which rows travel.
    """

    form: Format

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        launches = graph.graph.find_nodes(op="call_function", target=embrace.all_to_all_gradients.default)
        if not any(self._rounds(launch) for launch in launches):
            return graph
        result = graph.edit()
        for launch in launches:
            if self._rounds(launch):
                _round(result, result.node(launch.name), self.form)
        result.graph.lint()
        result.module.recompile()
        return result

    def _rounds(self, launch: fx.Node) -> bool:
        return Wire(launch.meta["val"].element_size(), self.form).rounds


def _round(graph: TrainingGraph, launch: fx.Node, form: Format) -> None:
    split = launch.all_input_nodes[0]
    gradient, table = split.all_input_nodes[0], launch.meta["launch"].what
    gather = next(n for n in graph.graph.nodes if n.target is embrace.all_gather_ids.default)
    uniques = gather.args[0]
    assert isinstance(uniques, list | tuple)
    ids = uniques[gather.meta["tables"].index(table)]
    arguments: Sequence[Any] = launch.args
    ranks, grid_rows = arguments[4], arguments[5] if len(arguments) > ON_GRID else 1
    rewriter = Rewriter(graph.module)
    with rewriter.before(split):
        rounded = rewriter.call(
            embrace.round_rows.default, gradient, ids, form, ranks // grid_rows, table, name=f"{gradient.name}_rounded"
        )
    split.replace_input_with(gradient, rounded)
