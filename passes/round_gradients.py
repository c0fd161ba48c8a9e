"""Rounds row gradients to the dtype in which they are sent, before their exchange.

Contract
    Changes only tables whose rows are sent in fewer bits. The launch that sends the forward's rows rounds them.

    rewrite:  split_columns(grad_rows, N)
    ->        split_columns(round_rows(grad_rows, rows_of_batch, "int8", N, table), N)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from embrace_fx.cost.wire import Format, Wire
from embrace_fx.passes.rewriter import Rewriter, rewrite_each
from embrace_fx.vocabulary.graph import TrainingGraph
from embrace_fx.vocabulary.ops import argument

embrace = torch.ops.embrace


@dataclass(frozen=True)
class RoundRowGradients:
    """The pass that rounds row gradients to the dtype in which they are sent, before their exchange.

    Attributes:
        form: the dtype in which rows are sent.
    """

    form: Format

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        return rewrite_each(graph, self._launches_to_round, self._insert_rounding)

    def _launches_to_round(self, graph: TrainingGraph) -> list[fx.Node]:
        """Returns the nodes that launch the AlltoAll of row gradients, if these are wider than the dtype to send."""
        launches = graph.graph.find_nodes(op="call_function", target=embrace.all_to_all_gradients.default)
        return [each for each in launches if Wire(each.meta["val"].element_size(), self.form).is_narrower]

    def _insert_rounding(self, rewriter: Rewriter, launch: fx.Node) -> None:
        """Inserts a node that rounds row gradients before the AlltoAll that the node `launch` starts."""
        split = launch.all_input_nodes[0]
        gradient, table = split.all_input_nodes[0], launch.meta["launch"].what
        (gather,) = launch.graph.find_nodes(op="call_function", target=embrace.all_gather_ids.default)
        ids = argument(gather, "unique")[gather.meta["tables"].index(table)]
        columns = argument(launch, "group_size") // argument(launch, "grid_rows")
        with rewriter.before(split):
            rounded = rewriter.call(
                embrace.round_rows.default, gradient, ids, self.form, columns, table, name=f"{gradient.name}_rounded"
            )
        split.replace_input_with(gradient, rounded)
