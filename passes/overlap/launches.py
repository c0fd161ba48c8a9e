"""Helpers for the passes of this folder, to insert and find nodes with launch ids."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import fx
from torch._ops import OpOverload

from embrace_fx.vocabulary.graph import InputRole, Parameter, Shard, TrainingGraph, copy_module, inputs_of
from embrace_fx.vocabulary.operation_id import OperationId
from embrace_fx.vocabulary.ops import id_of


class Phases:
    """The phases of a graph by name ("forward", "backward", ..), for a rewrite. A phase is copied when it is first
    read, and only copied phases need to be verified again.
    """

    def __init__(self, phases: Mapping[str, fx.GraphModule]) -> None:
        self._phases = phases
        self.copied: dict[str, fx.GraphModule] = {}

    def __getitem__(self, name: str) -> fx.GraphModule:
        if name not in self.copied:
            self.copied[name] = copy_module(self._phases[name])
        return self.copied[name]


def rewrite_phases(graph: TrainingGraph, rewrite: Callable[[Phases], None]) -> TrainingGraph:
    """Returns a copy of the graph whose phases `rewrite` has changed, or the same graph if it has no backward."""
    if "backward" not in graph.phases:
        return graph
    phases = Phases(graph.phases)
    rewrite(phases)
    for module in phases.copied.values():
        drop_unread(module, Parameter, Shard)
    return replace(graph, phases={**graph.phases, **phases.copied})


def set_launch(node: fx.Node, launch: OperationId) -> None:
    """Replaces the launch id of a node (the id of the collective that it submits or awaits) in its arguments and
    metadata.
    """
    node.args = (*node.args[:-1], str(launch))
    node.meta["launch"] = launch


def calls_of(module: fx.GraphModule, op: OpOverload) -> list[fx.Node]:
    """Returns the nodes that call an op, in program order."""
    return list(module.graph.find_nodes(op="call_function", target=op))


def call_by_table(module: fx.GraphModule, op: OpOverload) -> dict[str, fx.Node]:
    """Maps the name of each table to the node that calls `op` for it. If there are several, maps it to the last one."""
    return {table: nodes[-1] for table, nodes in calls_by_table(module, op).items()}


def calls_by_table(module: fx.GraphModule, op: OpOverload) -> dict[str, list[fx.Node]]:
    """Maps the name of each table to the nodes that call `op` for it, in program order."""
    found: dict[str, list[fx.Node]] = {}
    for node in calls_of(module, op):
        found.setdefault(id_of(node).what, []).append(node)
    return found


def erase_chain(graph: fx.Graph, node: fx.Node, keep: set[fx.Node]) -> None:
    """Erases a node if nothing reads it, and then its inputs in the same way. Does not erase placeholders and nodes in
    `keep`.
    """
    if node.users or node.op == "placeholder" or node in keep:
        return
    inputs = node.all_input_nodes
    graph.erase_node(node)
    for value in inputs:
        erase_chain(graph, value, keep)


def drop_unread(module: fx.GraphModule, *kinds: type[InputRole]) -> None:
    """Erases placeholders that no node reads any more and that have a role of one of the types `kinds`."""
    for node, role in list(inputs_of(module)):
        if not node.users and isinstance(role, kinds):
            module.graph.erase_node(node)
