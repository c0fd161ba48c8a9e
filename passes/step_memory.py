"""Models a step's memory: the bytes that its forward and backward hold while each node runs.

The model counts memory that a step allocates: values saved for the backward, intermediate values of a phase, gradients,
buckets, results. It does not count memory that outlives steps (parameters, optimizer state) or the batch. Views cost
nothing, and neither does an op that may write into a dying input. An offloaded value is held until its offload is
awaited, and again from the start of its reload.

Data-dependent sizes count with their expected value (`embrace_fx.vocabulary.sizes`), which proves no limit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import prod
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from embrace_fx.passes.collectives import aliased_inputs
from embrace_fx.passes.partition import phase_nodes
from embrace_fx.passes.rnn_sizes import saved_workspace_bytes, scratch_bytes
from embrace_fx.vocabulary.copy_ops import AWAIT_OFFLOAD, AWAIT_RELOAD, OFFLOAD
from embrace_fx.vocabulary.graph import PHASES, Saved, TrainingGraph, inputs_of, outputs_of
from embrace_fx.vocabulary.in_place import SHARES_MEMORY, overwritten_argument
from embrace_fx.vocabulary.ops import op_name
from embrace_fx.vocabulary.sizes import NOTHING_EXPECTED, ExpectedSizes, is_known

Numbers = NDArray[np.int64]

NEVER_READ = np.iinfo(np.int64).max
"""Position of the first read of a storage without reads."""

SAMPLES, _LEVELS = 60, " ▁▂▃▄▅▆▇█"
"""Columns and characters of the line that shows memory by time."""


@dataclass(eq=False)
class Storage:
    """A block of memory that one node allocates, shared by all values that view it.

    Attributes:
        number: the index of this storage among the step's storages.
        node: the node that allocates it.
        nbytes: its size.
        born, dies: positions, among the step's nodes, of the node that allocates the storage and of its last reader.
            `dies` is the number of nodes if the storage outlives the step.
        last_forward: position of its last reader in the forward, at least `born`.
        first_backward: position of its first reader in the backward. None if no node of the backward reads it, or if
            the backward allocates it.
        known: whether its size is fixed. If False, the size depends on data, and `nbytes` is the expected size.
        names: the nodes whose values use this storage.
    """

    number: int
    node: fx.Node
    nbytes: int
    born: int
    dies: int = 0
    last_forward: int = 0
    first_backward: int | None = None
    known: bool = True
    names: list[fx.Node] = field(default_factory=list)


@dataclass(frozen=True)
class Reads:
    """Every read of a storage in a step, as parallel arrays. Each node counts as a reader of the storages of its own
    result, too.

    Attributes:
        reader, value: positions in the step of the node that reads, and of the node whose value it reads.
        storage: index of a storage that holds the value.
    """

    reader: Numbers
    value: Numbers
    storage: Numbers


@dataclass(frozen=True, eq=False)
class StepMemory:
    """The storages that a step allocates, and the bytes that it holds while each node runs.

    Attributes:
        nodes: the nodes of forward and backward, in execution order.
        backward: the position of the first node of the backward.
        storages: all storages that the step allocates.
        memory: node -> the storages that its value uses.
        reads: every read of a storage.
    """

    nodes: Sequence[fx.Node]
    backward: int
    storages: Sequence[Storage]
    memory: Mapping[fx.Node, Sequence[Storage]]
    reads: Reads

    @cached_property
    def bytes_at_node(self) -> list[int]:
        """For each node in execution order, the bytes of memory that the step holds while the node runs."""
        return self._held(self.storages)

    def as_line(self) -> str:
        """Draws the bytes held over the step as one line of block characters. Empty if no bytes are held."""
        if not self.bytes_at_node or not self.peak_bytes:
            return ""
        width = min(SAMPLES, len(self.bytes_at_node))
        edges = [k * len(self.bytes_at_node) // width for k in range(width + 1)]
        levels = [max(self.bytes_at_node[a:b]) * (len(_LEVELS) - 1) // self.peak_bytes for a, b in pairwise(edges)]
        return "".join(_LEVELS[level] for level in levels)

    @property
    def peak_bytes(self) -> int:
        """The most bytes that the step holds at any time."""
        return max(self.bytes_at_node, default=0)

    @property
    def known_peak_bytes(self) -> int:
        """The peak bytes of the storages whose size does not depend on data. This is a lower bound of the real peak."""
        return max(self._held([s for s in self.storages if s.known]), default=0)

    def backward_peak(self, order: Sequence[fx.Node]) -> int:
        """Returns the most bytes that the backward would hold if its nodes ran in `order`."""
        count = len(self.nodes)
        stands = np.arange(count)
        stands[[self.position[node] for node in order]] = np.arange(self.backward, count)
        dies = last_reads(self.reads.storage, stands[self.reads.reader], len(self.storages))
        dies[self.outliving] = count
        return int(bytes_over_time(stands[self.allocated_at], dies, self.nbytes, count)[self.backward :].max(initial=0))

    @property
    def saved(self) -> list[Storage]:
        """The storages that the forward saves for the backward, in the forward's order."""
        return [s for s in self.storages if s.born < self.backward and s.first_backward is not None]

    @property
    def saved_bytes(self) -> int:
        """The bytes that the forward saves for the backward."""
        return sum(storage.nbytes for storage in self.saved)

    @cached_property
    def position(self) -> dict[fx.Node, int]:
        """Maps each node to its position in `nodes`."""
        return {node: k for k, node in enumerate(self.nodes)}

    @cached_property
    def inputs(self) -> list[list[int]]:
        """For each node in execution order, the positions of its input nodes."""
        return [[self.position[v] for v in node.all_input_nodes if v in self.position] for node in self.nodes]

    @cached_property
    def allocated_at(self) -> Numbers:
        """For each storage, the position of the node that allocates it."""
        return np.array([s.born for s in self.storages], dtype=np.int64)

    @cached_property
    def nbytes(self) -> Numbers:
        """The bytes of each storage."""
        return np.array([s.nbytes for s in self.storages], dtype=np.int64)

    @cached_property
    def outliving(self) -> Numbers:
        """The indices of the storages that are still in use after the step."""
        return np.array([s.number for s in self.storages if s.dies == len(self.nodes)], dtype=np.int64)

    def _held(self, storages: Sequence[Storage]) -> list[int]:
        """Returns, for each node of the step, the bytes of those of `storages` that are in memory while the
        node runs.
        """
        born, dies, nbytes = np.array([(s.born, s.dies, s.nbytes) for s in storages], dtype=np.int64).reshape(-1, 3).T
        by_time: list[int] = bytes_over_time(born, dies, nbytes, len(self.nodes)).tolist()
        return by_time


