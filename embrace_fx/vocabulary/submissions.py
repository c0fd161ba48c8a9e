"""Finds which collectives and copies the nodes of a graph submit, begin or await."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from embrace_fx.vocabulary.copy_ops import AWAIT_OFFLOAD, AWAIT_RELOAD, COPY_OPS
from embrace_fx.vocabulary.graph import TrainingGraph
from embrace_fx.vocabulary.head_ops import HEAD_LAUNCHES
from embrace_fx.vocabulary.operation_id import Kind, OperationId
from embrace_fx.vocabulary.ops import AWAITS, LAUNCHES, SUBMISSIONS, id_of, launch_of, op_name

_SUBMITTED = SUBMISSIONS | LAUNCHES - HEAD_LAUNCHES
_WAIT = "_c10d_functional::wait_tensor"
_FORWARD = ("offload", "counts", "labels", "hidden states", "statistics")


def is_submission(node: fx.Node) -> bool:
    """Returns whether a node submits a collective to the launcher, which starts collectives in the order of the
    schedule.
    """
    return launch_of(node) is not None and op_name(node) in _SUBMITTED


def submitted(*modules: fx.GraphModule) -> Iterator[OperationId]:
    """Yields the ids of the collectives that modules submit to the launcher, in the order of their nodes."""
    for module in modules:
        for node in module.graph.nodes:
            launch = launch_of(node)
            if launch is not None and is_submission(node):
                yield launch


def awaited(node: fx.Node) -> OperationId | None:
    """Returns the id of the collective that a node waits for. Returns None if the node does not wait, or if the
    collective was not submitted to the launcher.
    """
    if op_name(node) in AWAITS:
        return launch_of(node)
    source = node.all_input_nodes[0] if op_name(node) == _WAIT else None
    return launch_of(source) if source is not None and is_submission(source) else None


def begun_or_awaited(node: fx.Node) -> tuple[OperationId, bool] | None:
    """Finds the copy, or the exchange of an output layer, that a node begins or awaits. Returns (its id, whether the
    node awaits it), or None if the node does neither.
    """
    if op_name(node) in COPY_OPS:
        return id_of(node), op_name(node) in (AWAIT_OFFLOAD, AWAIT_RELOAD)
    source = node.all_input_nodes[0] if op_name(node) == _WAIT else node
    return (id_of(source), source is not node) if op_name(source) in HEAD_LAUNCHES else None


def compute_up_to(node: fx.Node) -> OperationId:
    """Returns the id of the piece of compute that ends at a node. The node must begin or await a copy, or an exchange
    of an output layer.

    Raises:
        ValueError: the node does neither.
    """
    if (found := begun_or_awaited(node)) is None:
        raise ValueError(
            f"node {node.name} must start or await a copy or an exchange of an output layer, but does neither."
        )
    launch, awaits = found
    phase: Kind = "forward" if launch.kind in _FORWARD or launch.part in _FORWARD else "backward"
    return OperationId(phase, f"up to {'the end of ' if awaits else ''}{launch}")


def overlaps_steps(graph: TrainingGraph) -> bool:
    """Returns whether any phase of the graph submits or awaits communication that overlaps the next step."""
    handed_over = SUBMISSIONS | AWAITS
    return any(op_name(node) in handed_over for module in graph.phases.values() for node in module.graph.nodes)
