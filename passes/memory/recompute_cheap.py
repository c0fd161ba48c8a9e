"""Recomputes cheap values instead of saving them: masks, casts, pointwise chains, row norms.

Like AOTAutograd (`torch._functorch.partitioners`), this pass chooses the saved values by a minimum cut, here between
storages, while recomputation takes at most `AT_MOST` of the step's predicted time.

Contract
    Same values, bit for bit; fewer bytes saved, and no higher peak. A model with the user's own checkpointed regions is
    left unchanged.

    rewrite:  h = a + b; y = relu(h); z = y @ w; ...; gh = threshold_backward(g, y, 0); gw = y.t() @ gz
    ->        h = a + b; y = relu(h); z = y @ w; ...; y_again = relu(a + b); ...          where a and b are saved anyway
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import networkx as nx
import torch
from torch import fx

from embrace_fx.cost import links as cost
from embrace_fx.passes.memory.offload import view_of
from embrace_fx.passes.memory.regions import can_recompute, with_recomputed
from embrace_fx.passes.node_cost import NodeMs, node_time_estimator
from embrace_fx.passes.step_memory import StepMemory, Storage, step_memory
from embrace_fx.vocabulary.graph import TrainingGraph, reached, written_by
from embrace_fx.vocabulary.ops import op_name

AT_MOST = 0.01
"""Maximum fraction of a step's time for recomputation, below the variation between steps."""

WORTH_BYTES = 2**15
"""Minimum bytes saved per recomputed op: about the bytes moved at 10 GB/s in the 3 us that calling an op takes."""

LONGEST = 4
"""Maximum length of a recomputed chain of ops. A longer chain would hold its first values long before their reader."""

_MOVES = (
    *("add", "sub", "mul", "div", "neg", "relu", "abs", "sign", "clamp", "clamp_min", "clamp_max", "where"),
    *("ge", "gt", "le", "lt", "eq", "ne", "logical_and", "logical_or", "logical_not", "bitwise_and", "bitwise_or"),
    *("bitwise_not", "masked_fill", "_to_copy", "clone", "square", "reciprocal"),
)
_COMPUTES = ["gelu", "silu", "sigmoid", "tanh", "exp", "sqrt", "rsqrt", "leaky_relu", "hardtanh", "hardswish"]
_OF_ROWS = ("native_layer_norm",)

TIMES: dict[str, float] = (
    {f"aten::{name}": 1.0 for name in _MOVES}
    | {f"aten::{name}": 4.0 for name in _COMPUTES}
    | {f"aten::{name}": 2.0 for name in _OF_ROWS}
)
"""Op that may be recomputed -> its assumed time, as a multiple of the time to move its bytes."""


@dataclass(frozen=True)
class RecomputeCheap:
    """The pass that recomputes values in the backward where that is cheaper than saving them.

    Attributes:
        compute: the device's speed, for estimates of a node's time.
    """

    compute: cost.Compute

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        if any("again" in node.meta for node in graph.graph.nodes):
            return graph
        found = step_memory(graph)
        if found.backward == len(found.nodes):
            return graph
        chosen = _MinimumCuts(graph, found, node_time_estimator(self.compute, graph.expected)).nodes_to_recompute()
        if not chosen:
            return graph
        result = with_recomputed(graph, {node.name: number for number, nodes in enumerate(chosen) for node in nodes})
        # Check the peak, because all recomputed values may be in memory at the same time.
        return result if step_memory(result).peak_bytes <= found.peak_bytes else graph


@dataclass(frozen=True)
class _RecomputedPiece:
    """Storages that are recomputed together in the backward, found by one minimum cut.

    Attributes:
        again: the storages that are recomputed instead of saved.
        bytes: the number of bytes that need not be saved.
        ms: the milliseconds that recomputation takes.
    """

    again: tuple[Storage, ...]
    bytes: int
    ms: float


