"""Models the memory of a step: the bytes that its forward and backward hold, node by node.

The model counts what a step allocates: values saved for the backward, intermediate values of a phase, gradients, their
buckets, results. It does not count what outlives steps (parameters, optimizer state) or the batch. Views cost nothing;
an op that may write into an input that dies allocates nothing. An offloaded value is held until its offload is awaited,
and again from the start of its reload.

A data-dependent size counts as the graph expects it (`embrace_fx.vocabulary.sizes`); no limit is proved by it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from embrace_fx.passes.collectives import aliased_inputs
from embrace_fx.passes.partition import members_of
from embrace_fx.passes.rnn_sizes import saved_workspace_bytes, scratch_bytes
from embrace_fx.vocabulary.copy_ops import AWAIT_OFFLOAD, AWAIT_RELOAD, OFFLOAD
from embrace_fx.vocabulary.graph import Saved, TrainingGraph, inputs_of, outputs_of
from embrace_fx.vocabulary.in_place import SHARES_MEMORY, written_into
from embrace_fx.vocabulary.ops import op_name
from embrace_fx.vocabulary.sizes import NOTHING_EXPECTED, ExpectedSizes, is_known


@dataclass
class Storage:
    """The memory that one node allocates, and all values that lie in it.

    Attributes:
        born, dies: the positions, among the step's nodes, of the node that makes it and of its last reader; `dies` is
            the number of nodes where it outlives the step.
        known: False where its size depends on data: `nbytes` is then an expected size.
        last_forward, first_backward: positions of its last reader in the forward, its first in the backward (or None).
    """

    node: fx.Node
    nbytes: int
    born: int
    dies: int = 0
    last_forward: int = 0
    first_backward: int | None = None
    known: bool = True
    names: list[fx.Node] = field(default_factory=list)


@dataclass(frozen=True)
class StepMemory:
    """The memory that a step holds at each node.

    Attributes:
        nodes: of forward and backward, in the order in which they run.
        backward: the position of the first node of the backward.
        storages: all memory that the step allocates.
        by_time: bytes while each node runs.
        memory: node -> the storages that its value lies in.
    """

    nodes: Sequence[fx.Node]
    backward: int
    storages: Sequence[Storage]
    by_time: Sequence[int]
    memory: Mapping[fx.Node, Sequence[Storage]]

    @property
    def peak_bytes(self) -> int:
        return max(self.by_time, default=0)

    @property
    def known_peak_bytes(self) -> int:
        """The peak of the storages whose sizes are known: the part of the peak that can be proved."""
        return max(_by_time([s for s in self.storages if s.known], len(self.nodes)), default=0)

    @property
    def saved(self) -> list[Storage]:
        """The storages that the forward saves for the backward, in the forward's order."""
        return [s for s in self.storages if s.born < self.backward and s.first_backward is not None]

    @property
    def saved_bytes(self) -> int:
        return sum(storage.nbytes for storage in self.saved)


def step_memory(graph: TrainingGraph) -> StepMemory:
    """Computes the memory of a step, of its phases or, before partitioning, of the phases to come."""
    in_order, outputs, saved = _phases(graph) if graph.phases else _phases_to_be(graph)
    nodes = [node for phase in in_order for node in phase]
    backward = len(nodes) - len(in_order[-1])
    memory = _memory(nodes, backward, outputs, saved, graph.expected)
    storages = list({id(storage): storage for node in nodes for storage in memory[node]}.values())
    storages += _scratch(nodes, graph.expected)
    return StepMemory(nodes, backward, storages, _by_time(storages, len(nodes)), memory)


def _by_time(storages: Sequence[Storage], count: int) -> list[int]:
    change = [0] * (count + 1)
    for storage in storages:
        change[storage.born] += storage.nbytes
        change[min(storage.dies + 1, count)] -= storage.nbytes
    return list(accumulate(change[:count]))


_Ordered = tuple[list[list[fx.Node]], set[fx.Node], dict[fx.Node, fx.Node]]
"""(the nodes of each phase, the values that outlive the step, placeholder of a saved value -> that value)."""


def _phases_to_be(graph: TrainingGraph) -> _Ordered:
    members = members_of(graph)
    phases = (members.unique, members.ids, members.forward, members.backward)
    in_order = [[node for node in graph.graph.nodes if node in phase] for phase in phases]
    return in_order, {value for value, _ in graph.outputs() if value is not None}, {}


def _phases(graph: TrainingGraph) -> _Ordered:
    in_order, outputs, saved = [], set(), {}
    made: dict[str, fx.Node] = {}
    for name in ("unique", "ids", "forward", "backward"):
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


def backward_peak(
    nodes: Sequence[fx.Node], saved: Collection[fx.Node], expected: ExpectedSizes = NOTHING_EXPECTED
) -> int:
    """Returns the most bytes that a backward phase would hold if its nodes ran in this order.

    Args:
        nodes: the order, without placeholders and output.
        saved: the placeholders of values that the forward has saved; each dies with its last reader.
        expected: numbers in place of data-dependent sizes.
    """
    in_order = [*saved, *nodes]
    outputs = {node for node in nodes if any(user.op == "output" for user in node.users)}
    memory = _memory(in_order, 0, outputs, {}, expected)
    storages = list({id(storage): storage for node in in_order for storage in memory[node]}.values())
    return max(_by_time(storages + _scratch(in_order, expected), len(in_order)), default=0)


