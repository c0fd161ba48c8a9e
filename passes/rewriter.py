"""Edits graphs, and keeps the fake value of every node (`meta["val"]`) correct."""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from embrace_fx.vocabulary.graph import TrainingGraph, ancestors
from embrace_fx.vocabulary.operation_id import OperationId
from embrace_fx.vocabulary.ops import draws_before

WAIT = torch.ops._c10d_functional.wait_tensor.default
_CAST = torch.ops.aten._to_copy.default


@dataclass(frozen=True)
class DerivedValue:
    """A node's fake value, with the call from which it was computed.

    Attributes:
        target, args, kwargs: the op or function, and its arguments.
        value: the fake value.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    value: Any


@contextlib.contextmanager
def computing_fakes(mode: FakeTensorMode) -> Iterator[None]:
    """Opens a context in which ops compute fake values under `mode`, without its cache.

    Data-dependent sizes are new symbols at each call, so caching a call would cost more than the call.
    """
    before, mode.cache_enabled = mode.cache_enabled, False
    try:
        with mode:
            yield
    finally:
        mode.cache_enabled = before


class Rewriter:
    """Edits one graph: inserts calls, each with a readable name and a fake value in `meta["val"]`.

    Fake values are computed in the fake mode under which the graph was captured.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self.graph = module.graph
        fake_mode = fake_mode_of(module.graph)
        if fake_mode is None:
            raise ValueError(
                "The nodes of the graph have no fake values in meta['val']. Capture the graph with embrace_fx.capture."
            )
        self.fake_mode = fake_mode
        self._region: tuple[int, ...] | None = None
        self._taken = {node.name for node in module.graph.nodes}

    @contextlib.contextmanager
    def before(self, node: fx.Node) -> Iterator[None]:
        """Opens a context in which nodes are inserted before `node` and belong to its checkpointed regions."""
        around, self._region = self._region, node.meta.get("region")
        with self.graph.inserting_before(node):
            yield
        self._region = around

    def call(self, target: Any, *args: Any, name: str, **options: Any) -> fx.Node:
        """Inserts and returns a call of the op or function `target` at the insertion point. `options` are its keyword
        arguments.
        """
        node = self.graph.create_node("call_function", target, args, options, name=name)
        self._taken.add(node.name)
        if self._region is not None:
            node.meta["region"] = self._region
        self.refresh(node)
        return node

    def launch(self, target: Any, *args: Any, launch: OperationId, name: str) -> fx.Node:
        """Inserts and returns, at the insertion point, a call of an op that starts or awaits a collective or a copy.
        `launch`, the id of this collective or copy, becomes the last argument.
        """
        node = self.call(target, *args, str(launch), name=name)
        node.meta["launch"] = launch
        return node

    def copy(self, node: fx.Node, reads: Callable[[fx.Node], fx.Node], name: str) -> fx.Node:
        """Inserts and returns a copy of a node at the insertion point, for recomputation in the backward.

        Args:
            reads: maps each input of the node to the input that the copy reads.
            name: the copy's name; a number is appended if another node has it.
        """
        copy = self.graph.node_copy(node, reads)
        names = itertools.chain((name,), (f"{name}_x{number}" for number in itertools.count(2)))
        copy.name = next(each for each in names if each not in self._taken)
        self._taken.add(copy.name)
        copy.meta = {**node.meta, "again": node.name}
        return copy

    def item(self, node: fx.Node, index: int, name: str) -> fx.Node:
        """Inserts and returns a node that reads the item at `index` of the tuple `node`."""
        return self.call(operator.getitem, node, index, name=name)

    def cast(self, node: fx.Node, dtype: torch.dtype, name: str) -> fx.Node:
        """Inserts and returns a node that casts the tensor `node` to `dtype`."""
        return self.call(_CAST, node, dtype=dtype, name=name)

    def wait(self, launch: fx.Node) -> fx.Node:
        """Inserts and returns a wait for the collective that the node `launch` starts."""
        return self.call(WAIT, launch, name=f"{launch.name}_done")

    def placeholder(
        self, name: str, role: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> fx.Node:
        """Inserts and returns, at the insertion point, a placeholder with a role (what the input is, such as a
        parameter) and a fake value of this shape.
        """
        node = self.graph.create_node("placeholder", name, name=name)
        node.target = node.name
        node.meta["role"] = role
        with self.fake_mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype, device=device)
        return node

    def copy_placeholder(self, placeholder: fx.Node) -> fx.Node:
        """Inserts and returns, as the graph's first node, a copy of a placeholder of another phase's graph."""
        with self.before(next(iter(self.graph.nodes))):
            found = self.graph.placeholder(placeholder.name)
        found.meta = dict(placeholder.meta)
        return found

    def refresh(self, node: fx.Node) -> None:
        """Recomputes the fake value of the call `node` after its arguments have changed."""
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        with computing_fakes(self.fake_mode):
            assert callable(node.target)
            value = node.target(*args, **kwargs)
        node.meta["val"] = value
        node.meta["derived"] = DerivedValue(node.target, args, kwargs, value)

    def retype(self, node: fx.Node, dtype: torch.dtype) -> None:
        """Changes only the dtype of the fake value of `node`. Its sizes stay, because later nodes refer to their
        symbols.
        """
        with self.fake_mode:
            node.meta["val"] = torch.empty_like(node.meta["val"], dtype=dtype)


def first_after_placeholders(graph: fx.Graph) -> fx.Node:
    """Returns the first node that is not a placeholder."""
    found: fx.Node = next(node for node in graph.nodes if node.op != "placeholder")
    return found


def move_to_head(nodes: Sequence[fx.Node]) -> fx.Node:
    """Moves `nodes`, and everything that they depend on, to right after the graph's placeholders. Returns the first
    node after them. If `nodes` depend on draws of random numbers, all earlier draws move, too.
    """
    head = first_after_placeholders(nodes[0].graph)
    for needed in sorted(ancestors([*nodes, *draws_before(ancestors(nodes))])):
        if needed is head:
            head = head.next
        else:
            head.prepend(needed)
    return head


def rewrite_each(
    graph: TrainingGraph,
    find: Callable[[TrainingGraph], Sequence[fx.Node]],
    rewrite: Callable[[Rewriter, fx.Node], None],
) -> TrainingGraph:
    """Calls `rewrite` on each node that `find` returns, in a copy of the graph. Returns the copy, or the graph itself
    if `find` returns no node.
    """
    if not find(graph):
        return graph
    result = graph.edit()
    rewriter = Rewriter(result.module)
    for node in find(result):
        rewrite(rewriter, node)
    return result


def fake_mode_of(graph: fx.Graph) -> FakeTensorMode | None:
    """Returns the fake mode of a graph's values, or None if it has no tensors."""
    values = (value for node in graph.nodes for value in pytree.tree_leaves(node.meta.get("val")))
    return next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)
