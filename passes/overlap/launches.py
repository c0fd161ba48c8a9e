"""Nodes with the id of a launch, and what all passes of this folder do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import fx
from torch._ops import OpOverload

from embrace_fx.passes.rewriter import Rewriter
from embrace_fx.vocabulary.graph import Parameter, Saved, Shard, TrainingGraph, copy_module, inputs_of
from embrace_fx.vocabulary.operation_id import OperationId


class Phases:
    """A graph's phases, each copied when it is first asked for: the others stay what they are, and verified."""

    def __init__(self, phases: Mapping[str, fx.GraphModule]) -> None:
        self._phases = phases
        self.copied: dict[str, fx.GraphModule] = {}

    def __getitem__(self, name: str) -> fx.GraphModule:
        if name not in self.copied:
            self.copied[name] = copy_module(self._phases[name])
        return self.copied[name]


def rewrite_phases(graph: TrainingGraph, rewrite: Callable[[Phases], None]) -> TrainingGraph:
    """A graph whose phases `rewrite` has changed in place; of an evaluation, the graph itself."""
    if "backward" not in graph.phases:
        return graph
    phases = Phases(graph.phases)
    rewrite(phases)
    for module in phases.copied.values():
        drop_unread(module)
        module.graph.lint()
        module.recompile()
    return replace(graph, phases={**graph.phases, **phases.copied})


def launch_node(rewriter: Rewriter, target: Any, *args: Any, launch: OperationId, name: str) -> fx.Node:
    """Inserts a submission or an await of a launch at the current place."""
    node = rewriter.call(target, *args, str(launch), name=name)
    node.meta["launch"] = launch
    return node


def rename(node: fx.Node, launch: OperationId) -> None:
    """Makes a node that of another launch."""
    node.args = (*node.args[:-1], str(launch))
    node.meta["launch"] = launch


def nodes_of(module: fx.GraphModule, target: OpOverload) -> list[fx.Node]:
    """The calls of an op, in the order of the program."""
    return list(module.graph.find_nodes(op="call_function", target=target))


def by_table(module: fx.GraphModule, target: OpOverload) -> dict[str, fx.Node]:
    """The calls of an op, one for each table or stack."""
    found: dict[str, fx.Node] = {}
    for node in nodes_of(module, target):
        launch: OperationId = node.meta["launch"]
        found[launch.what] = node
    return found


def erase_chain(graph: fx.Graph, node: fx.Node, keep: set[fx.Node]) -> None:
    """Erases a node that nothing reads, and what was computed for it alone."""
    if node.users or node.op == "placeholder" or node in keep:
        return
    inputs = node.all_input_nodes
    graph.erase_node(node)
    for value in inputs:
        erase_chain(graph, value, keep)


def drop_unread(module: fx.GraphModule) -> None:
    """Placeholders of state, or of saved rows, that were read only by what is gone."""
    for node, role in list(inputs_of(module)):
        if not node.users and isinstance(role, Parameter | Shard):
            module.graph.erase_node(node)


def drop_unread_saved(module: fx.GraphModule) -> None:
    """Placeholders of what earlier phases save, likewise."""
    for node, role in list(inputs_of(module)):
        if not node.users and isinstance(role, Saved):
            module.graph.erase_node(node)