def nbytes(value: Any, expected: ExpectedSizes = NOTHING_EXPECTED) -> int:
    """Counts the bytes of a fake tensor, or of several."""
    return sum(
        prod(map(expected.number, tuple(t.shape))) * t.element_size() for t in _leaves(value) if isinstance(t, Tensor)
    )


def _leaves(value: Any) -> list[Any]:
    return [value] if isinstance(value, Tensor) else pytree.tree_leaves(value)


def _memory(
    nodes: Sequence[fx.Node],
    backward: int,
    outputs: set[fx.Node],
    saved: Mapping[fx.Node, fx.Node],
    expected: ExpectedSizes,
) -> dict[fx.Node, list[Storage]]:
    """Maps each node to the storages of its value; `saved`: placeholder -> the saved value that it stands for."""
    position = {node: k for k, node in enumerate(nodes)}
    of: dict[fx.Node, list[Storage]] = {}
    places: dict[fx.Node, dict[int, int]] = {}  # cached: a node may have a thousand results

    def lies_in(value: fx.Node) -> list[Storage]:
        return of.get(saved.get(value, value), [])

    for k, node in enumerate(nodes):
        shared = list(_shared(node, position, backward))
        if op_name(node) == AWAIT_OFFLOAD:
            of[node] = []
        elif shared:
            of[node] = [storage for source in shared for storage in lies_in(source)]
        elif _is_item(node):
            source = node.all_input_nodes[0]
            if source not in places:
                places[source] = _places(source, expected)
            of[node] = _item(lies_in(source), node, places[source])
        else:
            known = _is_known(node)
            of[node] = [Storage(node, size, k, k, k, known=known) for size in _sizes(node, expected) if size]
        for storage in of[node]:
            storage.names.append(node)
        for value in node.all_input_nodes:
            for storage in lies_in(value):
                _read(storage, k, backward)
    for value in outputs:
        for storage in lies_in(value):
            storage.dies = len(nodes)
    return of


def _sizes(node: fx.Node, expected: ExpectedSizes) -> list[int]:
    """Counts the bytes of each of a node's results."""
    sizes = [nbytes(leaf, expected) for leaf in _leaves(node.meta.get("val"))]
    workspace = saved_workspace_bytes(node, expected)
    return sizes if workspace is None else [*sizes[:-1], workspace]


def _scratch(nodes: Sequence[fx.Node], expected: ExpectedSizes) -> list[Storage]:
    """Finds the temporaries of ops, where known: such memory dies with its op, and no value lies in it."""
    sizes = ((k, node, scratch_bytes(node, expected)) for k, node in enumerate(nodes))
    return [Storage(node, size, k, k, k, known=_is_known(node)) for k, node, size in sizes if size]


def _is_known(node: fx.Node) -> bool:
    """Tells whether no size of a node's results depends on data."""
    tensors = [leaf for leaf in _leaves(node.meta.get("val")) if isinstance(leaf, Tensor)]
    return all(is_known(size) for tensor in tensors for size in tuple(tensor.shape))


def _read(storage: Storage, position: int, backward: int) -> None:
    storage.dies = max(storage.dies, position)
    if position < backward:
        storage.last_forward = max(storage.last_forward, position)
    elif storage.born < backward and storage.first_backward is None:
        storage.first_backward = position


def _shared(node: fx.Node, position: dict[fx.Node, int], backward: int) -> Iterator[fx.Node]:
    """Yields the inputs whose memory a node's result shares or reuses."""
    if node.op != "call_function" or _is_item(node):
        return
    if node.target in SHARES_MEMORY or op_name(node) in (OFFLOAD, AWAIT_RELOAD):
        yield node.all_input_nodes[0]
        return
    written = written_into(node)
    if written is not None:
        source = node.args[written]
        assert isinstance(source, fx.Node)
        if source in position and (position[source] < backward) == (position[node] < backward):
            yield source
            return
    yield from aliased_inputs(node)


def _is_item(node: fx.Node) -> bool:
    return node.op == "call_function" and not isinstance(node.target, torch._ops.OpOverload) and len(node.args) == 2


def _places(source: fx.Node, expected: ExpectedSizes) -> dict[int, int]:
    """Numbers the results of a node that have memory: a result's number -> its place among those."""
    with_memory = (k for k, size in enumerate(_sizes(source, expected)) if size)
    return {k: place for place, k in enumerate(with_memory)}


def _item(storages: list[Storage], node: fx.Node, places: Mapping[int, int]) -> list[Storage]:
    """Returns the storage of one item of several results."""
    source, index = node.all_input_nodes[0], node.args[1]
    values = source.meta.get("val")
    if not isinstance(values, list | tuple) or not isinstance(index, int) or len(places) != len(storages):
        return storages
    return [storages[places[index]]] if index in places else []
