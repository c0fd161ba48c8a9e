"""Finds the launches that a graph's nodes submit or await."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from embrace_fx.vocabulary.graph import TrainingGraph
from embrace_fx.vocabulary.operation_id import OperationId
from embrace_fx.vocabulary.ops import AWAITS, LAUNCHES, SUBMISSIONS, launch_of, op_name


def is_submission(node: fx.Node) -> bool:
    """Returns whether a node submits a launch to the launcher."""
    return launch_of(node) is not None and op_name(node) in SUBMISSIONS | LAUNCHES


def submitted(*modules: fx.GraphModule) -> Iterator[OperationId]:
    """Yields the launches that modules submit, in their order."""
    for module in modules:
        for node in module.graph.nodes:
            launch = launch_of(node)
            if launch is not None and is_submission(node):
                yield launch


def awaited(node: fx.Node) -> OperationId | None:
    """Returns the launch that a node waits for; None: it waits for none."""
    if op_name(node) in AWAITS:
        return launch_of(node)
    return launch_of(node.all_input_nodes[0]) if op_name(node) == "_c10d_functional::wait_tensor" else None


def overlaps_steps(graph: TrainingGraph) -> bool:
    """Returns whether communication of this graph's steps overlaps the next step."""
    handed_over = SUBMISSIONS | AWAITS
    return any(op_name(node) in handed_over for module in graph.phases.values() for node in module.graph.nodes)