def bytes_over_time(born: Numbers, dies: Numbers, nbytes: Numbers, count: int) -> Numbers:
    """Returns the bytes held while each of `count` nodes runs.

    Args:
        born, dies: positions of the node that allocates each storage, and of its last reader.
        nbytes: the bytes of each storage.
    """
    change = np.zeros(count + 1, dtype=np.int64)
    np.add.at(change, born, nbytes)
    np.subtract.at(change, np.minimum(dies + 1, count), nbytes)
    return np.cumsum(change[:count])


def last_reads(storage: Numbers, position: Numbers, count: int) -> Numbers:
    """Returns the position of the last read of each of `count` storages, or -1 if there is none.

    Args:
        storage, position: parallel arrays with the storage and the reader's position of each read.
    """
    last = np.full(count, -1, dtype=np.int64)
    np.maximum.at(last, storage, position)
    return last


def first_reads(storage: Numbers, position: Numbers, count: int) -> Numbers:
    """Returns the position of the first read of each of `count` storages, or `NEVER_READ` if there is none.

    Args:
        storage, position: parallel arrays with the storage and the reader's position of each read.
    """
    first = np.full(count, NEVER_READ, dtype=np.int64)
    np.minimum.at(first, storage, position)
    return first


def step_memory(graph: TrainingGraph) -> StepMemory:
    """Simulates the memory of a training step. If the graph is not partitioned into phases yet, assumes the phases that
    it will have.
    """
    in_order, outputs, saved = _order_of_phases(graph) if graph.phases else _order_of_whole_graph(graph)
    nodes = [node for phase in in_order for node in phase]
    return simulate_memory(nodes, len(nodes) - len(in_order[-1]), outputs, saved, graph.expected)


