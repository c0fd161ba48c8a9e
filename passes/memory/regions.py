"""Recomputes the regions marked with `torch.utils.checkpoint` in the backward, and saves all other values.

Contract
    Same values, bit for bit: recomputation runs the same ops on the same inputs, with the random state of the forward.
    Nothing is launched, exchanged or written twice: results of communication in a region are saved. So are a region's
    inputs, results that later nodes need, and values that a selective policy saves. A region is recomputed as one
    piece, just before the first node of the backward that needs it. Recomputed nodes read state that the forward writes
    (running statistics) as it was before the forward.

    rewrite:  h = relu(x @ w); y = dropped(h @ v, noise = bernoulli(..)); ...; gv = h.t() @ g; ...
    ->        s = random_state(cpu); h = relu(x @ w); y = ...; ...
              h_again = relu(x @ w); n = begin_replay(s, cpu); noise_again = bernoulli(..); end_replay(n, cpu)
              gv = h_again.t() @ g; ...

Levels. A nested region is recomputed each time that the outer one is, and once more for its own backward. Copies of
level 1 are for the inputs of inner regions, those of level 2 for the backward of an inner region's nodes, and so on. A
reader whose path shares its first k regions with a value's path reads the copy of level k. Level 0 is the saved value.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import fx
from torch._ops import OpOverload

from embrace_fx.passes.partition import phase_nodes
from embrace_fx.passes.rewriter import Rewriter
from embrace_fx.vocabulary import again_ops  # noqa: F401  (declares the ops)
from embrace_fx.vocabulary.graph import Parameter, TrainingGraph, written_by
from embrace_fx.vocabulary.ops import device_of, draws_random_numbers, op_name

embrace = torch.ops.embrace

Path = tuple[int, ...]


@dataclass(frozen=True)
class RecomputeRegions:
    """The pass that recomputes, in the backward, the nodes that the user has checkpointed with
    `torch.utils.checkpoint`.
    """

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        if not any(node.meta.get("region") for node in graph.graph.nodes):
            return graph
        result = graph.edit()
        return result if insert_copies(result) else graph


def with_recomputed(graph: TrainingGraph, regions: Mapping[str, int], kept: Collection[str] = ()) -> TrainingGraph:
    """Returns a copy of the graph whose backward recomputes the nodes of the given regions.

    Args:
        regions: maps a node's name to the number of its region; the nodes of a region are recomputed together.
        kept: names of nodes in regions whose values are saved nevertheless.
    """
    result = graph.edit()
    for node in result.graph.nodes:
        if node.name in regions:
            node.meta["region"], node.meta["kept"] = (regions[node.name],), node.name in kept
    insert_copies(result)
    return result


def insert_copies(graph: TrainingGraph) -> list[fx.Node]:
    """Inserts recomputed copies of all nodes in checkpointed regions into the backward, in place. Removes the metadata
    that marks the regions. Returns the inserted nodes.
    """
    copies = _RecomputedCopies(graph).insert()
    for node in graph.graph.nodes:
        node.meta.pop("region", None)
        node.meta.pop("kept", None)
    return copies


def can_recompute(node: fx.Node, written: frozenset[object]) -> bool:
    """Returns whether a node may run again in the backward: it returns tensors and has no other effect.

    A node that returns sizes may not run again. A node that reads a parameter that the forward overwrites (`max_norm`)
    may not either, because it would read a different value.

    Args:
        written: the parameters, buffers and batch tensors that the forward writes.
    """
    if not isinstance(node.target, OpOverload):
        source = _computing_op(node)
        return source is not node and isinstance(node.meta.get("val"), torch.Tensor) and can_recompute(source, written)
    own = _is_own_op(node) and not op_name(node).startswith("embrace::rnn_layer")
    if own or node.target.namespace == "_c10d_functional" or node.target._schema.is_mutable:
        return False
    values = node.meta.get("val")
    if not any(isinstance(v, torch.Tensor) for v in (values if isinstance(values, list | tuple) else [values])):
        return False
    roles = [value.meta.get("role") for value in node.all_input_nodes]
    return not any(isinstance(role, Parameter) and role in written for role in roles)


class _RecomputedCopies:
    """Inserts copies of forward nodes into the backward, for checkpointed regions, which may be nested. A node inside
    several regions can have several copies. The copy on level k is recomputed with the k outermost regions around the
    node.
    """

    def __init__(self, graph: TrainingGraph) -> None:
        self._graph = graph.graph
        self._rewriter = Rewriter(graph.module)
        members = phase_nodes(graph)
        self._backward = [node for node in graph.graph.nodes if node in members["backward"]]
        self._written = written_by(graph.module)
        self._paths = self._paths_of(members["forward"])
        self._kept = {node for node in self._paths if node.meta.get("kept") or _computing_op(node).meta.get("kept")}
        self._position = {node: k for k, node in enumerate(graph.graph.nodes)}
        self._chains = self._draw_chains(members["forward"])
        self._wanted: dict[Path, set[fx.Node]] = defaultdict(set)
        self._copies: dict[tuple[fx.Node, int], fx.Node] = {}
        self._states: dict[fx.Node, fx.Node] = {}  # first draw of a chain -> the node of the random state before it
        self._unwritten: dict[fx.Node, fx.Node] = {}

    def insert(self) -> list[fx.Node]:
        """Inserts and returns the copies."""
        for node in self._backward:
            for value in node.all_input_nodes:
                self._request(value, self._level(value, node.meta.get("region")))
        for node in self._backward:
            levels = {value: self._level(value, node.meta.get("region")) for value in node.all_input_nodes}
            for value, level in levels.items():
                if level:
                    self._place(self._paths[value][:level], node)
                    node.replace_input_with(value, self._copies[value, level])
        self._read_unwritten()
        return list(self._copies.values())

    # -- the nodes to recompute ---------------------------------------------------------------------------------------

    def _paths_of(self, forward: set[fx.Node]) -> dict[fx.Node, Path]:
        """Maps each forward node that may run again to the numbers of the nested regions around it, outermost first."""
        paths: dict[fx.Node, Path] = {}
        for node in self._graph.nodes:
            path = _computing_op(node).meta.get("region", ())
            if path and node in forward and can_recompute(node, self._written):
                paths[node] = path
        return paths

    def _level(self, value: fx.Node, reader: Path | None) -> int:
        """Returns the level of the recomputed copy of `value` that a reader must read, which is the number of outermost
        regions that the copy belongs to. Returns 0 if it must read the original.

        Args:
            reader: the regions around the reader, or None if it is not in a region.
        """
        path = self._paths.get(value, ())
        shared = len(path)
        if reader is not None:
            pairs = zip(path, reader, strict=False)
            shared = next((k for k, (own, other) in enumerate(pairs) if own != other), min(len(path), len(reader)))
        return min(shared, len(path) - 1) if value in self._kept else shared

    def _request(self, value: fx.Node, level: int) -> None:
        """Records that a copy of `value` is needed on a level. Also records the copies that this copy must read."""
        waiting = [(value, level)]
        while waiting:
            value, level = waiting.pop()
            if not level or value in self._wanted[self._paths[value][:level]]:
                continue
            region = self._paths[value][:level]
            self._wanted[region].add(value)
            waiting += [(each, self._level(each, region)) for each in value.all_input_nodes]
            chain = self._chains.get(value, [])
            waiting += [(each, level) for each in chain[: chain.index(value)]] if chain else []

    def _draw_chains(self, forward: set[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
        """Maps each node in a region that draws random numbers to its chain: consecutive draws of one device's
        generator in the same regions.
        """
        chains: dict[fx.Node, list[fx.Node]] = {}
        last: dict[torch.device, fx.Node] = {}
        for node in self._graph.nodes:
            if not draws_random_numbers(node) or _is_own_op(node) or node not in forward:
                continue
            device, path = device_of(node), self._paths.get(node)
            before = last.get(device)
            if path is not None:
                follows = before is not None and self._paths.get(before) == path
                chain = chains[before] if follows and before is not None else []
                chain.append(node)
                chains[node] = chain
            last[device] = node
        return chains

    # -- inserting copies ----------------------------------------------------------------------------------------------

    def _place(self, region: Path, before: fx.Node) -> None:
        """Inserts a region's copies before a node, and after the copies of outer regions that they read."""
        nodes = sorted(self._wanted.pop(region, ()), key=self._position.__getitem__)
        for node in nodes:
            for value in node.all_input_nodes:
                if level := self._level(value, region):
                    self._place(self._paths[value][:level], before)
        ends = {chain[-1]: chain[0] for chain in self._replayed(nodes)}
        replays: dict[fx.Node, fx.Node] = {}
        with self._rewriter.before(before):
            for node in nodes:
                if node in ends.values():
                    replays[node] = self._begin_replay(node)
                self._copy(node, region)
                if node in ends:
                    now = replays[ends[node]]
                    self._rewriter.call(embrace.end_replay.default, now, device_of(node), name=f"{node.name}_replayed")

    def _copy(self, node: fx.Node, region: Path) -> None:
        """Inserts a copy of a node, to recompute a region. The copy reads the region's copies of its inputs."""
        inputs = {value: self._level(value, region) for value in node.all_input_nodes}
        name = f"{node.name}_again" + (f"_{len(region)}" if len(region) > 1 else "")
        copy = self._rewriter.copy(node, lambda n: self._copies[n, inputs[n]] if inputs[n] else n, name)
        copy.meta.pop("region", None)
        self._copies[node, len(region)] = copy

    def _replayed(self, nodes: list[fx.Node]) -> list[list[fx.Node]]:
        """Returns the nodes in `nodes` that draw random numbers, grouped by chain (consecutive draws of one
        generator).
        """
        found: dict[int, list[fx.Node]] = {}
        for node in nodes:
            if node in self._chains:
                found.setdefault(id(self._chains[node]), []).append(node)
        return list(found.values())

    def _begin_replay(self, first: fx.Node) -> fx.Node:
        """Inserts and returns a node that restores the random state from before the first draw of a chain. Also
        inserts, in the forward, a node that saves this state, if there is none yet.
        """
        device = device_of(first)
        if first not in self._states:
            with self._rewriter.before(first):
                self._states[first] = self._rewriter.call(
                    embrace.random_state.default, device, name=f"{first.name}_state"
                )
        state = self._states[first]
        return self._rewriter.call(embrace.begin_replay.default, state, device, name=f"{first.name}_replay")

    def _read_unwritten(self) -> None:
        """Makes the recomputed copies read the original values of buffers that the forward overwrites, from copies that
        are made at the start of the forward.
        """
        first = next(node for node in self._graph.nodes if node.op != "placeholder")
        for copy in self._copies.values():
            for value in copy.all_input_nodes:
                if value.op == "placeholder" and value.meta.get("role") in self._written:
                    if value not in self._unwritten:
                        with self._rewriter.before(first):
                            self._unwritten[value] = self._rewriter.call(
                                embrace.copy_unwritten.default, value, name=f"{value.name}_unwritten"
                            )
                    copy.replace_input_with(value, self._unwritten[value])


def _computing_op(node: fx.Node) -> fx.Node:
    """Returns the node that calls the op computing a value: for an item of a tuple, the op that returns the tuple."""
    while node.op == "call_function" and not isinstance(node.target, OpOverload) and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node


def _is_own_op(node: fx.Node) -> bool:
    """Returns whether a node calls one of this package's ops."""
    return isinstance(node.target, OpOverload) and node.target.namespace == "embrace"
