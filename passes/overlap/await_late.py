"""Waits for a table's rows where the forward first computes with them, instead of at the lookup.

A model may look up all tables at the start of its forward, and use some of them next to the loss. Without this pass,
the first layer would wait for the softmax's rows, which could arrive while it runs.

Contract
    Same nodes, same values. An await of rows, with the nodes that depend only on these rows, is moved right before
    their first reader. All other nodes keep their order. If no node computes in between, the graph is unchanged.

    rewrite:  flat = join_rows([await_rows(...)], ...); rows = join_columns(flat, ...); y = mm(x, w); z = mm(y, rows)
    ->        y = mm(x, w); flat = join_rows([await_rows(...)], ...); rows = join_columns(flat, ...); z = mm(y, rows)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from embrace_fx.passes.node_cost import is_heavy
from embrace_fx.passes.overlap.launches import Phases, calls_by_table, rewrite_phases
from embrace_fx.passes.overlap.submit_early import may_move
from embrace_fx.vocabulary.graph import Saved, TrainingGraph, reached
from embrace_fx.vocabulary.ops import op_name


@dataclass(frozen=True)
class AwaitRowsLate:
    """The pass that moves each wait for exchanged embedding rows down to the first node that computes with the rows."""

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        if "forward" not in graph.phases or not any(_awaits_to_move(graph.phases["forward"])):
            return graph
        return rewrite_phases(graph, _rewrite)


@dataclass(frozen=True)
class _MovedAwait:
    """A wait for a table's exchanged rows that is to move down in the forward.

    Attributes:
        nodes: the nodes that move with the wait, itself included, in program order.
        reader: the node before which they are inserted.
    """

    nodes: list[fx.Node]
    reader: fx.Node


def _rewrite(phases: Phases) -> None:
    """Moves each wait for rows in the forward, and the cheap nodes that only depend on it, down to the first node that
    computes with the rows.
    """
    for each in list(_awaits_to_move(phases["forward"])):
        for node in each.nodes:
            each.reader.prepend(node)


def _awaits_to_move(forward: fx.GraphModule) -> Iterator[_MovedAwait]:
    """Yields the waits for rows that are worth moving. Between such a wait and the rows' first reader there is compute
    that can hide the exchange.
    """
    computing = [node for node in forward.graph.nodes if is_heavy(node)]
    for awaits in calls_by_table(forward, torch.ops.embrace.await_rows.default).values():
        moved = _movable(awaits)
        readers = [user for node in moved for user in node.users if user not in moved]
        if readers:
            reader, first = min(readers), min(moved)
            if any(first < node < reader for node in computing):
                yield _MovedAwait(sorted(moved), reader)


def _movable(awaits: list[fx.Node]) -> set[fx.Node]:
    """Returns the nodes that may move down with a table's waits (`awaits`): cheap nodes that read only the waits, each
    other and saved values.

    No node writes into a saved value, so a node that moves down reads the same value.
    """

    def may_move(node: fx.Node, found: set[fx.Node]) -> bool:
        """Returns whether a node is cheap and reads only saved values, or values of nodes that move too (`found`)."""
        return _is_cheap(node) and all(n in found or _is_saved(n) for n in node.all_input_nodes)

    return reached(awaits, lambda node: node.users, may_move)


def _is_cheap(node: fx.Node) -> bool:
    """Returns whether a node takes little time and has no side effect. User-defined ops never count as cheap."""
    if op_name(node) == "embrace::join_rows":
        return True
    own = not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace in ("aten", "embrace")
    return own and may_move(node) and not is_heavy(node)


def _is_saved(node: fx.Node) -> bool:
    """Returns whether a node is a placeholder for a value that an earlier phase saved."""
    return node.op == "placeholder" and isinstance(node.meta["role"], Saved)