class _MinimumCuts:
    """Finds the storages to recompute in the backward. Two storages are linked if one is cheap to compute from the
    other. A minimum cut decides which storages to recompute in each connected component of linked storages.
    """

    def __init__(self, graph: TrainingGraph, found: StepMemory, node_ms: NodeMs) -> None:
        self._held = found
        self._node_ms = node_ms
        self._written = written_by(graph.module)
        self._forward = {node: k for k, node in enumerate(found.nodes[: found.backward])}
        self._storages = [s for s in found.storages if s.born < found.backward]
        # Recompute only from inputs that the backward reads anyway, because the user may overwrite all others before
        # the backward.
        self._still_there = {
            value
            for node in found.nodes[found.backward :]
            for value in node.all_input_nodes
            if value.meta.get("role") not in self._written
        }
        self._makers = {s: self._nodes_that_make(s) for s in self._storages}

    def nodes_to_recompute(self) -> list[list[fx.Node]]:
        """Returns lists of nodes to recompute, one list for each minimum cut that fits in the time allowed for
        recomputation. Cuts that save the most bytes per time are considered first.
        """
        allowed_ms = AT_MOST * sum(map(self._node_ms, self._held.nodes))
        regions = []
        for piece in sorted(self._pieces(), key=lambda p: p.ms / p.bytes):
            if piece.ms <= allowed_ms:
                allowed_ms -= piece.ms
                regions.append([name for s in piece.again for name in s.names if name in self._forward])
        return regions

    def _nodes_that_make(self, storage: Storage) -> list[fx.Node]:
        """Returns the nodes of the forward that compute a storage or write into it."""
        nodes = (storage.node, *storage.names)
        return list(dict.fromkeys(n for n in nodes if n in self._forward and op_name(n) and view_of(n) is None))

    @cached_property
    def _sources(self) -> dict[Storage, list[Storage]]:
        """Maps each storage that is cheap to recompute to the other storages that its recomputation reads."""
        found: dict[Storage, list[Storage]] = {}
        depth: dict[Storage, int] = {}
        for storage in self._storages:
            sources = self._storages_read_to_make(storage)
            if sources is None:
                continue
            deep = 1 + max((depth.get(s, 0) for s in sources), default=0)
            if deep <= LONGEST:
                found[storage], depth[storage] = sources, deep
        return found

    def _storages_read_to_make(self, storage: Storage) -> list[Storage] | None:
        """Returns the other storages that must be read to compute `storage`, or None if `storage` cannot be recomputed
        cheaply.
        """
        if storage.dies == len(self._held.nodes):
            return None
        nodes = [storage.node, *(n for n in storage.names if n in self._forward)]
        read: dict[Storage, None] = {}
        for node in nodes:
            is_op = isinstance(node.target, torch._ops.OpOverload)
            if node not in self._forward or not can_recompute(node, self._written):
                return None
            if is_op and view_of(node) is None and op_name(node) not in TIMES:
                return None
            for value in node.all_input_nodes:
                if value.op == "placeholder" and value not in self._still_there:
                    return None
                read |= dict.fromkeys(s for s in self._held.memory.get(value, ()) if s is not storage)
        return list(read)

    def _pieces(self) -> Iterator[_RecomputedPiece]:
        """Yields the recomputation that a minimum cut finds for each connected component of linked storages. Leaves out
        components whose recomputation does not save enough bytes.
        """
        reads: nx.Graph[Storage] = nx.Graph()
        reads.add_nodes_from(self._storages)
        reads.add_edges_from((source, storage) for storage, sources in self._sources.items() for source in sources)
        for part in nx.connected_components(reads):
            if any(s in self._sources and s.first_backward is not None for s in part):
                piece = self._cut(sorted(part, key=lambda s: s.number))
                if piece is not None:
                    yield piece

    def _cut(self, storages: Sequence[Storage]) -> _RecomputedPiece | None:
        """Returns the recomputation of these storages that saves the most bytes. Returns None if it saves too few bytes
        for the number of ops that it runs.
        """
        position = {s: k for k, s in enumerate(storages)}
        outlives = [s.dies == len(self._held.nodes) for s in storages]
        sizes = [0 if stays else s.nbytes for s, stays in zip(storages, outlives, strict=True)]
        sources = {position[each]: [position[s] for s in of] for each, of in self._sources.items() if each in position}
        needed = [s for s in storages if s.first_backward is not None]
        cut = cheapest_to_save(sizes, sources, [position[s] for s in needed])
        saved = {storages[k] for k in cut}
        again = self._to_recompute(needed, saved)
        less = sum(sizes[position[s]] for s in needed) - sum(sizes[k] for k in cut)
        kernels = sum(len(self._makers[s]) for s in again)
        if less < WORTH_BYTES * max(kernels, 1):
            return None
        nodes = {node for s in again for node in self._makers[s]}
        return _RecomputedPiece(tuple(again), less, sum(self._node_ms(n) * TIMES[op_name(n)] for n in nodes))

    def _to_recompute(self, needed: Iterable[Storage], saved: set[Storage]) -> list[Storage]:
        """Returns the storages that must be recomputed so that the backward has all of `needed`, if only those in
        `saved` are saved.
        """
        found = reached(needed, lambda storage: () if storage in saved else self._sources[storage])
        return sorted(found - saved, key=lambda s: s.number)


def cheapest_to_save(sizes: Sequence[int], sources: Mapping[int, Sequence[int]], needed: Iterable[int]) -> set[int]:
    """Finds, by a minimum cut, the set of storages with the fewest bytes from which all needed storages can be
    computed. Returns the indices of these storages, which are to be saved.

    Args:
        sizes: bytes of each storage.
        sources: maps the index of each storage that may be recomputed to the indices of the storages that its
            recomputation reads.
        needed: indices of the storages that the backward reads.
    """
    # (storage, False) is the input side of a storage, (storage, True) its output side.
    flow: nx.DiGraph[tuple[int, bool]] = nx.DiGraph()
    begin, end = (-1, False), (-1, True)
    for k, size in enumerate(sizes):
        flow.add_edge((k, False), (k, True), capacity=size)
        if k not in sources:
            flow.add_edge(begin, (k, False))
        flow.add_edges_from(((source, True), (k, False)) for source in sources.get(k, ()))
    flow.add_edges_from(((k, True), end) for k in needed)
    if begin not in flow or end not in flow:
        return set()
    _, (reached, _) = nx.minimum_cut(flow, begin, end)
    return {k for k in range(len(sizes)) if (k, False) in reached and (k, True) not in reached}
