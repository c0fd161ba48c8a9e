"""Offloads saved values after their last read in the forward, and reloads them before their first read in the
backward.

Contract
    Same values, bit for bit. A storage is offloaded as a whole. The backward recreates other views of it from the
    reloaded value. No node reads a value whose memory is freed.

    rewrite:  h = relu(x); y = h @ v; ...;               gv = h.t() @ g
    ->        h = relu(x); t = offload(h); y = h @ v; ...; s = await_offload(t); ...
              c = reload(s); ...; h_back = await_reload(c); gv = h_back.t() @ g
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx
from torch._ops import OpOverload

from embrace_fx.passes.collectives import aliased_inputs
from embrace_fx.passes.memory.copy_placement import CopyRate, PlacedCopy
from embrace_fx.passes.rewriter import Rewriter
from embrace_fx.passes.step_memory import StepMemory, Storage
from embrace_fx.vocabulary import copy_ops
from embrace_fx.vocabulary.graph import TrainingGraph
from embrace_fx.vocabulary.in_place import SHARES_MEMORY, yields_views
from embrace_fx.vocabulary.ops import op_name

embrace = torch.ops.embrace


# ---- values that can be offloaded ----


def offloadable_values(memory: StepMemory) -> dict[Storage, fx.Node]:
    """Maps each saved storage that can be offloaded to the node whose tensor covers all of its memory.

    Results of the step, its inputs, and values that a collective has received cannot be offloaded.
    """
    backward = set(memory.nodes[memory.backward :])
    values = {}
    for storage in memory.saved:
        value = _value_of(storage, backward)
        if value is not None and storage.dies < len(memory.nodes):
            values[storage] = value
    return values


def _value_of(storage: Storage, backward: set[fx.Node]) -> fx.Node | None:
    """Returns the node whose tensor covers all of a storage's memory, or None if the storage cannot be offloaded.

    Args:
        backward: the nodes of the backward.
    """
    if not _is_made_by_compute(storage.node):
        return None
    names = set(storage.names)
    whole = [n for n in storage.names if n not in backward and _is_tensor(n) and view_of(n) not in names]
    if not whole or not _is_dense(whole[-1]):
        return None
    read = [node for node in storage.names if node not in backward and not backward.isdisjoint(node.users)]
    return whole[-1] if all(_is_view_chain_of(node, whole[-1]) for node in read) else None


def view_of(node: fx.Node) -> fx.Node | None:
    """Returns the node that `node` is a view of, or None if `node` is not a view."""
    if node.op != "call_function":
        return None
    if node.target in SHARES_MEMORY:
        return node.all_input_nodes[0]
    if not isinstance(node.target, OpOverload):
        tuples = node.all_input_nodes
        return tuples[0] if tuples and view_of(tuples[0]) is not None else None
    if not yields_views(node.target):
        return None
    aliased = aliased_inputs(node)
    return aliased[0] if aliased else None


def _is_view_chain_of(node: fx.Node | None, value: fx.Node) -> bool:
    """Returns whether a node is `value`, a view of it, or a view of such a view."""
    while node is not None and node is not value:
        node = view_of(node)
    return node is value


def _is_made_by_compute(node: fx.Node) -> bool:
    """Returns whether a node computes its value, rather than being an input or receiving it from other ranks. Of this
    package's own ops, only RNN layers count as compute.
    """
    while node.op == "call_function" and not isinstance(node.target, OpOverload):
        node = node.all_input_nodes[0]
    if not isinstance(node.target, OpOverload) or node.target.namespace == "_c10d_functional":
        return False
    return node.target.namespace != "embrace" or op_name(node) == "embrace::rnn_layer"


def _is_tensor(node: fx.Node) -> bool:
    """Returns whether a node's value is a single tensor."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def _is_dense(node: fx.Node) -> bool:
    """Returns whether a node's value has the strides that `empty_like` would give it. Strides are compared as text, to
    avoid new guards.
    """
    value = node.meta["val"]
    return value.layout == torch.strided and str(torch.empty_like(value).stride()) == str(value.stride())


