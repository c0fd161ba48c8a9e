"""Counts a table's ids over all ranks, for replicas that divide gradients by these counts.

Contract
    `scale_grad_by_freq` divides an id's gradient by its count in the batch. The batch of a data-parallel step is that
    of all ranks, so counts are summed over ranks.

    rewrite:  g = aten.embedding_dense_backward(grad, ids, V, pad, True)
    ->        n = wait(all_reduce_(bincount(ids, V), "sum", "dense"))
              g = aten.embedding_dense_backward(grad, ids, V, pad, False) / clamp(n, 1)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from embrace_fx.passes.reduce import ALL_REDUCE
from embrace_fx.passes.rewriter import Rewriter, rewrite_each
from embrace_fx.passes.tables import LOOKUP_BACKWARDS
from embrace_fx.vocabulary.graph import TrainingGraph
from embrace_fx.vocabulary.ops import argument, set_argument

aten = torch.ops.aten


@dataclass(frozen=True)
class GlobalFrequency:
    """The pass that counts ids over all ranks for whole tables that divide gradients by the ids' frequency."""

    world_size: int

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        return graph if self.world_size == 1 else rewrite_each(graph, _scaled, use_global_counts)


def _scaled(graph: TrainingGraph) -> list[fx.Node]:
    """Returns the backward nodes of lookups that divide gradients by the frequency of ids."""
    return [n for n in graph.graph.nodes if n.target in LOOKUP_BACKWARDS and argument(n, "scale_grad_by_freq")]


def use_global_counts(rewriter: Rewriter, node: fx.Node) -> None:
    """Scales a lookup's gradient by the counts of its ids on all ranks instead of this rank's."""
    rows = argument(node, "num_weights")
    readers = list(node.users)
    with rewriter.before(node):
        flat = rewriter.call(aten.reshape.default, argument(node, "indices"), [-1], name=f"{node.name}_ids")
        ones = rewriter.call(aten.ones_like.default, flat, name=f"{node.name}_ones")
        zeros = rewriter.call(aten.new_zeros.default, flat, [rows], name=f"{node.name}_zeros")
        counts = rewriter.call(aten.index_add.default, zeros, 0, flat, ones, name=f"{node.name}_counts")
        everywhere = rewriter.wait(rewriter.call(ALL_REDUCE, counts, "sum", "dense", name=f"{node.name}_all_counts"))
        at_least_one = rewriter.call(aten.clamp_min.default, everywhere, 1, name=f"{node.name}_divisor")
        column = rewriter.call(aten.unsqueeze.default, at_least_one, 1, name=f"{node.name}_divisor_column")
    set_argument(node, "scale_grad_by_freq", False)
    with rewriter.before(node.next):
        scaled = rewriter.call(aten.div.Tensor, node, column, name=f"{node.name}_scaled")
    for reader in readers:
        reader.replace_input_with(node, scaled)