_Ordered = tuple[list[list[fx.Node]], set[fx.Node], dict[fx.Node, fx.Node]]
"""(the nodes of each phase, the values that outlive the step, placeholder of a saved value -> that value)."""


def _order_of_whole_graph(graph: TrainingGraph) -> _Ordered:
    """Returns, for a graph that is not partitioned yet: the nodes of each future phase, the values that outlive the
    step, and an empty dict in place of saved values.
    """
    in_order = [[node for node in graph.graph.nodes if node in phase] for phase in phase_nodes(graph).values()]
    return in_order, {value for value, _ in graph.outputs() if value is not None}, {}


def _order_of_phases(graph: TrainingGraph) -> _Ordered:
    """Returns, for a partitioned graph: the nodes of each phase, the values that outlive the step, and a map from each
    placeholder of a saved value to that value.
    """
    in_order, outputs, saved = [], set(), {}
    made: dict[str, fx.Node] = {}
    for name in PHASES:
        module = graph.phases.get(name)
        nodes = list(module.graph.nodes) if module is not None else []
        in_order.append([node for node in nodes if node.op not in ("placeholder", "output")])
        if module is None:
            continue
        for placeholder, role in inputs_of(module):
            if isinstance(role, Saved) and role.name in made:
                saved[placeholder] = made[role.name]
        for value, output in outputs_of(module):
            if value is None:
                continue
            if isinstance(output, Saved):
                made[output.name] = saved.get(value, value)
            else:
                outputs.add(value)
    return in_order, outputs, saved


def nbytes(value: Any, expected: ExpectedSizes = NOTHING_EXPECTED) -> int:
    """Returns the bytes of a fake tensor, or the total bytes of all fake tensors in a pytree.

    Args:
        expected: the values to assume for data-dependent sizes.
    """
    return sum(
        prod(map(expected.number, tuple(t.shape))) * t.element_size() for t in _leaves(value) if isinstance(t, Tensor)
    )


def _leaves(value: Any) -> list[Any]:
    """Returns the leaves of a pytree, such as tensors and numbers; for a single value, only that value."""
    return [value] if isinstance(value, Tensor) else pytree.tree_leaves(value)


def simulate_memory(
    nodes: Sequence[fx.Node],
    backward: int,
    outputs: Collection[fx.Node],
    saved: Mapping[fx.Node, fx.Node] = MappingProxyType({}),
    expected: ExpectedSizes = NOTHING_EXPECTED,
) -> StepMemory:
    """Computes the memory of a step whose nodes run in this order.

    Args:
        backward: the position of the first node of the backward.
        outputs: the values that outlive the step.
        saved: placeholder -> the saved value that it represents.
        expected: the expected values of data-dependent sizes.
    """
    position = {node: k for k, node in enumerate(nodes)}
    of: dict[fx.Node, Sequence[Storage]] = {}
    storages: list[Storage] = []
    reads: list[tuple[int, int, int]] = []
    places: dict[fx.Node, dict[int, int]] = {}  # cached, because a node may have a thousand results

    def add_storages(node: fx.Node, position: int, sizes: Sequence[int]) -> list[Storage]:
        """Adds a storage for each size that is not zero, allocated by node number `position`. Returns the new
        storages.
        """
        known, first = _is_known(node), len(storages)
        for size in filter(None, sizes):
            storages.append(Storage(len(storages), node, size, position, known=known))
        return storages[first:]

    def storages_of(value: fx.Node) -> Sequence[Storage]:
        """Returns the storages of a node's value."""
        return of.get(saved.get(value, value), ())

    for k, node in enumerate(nodes):
        shared = list(_inputs_sharing_memory(node, position, backward))
        if op_name(node) == AWAIT_OFFLOAD:
            of[node] = []
        elif shared:
            of[node] = [storage for source in shared for storage in storages_of(source)]
        elif _is_item(node):
            source = node.all_input_nodes[0]
            if source not in places:
                places[source] = _result_indices(source, expected)
            of[node] = _item_storage(storages_of(source), node, places[source])
        else:
            of[node] = add_storages(node, k, _result_bytes(node, expected))
        for storage in of[node]:
            storage.names.append(node)
        for value in (node, *node.all_input_nodes):
            reads += [(k, position[saved.get(value, value)], storage.number) for storage in storages_of(value)]
    for k, node in enumerate(nodes):  # add the temporary memory that each op uses while it runs
        reads += [(k, k, storage.number) for storage in add_storages(node, k, [scratch_bytes(node, expected)])]
    outlives = [storage.number for value in outputs for storage in storages_of(value)]
    by_column = np.array(reads, dtype=np.int64).reshape(-1, 3).T
    return _with_lifetimes(StepMemory(nodes, backward, storages, of, Reads(*by_column)), outlives)