# ---- inserting copies ----


class InsertCopies:
    """Inserts offloads and reloads of storages into a joint graph, in place.

    Args:
        found: the memory of the graph without offloads and reloads.
        rate: the speed of the copies.
    """

    def __init__(self, graph: TrainingGraph, found: StepMemory, rate: CopyRate) -> None:
        self._rewriter = Rewriter(graph.module)
        self._held = found
        self._rate = rate
        self._values = offloadable_values(found)
        self._end_of_forward = _skip_placeholders(found.nodes[found.backward - 1])

    def __call__(self, copies: Sequence[PlacedCopy]) -> None:
        leaving, stored, coming = dict[Storage, fx.Node](), dict[Storage, fx.Node](), dict[Storage, fx.Node]()
        nodes = self._held.nodes
        for copy in sorted(copies, key=lambda c: c.storage.born, reverse=True):
            value = self._values[copy.storage]
            leaving[copy.storage] = self._insert(copy.storage, embrace.offload, value, _skip_placeholders(value))
        for copy in sorted(copies, key=lambda c: (c.left, c.storage.born)):
            before = self._end_of_forward if copy.left == self._held.backward else nodes[copy.left]
            stored[copy.storage] = self._insert(copy.storage, embrace.await_offload, leaving[copy.storage], before)
        for copy in sorted(copies, key=lambda c: (c.comes, c.reload_awaited_at, c.storage.born)):
            before = nodes[copy.comes]
            coming[copy.storage] = self._insert(copy.storage, embrace.reload, stored[copy.storage], before)
        for copy in sorted(copies, key=lambda c: (c.reload_awaited_at, c.storage.born)):
            back = self._insert(copy.storage, embrace.await_reload, coming[copy.storage], nodes[copy.reload_awaited_at])
            self._use_reloaded(copy.storage, self._values[copy.storage], back)

    def _insert(self, storage: Storage, op: torch._ops.OpOverloadPacket, value: fx.Node, before: fx.Node) -> fx.Node:
        """Inserts and returns a node that starts an offload or reload of a storage, or waits for its end.

        Args:
            op: the op to call.
            value: the node of the op's input: the value to offload, or the result of the op before this one.
            before: the node before which the call is inserted.
        """
        name = self._values[storage].name
        leaves = op in (embrace.offload, embrace.await_offload)
        launch = copy_ops.offload_id(name) if leaves else copy_ops.reload_id(name)
        with self._rewriter.before(before):
            node = self._rewriter.launch(op.default, value, launch=launch, name=f"{name}_{op.__name__}")
        if op in (embrace.offload, embrace.reload):
            node.meta["copy_ms"] = self._rate.ms(storage.nbytes)
        return node

    def _use_reloaded(self, storage: Storage, value: fx.Node, back: fx.Node) -> None:
        """Makes the backward read the reloaded value of a storage, or views of it, instead of the original.

        Args:
            value: the node of the original value.
            back: the node of the reloaded value.
        """
        for name in storage.names:
            readers = [user for user in name.users if self._held.position.get(user, -1) >= self._held.backward]
            if self._held.position[name] >= self._held.backward or not readers:
                continue
            made = self._view_again(name, value, back, min(readers, key=self._held.position.__getitem__))
            for reader in readers:
                reader.replace_input_with(name, made)

    def _view_again(self, name: fx.Node, value: fx.Node, back: fx.Node, before: fx.Node) -> fx.Node:
        """Repeats, on the reloaded value `back`, the views that lead from the original value to its view `name`.
        Inserts them before the node `before`, and returns the last one, or `back` if `name` is `value` itself.
        """
        source = view_of(name)
        if name is value:
            return back
        assert source is not None
        own = self._view_again(source, value, back, before)
        with self._rewriter.before(before):
            return self._rewriter.copy(name, lambda n: own if n is source else n, f"{name.name}_back")


def _skip_placeholders(node: fx.Node) -> fx.Node:
    """Returns the first node after this one that is not a placeholder."""
    following = node.next
    while following.op == "placeholder":
        following = following.next
    return following
