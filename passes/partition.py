"""Partitions the joint graph into the four graphs that run one after another: unique, ids, forward, backward.

Contract
    Same nodes, same values, each node in exactly one phase:
        unique    computes the ids from the batch, and the unique rows to read; can run a batch ahead. If ids are drawn
                  at random, all earlier draws are here too, so that draws keep their order
        ids       exchanges these ids between ranks; can run a batch ahead and in the background
        forward   all other nodes that results and mutations need; writes mutated state back at its end
        backward  the remaining nodes
    Values that a later phase reads are `Saved` outputs of the earlier phase and `Saved` inputs of the later one. The
    joint module stays in `TrainingGraph.module` for reading.

    rewrite:  def joint(w_shard, batch, tangent): ...
    ->        def unique(batch): ...; return (rows_of_batch, where)
              def ids(rows_of_batch): ...; return (ids, counts)
              def forward(w_shard, where, ids, counts): ...; return (loss, saved...)
              def backward(tangent, where, ids, counts, saved...): ...; return (gradients...)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from embrace_fx.vocabulary.graph import (
    PHASES,
    Gradient,
    GradientOfRows,
    GradientOfShard,
    LateModule,
    Mutation,
    OutputRole,
    Result,
    Saved,
    TableSpec,
    TrainingGraph,
    ancestors,
)
from embrace_fx.vocabulary.ops import draws_before, op_name

_LAUNCH = "embrace::all_gather_ids"
_IDS = frozenset({"embrace::unique_ids", _LAUNCH, "embrace::unpack_ids"})
_OF_FORWARD = frozenset(
    {
        *("embrace::random_state", "embrace::copy_unwritten", "embrace::join_columns", "embrace::join_grid"),
        "embrace::await_offload",
    }
)
"""Ops that always run in the forward: they record its state for the backward, offload a value, or receive rows, even if
no result reads them."""


@dataclass(frozen=True)
class Partition:
    """The pass that splits the joint graph into phases: "unique" (finds unique ids), "ids" (exchanges them), "forward"
    and, if there are gradients, "backward".
    """

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        return replace(graph, phases=partition(graph))


def phase_nodes(graph: TrainingGraph) -> dict[str, set[fx.Node]]:
    """Maps the name of each phase to the set of a joint graph's nodes that belong to it."""
    nodes = [node for node in graph.graph.nodes if node.op not in ("placeholder", "output")]
    head = ancestors(node for node in nodes if _is_ids_op(node))
    head |= ancestors(draws_before(head))
    wanted = [n for n, role in graph.outputs() if n is not None and isinstance(role, Result | Mutation)]
    wanted += [node for node in nodes if op_name(node) in _OF_FORWARD]
    forward = ancestors(wanted) - head
    _move_sizes_and_items(nodes, head, forward)
    ids: set[fx.Node] = set()
    for node in nodes:
        if node in head and (op_name(node) == _LAUNCH or not ids.isdisjoint(node.all_input_nodes)):
            ids.add(node)
    return dict(zip(PHASES, (head - ids, ids, forward, set(nodes) - head - forward), strict=True))


def partition(graph: TrainingGraph) -> dict[str, fx.GraphModule]:
    """Splits a training graph into phases. Returns the graph of each phase by name. Each phase also returns the values
    that later phases read.
    """
    outputs = [(node, role) for node, role in graph.outputs() if node is not None]
    nodes = [node for node in graph.graph.nodes if node.op not in ("placeholder", "output")]
    members = phase_nodes(graph)
    phases: dict[str, fx.GraphModule] = {}
    wanted: dict[str, list[tuple[fx.Node, OutputRole]]] = {
        "unique": [],
        "ids": [],
        "forward": [(n, r) for n, r in outputs if isinstance(r, Result | Mutation)],
        "backward": [(n, r) for n, r in outputs if isinstance(r, Gradient | GradientOfRows | GradientOfShard)],
    }
    for position, (name, own) in enumerate(members.items()):
        behind = list(members)[position + 1 :]
        later = set().union(*(members[phase] for phase in behind))
        saved = [n for n in nodes if n in own and any(user in later for user in n.users)]
        # Also save values that a later phase must return, for example ids that are a result of the model.
        saved += dict.fromkeys(n for phase in behind for n, _ in wanted[phase] if n in own)
        if name == "backward" and not wanted["backward"]:
            continue
        phases[name] = _build_phase(graph, [n for n in nodes if n in own], wanted[name], saved)
    return phases