def _with_lifetimes(found: StepMemory, outlives: Sequence[int]) -> StepMemory:
    """Sets when each storage of `found` is first and last used, computed from its reads. Returns `found`.

    Args:
        outlives: indices of the storages that outlive the step.
    """
    reads, count = found.reads, len(found.storages)
    early = reads.reader < found.backward
    dies = last_reads(reads.storage, reads.reader, count)
    dies[outlives] = len(found.nodes)
    last_forward = last_reads(reads.storage[early], reads.reader[early], count)
    first_backward = first_reads(reads.storage[~early], reads.reader[~early], count)
    for storage in found.storages:
        storage.dies, last = int(dies[storage.number]), int(last_forward[storage.number])
        storage.last_forward = max(last, storage.born)
        if storage.born < found.backward and (first := int(first_backward[storage.number])) != NEVER_READ:
            storage.first_backward = first
    return found


def _result_bytes(node: fx.Node, expected: ExpectedSizes) -> list[int]:
    """Returns the bytes of each result of a node.

    Args:
        expected: the values to assume for data-dependent sizes.
    """
    sizes = [nbytes(leaf, expected) for leaf in _leaves(node.meta.get("val"))]
    workspace = saved_workspace_bytes(node, expected)
    return sizes if workspace is None else [*sizes[:-1], workspace]


def _is_known(node: fx.Node) -> bool:
    """Returns whether the sizes of all tensors that a node returns are independent of data."""
    tensors = [leaf for leaf in _leaves(node.meta.get("val")) if isinstance(leaf, Tensor)]
    return all(is_known(size) for tensor in tensors for size in tuple(tensor.shape))


def _inputs_sharing_memory(node: fx.Node, position: dict[fx.Node, int], backward: int) -> Iterator[fx.Node]:
    """Yields the inputs of `node` whose memory contains the node's result, because the result is a view of them or
    overwrites them.

    Args:
        position: node -> its position in the step.
        backward: the position of the first node of the backward.
    """
    if node.op != "call_function" or _is_item(node):
        return
    if node.target in SHARES_MEMORY or op_name(node) in (OFFLOAD, AWAIT_RELOAD):
        yield node.all_input_nodes[0]
        return
    written = overwritten_argument(node)
    if written is not None:
        source = node.args[written]
        assert isinstance(source, fx.Node)
        if source in position and (position[source] < backward) == (position[node] < backward):
            yield source
            return
    yield from aliased_inputs(node)


def _is_item(node: fx.Node) -> bool:
    """Returns whether a node selects one item of another node's tuple, as `getitem` does."""
    return node.op == "call_function" and not isinstance(node.target, torch._ops.OpOverload) and len(node.args) == 2


def _result_indices(source: fx.Node, expected: ExpectedSizes) -> dict[int, int]:
    """Numbers the results of a node that occupy memory. Returns, by index among all results, the index among these
    results.

    Args:
        expected: the values to assume for data-dependent sizes.
    """
    with_memory = (k for k, size in enumerate(_result_bytes(source, expected)) if size)
    return {k: place for place, k in enumerate(with_memory)}


def _item_storage(storages: Sequence[Storage], node: fx.Node, places: Mapping[int, int]) -> Sequence[Storage]:
    """Returns a list with the storage of the tuple item that `node` selects, or an empty list if the item has no
    memory. If it is unknown which storage the item occupies, returns all storages.

    Args:
        storages: the storages of the tuple's items that have memory.
        places: the result of `_result_indices` for the tuple.
    """
    source, index = node.all_input_nodes[0], node.args[1]
    values = source.meta.get("val")
    if not isinstance(values, list | tuple) or not isinstance(index, int) or len(places) != len(storages):
        return storages
    return [storages[places[index]]] if index in places else []
