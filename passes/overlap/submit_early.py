"""Submits row gradients as soon as their inputs are computed, instead of where autograd computes them.

Autograd runs in the reverse order of the forward, so the gradients of tables looked up at the start come at the end of
the backward, although that of a table used next to the loss could be computed at its start.

Contract
    Same nodes, same values. The nodes that only a row gradient depends on are moved, with its submissions, right after
    the last of their inputs. All other nodes keep their order. Random draws, communication and recomputed nodes are not
    moved. Nothing is moved if a memory budget leaves no room for earlier gradients.

    rewrite:  g = mul(...); ...; mm(...); ...; rows = embedding_dense_backward(g, ...); submit_gradients(rows, ...)
    ->        g = mul(...); rows = embedding_dense_backward(g, ...); submit_gradients(rows, ...); ...; mm(...); ...
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from embrace_fx.passes.overlap.launches import Phases, calls_by_table, rewrite_phases
from embrace_fx.passes.rewriter import first_after_placeholders
from embrace_fx.passes.step_memory import step_memory
from embrace_fx.vocabulary.copy_ops import COPY_OPS
from embrace_fx.vocabulary.graph import TrainingGraph, reached
from embrace_fx.vocabulary.ops import AWAITS, LAUNCHES, LOCAL_OF_FLOW, SUBMISSIONS, draws_random_numbers, op_name


@dataclass(frozen=True)
class SubmitGradientsEarly:
    """The pass that moves each submission of row gradients up, to right after the last of its inputs is computed."""

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        moved_up = rewrite_phases(graph, _rewrite)
        limit = graph.memory_limit
        return graph if limit is not None and step_memory(moved_up).known_peak_bytes > limit else moved_up


def _rewrite(phases: Phases) -> None:
    """Moves the submissions of each table's gradients in the backward up to where their inputs are computed."""
    backward = phases["backward"]
    for submissions in calls_by_table(backward, torch.ops.embrace.submit_gradients.default).values():
        _move_up(backward.graph, submissions)


def _move_up(graph: fx.Graph, submissions: list[fx.Node]) -> None:
    """Moves the submissions of one table's gradient, and nodes that only they need, up to right after their inputs."""
    moved = needed_only_by(submissions)
    inputs = [value for node in moved for value in node.all_input_nodes if value not in moved]
    place = max(*inputs, _end_of_head(graph))
    for node in sorted(moved):
        place.append(node)
        place = node


def _end_of_head(graph: fx.Graph) -> fx.Node:
    """Returns the last node of the backward's head, which finishes the previous step and submits early rows. If there
    is no head, returns the last placeholder.
    """
    head = [node for node in graph.nodes if op_name(node) in HEAD]
    return head[-1] if head else first_after_placeholders(graph).prev


HEAD = ("embrace::update_rows", "embrace::await_ids", "embrace::submit_rows")
"""The ops in the head of a backward, which finishes the previous step and submits early rows."""


def needed_only_by(readers: list[fx.Node]) -> set[fx.Node]:
    """Returns `readers`, and all nodes without side effects whose values only these nodes read."""
    return reached(
        readers, lambda node: node.all_input_nodes, lambda node, found: may_move(node) and found.issuperset(node.users)
    )


def may_move(node: fx.Node) -> bool:
    """Returns whether a node may move to any place after its inputs, because it has no side effect.

    A user-defined op may not move if its schema says that it writes to an argument, or if its tags say that it draws
    random numbers.
    """
    if node.op != "call_function" or "again" in node.meta:
        return False
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return False
    if not isinstance(node.target, torch._ops.OpOverload):
        return True  # plain functions in the graph only read items of tuples and sizes
    if op_name(node) in _COMMUNICATE or node.target.namespace in _OTHERS:
        return False
    return not node.target._schema.is_mutable and not draws_random_numbers(node)


_COMMUNICATE = LAUNCHES | SUBMISSIONS | AWAITS | LOCAL_OF_FLOW | COPY_OPS | {"embrace::copy_unwritten"}
_OTHERS = ("_c10d_functional", "_c10d_functional_autograd", "c10d", "profiler")
"""Namespaces of ops with side effects, even if their schemas declare none."""