def _move_sizes_and_items(nodes: list[fx.Node], ids: set[fx.Node], forward: set[fx.Node]) -> None:
    """Moves nodes that read a size or a tuple's item to the phase of the value that they read, so that the whole value
    need not be saved.

    Args:
        nodes: the nodes of the joint graph.
        ids, forward: the nodes of these two phases, changed in place.
    """
    for node in nodes:
        if node in ids or node in forward or not _is_size_or_item(node):
            continue
        sources = node.all_input_nodes
        if sources and all(source in ids for source in sources):
            ids.add(node)
        elif sources and all(source in ids or source in forward for source in sources):
            forward.add(node)


def _is_size_or_item(node: fx.Node) -> bool:
    """Returns whether a node reads a size or an item of a tuple, or calls another function that is not an op."""
    return node.target is torch.ops.aten.sym_size.int or not isinstance(node.target, torch._ops.OpOverload)


def _is_ids_op(node: fx.Node) -> bool:
    """Returns whether a node belongs to the id exchange: one of its ops, its wait, or an item of their results."""
    target = node.target
    if op_name(node) in _IDS:
        return True
    reads_one = node.all_input_nodes and (
        target is torch.ops._c10d_functional.wait_tensor.default or not isinstance(target, torch._ops.OpOverload)
    )
    return bool(reads_one) and _is_ids_op(node.all_input_nodes[0])


def extract_ids(graph: TrainingGraph, tables: Sequence[TableSpec]) -> fx.GraphModule:
    """Extracts a graph that computes, from the batch, the ids of every lookup of `tables`.

    rewrite:  def joint(weight, batch, tangent): ids = batch + 1; e = embedding(weight, ids); ...
    ->        def ids(batch): ids = batch + 1; return (ids,)
    """
    return extract_values(graph, [graph.node(use.ids) for table in tables for use in table.uses])


def extract_values(graph: TrainingGraph, wanted: Sequence[fx.Node]) -> fx.GraphModule:
    """Extracts a graph that computes only the values of the `wanted` nodes."""
    needed = ancestors(wanted)
    return _build_phase(graph, [n for n in graph.graph.nodes if n in needed], [(n, Saved(n.name)) for n in wanted], [])


def _build_phase(
    graph: TrainingGraph, nodes: list[fx.Node], wanted: list[tuple[fx.Node, OutputRole]], saved: list[fx.Node]
) -> fx.GraphModule:
    """Builds the graph of one phase: placeholders for its inputs, `nodes` in order, then the outputs.

    Args:
        wanted: the outputs of the training step that this phase returns, with their roles.
        saved: the values that this phase returns for later phases.
    """
    own = set(nodes)
    read = {source for node in nodes for source in node.all_input_nodes if source not in own}
    read |= {node for node, _ in wanted if node not in own}
    mutated = {role.of for _, role in wanted if isinstance(role, Mutation)}
    phase = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in graph.graph.nodes:
        role = node.meta.get("role")
        if node in read or (node.op == "placeholder" and role in mutated):
            env[node] = phase.placeholder(node.name)
            env[node].meta = dict(node.meta)
            if node.op != "placeholder":
                env[node].meta["role"] = Saved(node.name)
    for node in nodes:
        env[node] = phase.node_copy(node, lambda n: env[n])
        env[node].name = node.name
        env[node].meta = dict(node.meta)
    placeholders = {node.meta.get("role"): node for node in phase.nodes if node.op == "placeholder"}
    results: list[tuple[fx.Node, OutputRole]] = []
    for node, role in wanted:
        value = env[node]
        if isinstance(role, Mutation):
            state = placeholders[role.of]
            value = phase.call_function(torch.ops.aten.copy_.default, (state, env[node]))
            value.meta["val"] = state.meta["val"]
        results.append((value, role))
    results += [(env[n], Saved(n.name)) for n in saved]
    output = phase.output(tuple(node for node, _ in results))
    output.meta["roles"] = tuple(role for _, role in results)
    return LateModule(graph.module, phase)
