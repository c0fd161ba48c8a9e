"""Compiles regions, the compute between two communications of a phase, to one function each.

Contract
    Same values; other nodes keep their places: launches, waits, submissions, random draws, RNN kernels, ops with
    data-dependent sizes. A region is a run of neighbouring ATen ops, so that nodes between two regions still run
    between them. Values that die within a region die there: its inputs come in one list that it empties. Works on the
    lowered copy of a phase, before ops write in place: a region's results are never written into.

    rewrite:  a = aten.mul(x, y); b = aten.add(a, y); ...; submit_chunk(pack_bucket([b]), 0, n, ...)
    ->        arguments = bundle(x, y); b, = region_add(arguments); submit_bucket(pack_bucket([b]), 0)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import free_symbols

from embrace_fx.vocabulary.graph import Saved

Compiled = Callable[[list[Any]], Sequence[Any]]

SMALLEST = 4
"""Least kernels of a region to be compiled. On a CPU, at sizes where only calling takes time, a compiled region takes 3
us, without its arguments and results, and an eager op 2.4 us: two kernels break even, and compiling takes seconds."""

_UNTAKEN_TAGS = (
    torch.Tag.nondeterministic_seeded,  # random numbers must be those of eager mode
    torch.Tag.dynamic_output_shape,
    torch.Tag.data_dependent_output,
)
_SYMBOLIC = torch.SymInt | torch.SymFloat | torch.SymBool


@dataclass(frozen=True)
class Region:
    """A part of a phase that is compiled to one function: the compute between two communications."""

    module: fx.GraphModule  # with a placeholder for each input, and one tuple of outputs
    inputs: tuple[Any, ...]  # fake tensors and symbolic sizes
    fixed: tuple[int, ...]  # positions of inputs with the same address in every step, such as parameters and shards
    kept: bool  # whether a result may outlive the step, or be read on another CUDA stream


def compile_regions(root: fx.GraphModule, graph: fx.Graph, compile_region: Callable[[Region], Compiled | None]) -> None:
    """Replaces regions by calls of what `compile_region` returns, in place. `root` has the graph's constants."""
    _move_items_to_tuples(graph)
    for nodes in list(_compilable_runs(graph)):
        if sum(map(_is_kernel, nodes)) < SMALLEST:
            continue
        symbols = _symbols_for(graph, nodes)
        if symbols is None:
            continue
        inputs = [*symbols, *_inputs_of(nodes, symbols)]
        outputs = [node for node in nodes if any(user not in nodes for user in node.users)]
        compiled = compile_region(_extract_region(root, nodes, inputs, outputs))
        if compiled is not None:
            _replace_by_call(graph, nodes, inputs, outputs, _with_name(compiled, next(reversed(nodes))))


def _compilable_runs(graph: fx.Graph) -> Iterator[dict[fx.Node, None]]:
    """Yields the runs of consecutive nodes that can be compiled together."""
    run: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if _is_compute(node) or (node.target is operator.getitem and node.args[0] in run):
            run[node] = None
        elif run and node.op not in {"placeholder", "get_attr"}:
            yield run
            run = {}


def _is_compute(node: fx.Node) -> bool:
    """Returns whether a node is a pure ATen or prims op without randomness or data-dependent sizes, or a size."""
    if node.op != "call_function" or any(n.meta.get("val") is None for n in node.all_input_nodes):
        return False
    value, target = node.meta.get("val"), node.target
    if not isinstance(target, torch._ops.OpOverload):
        return isinstance(value, _SYMBOLIC)  # functions that are not ops only compute sizes
    if target.namespace not in ("aten", "prims") or target._schema.is_mutable:
        return False
    values = value if isinstance(value, list | tuple) else [value]
    plain = all(isinstance(v, _SYMBOLIC) or (isinstance(v, Tensor) and not v.is_complex()) for v in values)
    return plain and not any(tag in target.tags for tag in _UNTAKEN_TAGS)


def _is_kernel(node: fx.Node) -> bool:
    """Returns whether a node launches a kernel in eager mode, which views and sizes do not."""
    return isinstance(node.target, torch._ops.OpOverload) and not any(
        result.alias_info is not None or str(result.type) == "int" for result in node.target._schema.returns
    )


def _move_items_to_tuples(graph: fx.Graph) -> None:
    """Moves each `getitem` node to right after the op whose result it reads."""
    for node in list(graph.nodes):
        if isinstance(node.target, torch._ops.OpOverload) and isinstance(node.meta.get("val"), list | tuple):
            for item in reversed([user for user in node.users if user.target is operator.getitem]):
                node.append(item)


def _inputs_of(nodes: Collection[fx.Node], others: Sequence[fx.Node]) -> list[fx.Node]:
    """Returns the distinct nodes outside of `nodes` whose values `nodes` read, except those in `others`."""
    found = (source for node in nodes for source in node.all_input_nodes)
    return [source for source in dict.fromkeys(found) if source not in nodes and source not in others]


def _symbols_for(graph: fx.Graph, nodes: Collection[fx.Node]) -> list[fx.Node] | None:
    """Returns nodes with the symbolic sizes that a region needs and that are not sizes of its inputs, and inserts those
    that are missing. Returns None if a size cannot be computed before the region.
    """
    inputs = _inputs_of(nodes, ())
    needed = {str(symbol) for node in (*inputs, *nodes) for symbol in _free_symbols(node.meta["val"])}
    found: list[fx.Node] = []
    missing = needed - {text for node in inputs for text, _ in _sizes(node)}
    first = next(iter(nodes))
    for node in list(graph.nodes):
        if node is first or not missing:
            break
        for text, dim in _sizes(node):
            if text in missing:
                missing.discard(text)
                found.append(node if dim is None else _size_node(graph, node, dim, first))
    return None if missing else found


def _free_symbols(value: Any) -> set[Any]:
    """Returns the free symbols of a value's sizes."""
    values = value if isinstance(value, list | tuple) else [value]
    return {symbol for v in values if isinstance(v, Tensor | _SYMBOLIC) for symbol in free_symbols(v)}


def _sizes(node: fx.Node) -> Iterator[tuple[str, int | None]]:
    """Yields (size as text, dimension, None if the value is a size) for each symbolic size of a node's value."""
    value = node.meta.get("val")
    if isinstance(value, torch.SymInt):
        yield str(value), None
    elif isinstance(value, Tensor):
        sizes: Sequence[Any] = value.shape
        yield from ((str(size), dim) for dim, size in enumerate(sizes) if isinstance(size, torch.SymInt))


def _size_node(graph: fx.Graph, source: fx.Node, dim: int, first: fx.Node) -> fx.Node:
    """Inserts a node that computes the size of dimension `dim` of `source`. It comes directly after `source`, and
    before `first`, so that `source` need not stay in memory until the size is used.
    """
    after = source
    while after.next is not first and after.next.op in ("placeholder", "get_attr"):
        after = after.next
    with graph.inserting_after(after):
        node = graph.call_function(torch.ops.aten.sym_size.int, (source, dim))
    node.meta["val"] = source.meta["val"].shape[dim]
    return node


def _extract_region(
    root: fx.GraphModule, nodes: Collection[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]
) -> Region:
    """Copies nodes into the graph of a new region. `outputs` are the nodes that are read outside of it."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for k, node in enumerate(inputs):
        env[node] = graph.placeholder(f"input_{k}")
        env[node].meta["val"] = node.meta["val"]
    for node in nodes:
        env[node] = graph.node_copy(node, lambda n: env[n])
    graph.output(tuple(env[node] for node in outputs))
    return Region(
        fx.GraphModule(root, graph),
        tuple(node.meta["val"] for node in inputs),
        tuple(k for k, node in enumerate(inputs) if _is_fixed(node)),
        any(not _is_copied_within_step(node, user) for node in outputs for user in node.users if user not in nodes),
    )


def _is_fixed(node: fx.Node) -> bool:
    """Returns whether a value has one address in all steps: a parameter, buffer or shard, or its in-place update."""
    if node.target is operator.getitem:
        node = node.all_input_nodes[0]
    return bool(node.meta.get("fixed"))


def _is_copied_within_step(value: fx.Node, user: fx.Node) -> bool:
    """Returns whether `user` copies `value`, computes from it, or saves it for the backward. Otherwise it may keep a
    view of the value, or read it after the step.
    """
    if user.op == "output":
        returned = zip(user.args[0], user.meta["roles"], strict=True)  # type: ignore[arg-type]
        return all(isinstance(role, Saved) for each, role in returned if each is value)
    if isinstance(user.target, torch._ops.OpOverload):
        return user.target.namespace == "aten" and all(r.alias_info is None for r in user.target._schema.returns)
    return bool(user.meta.get("copies"))


def _replace_by_call(
    graph: fx.Graph, nodes: Collection[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node], call: Compiled
) -> None:
    """Replaces a region's nodes by one call of their compiled function, in place."""
    with graph.inserting_before(next(iter(nodes))):
        arguments = graph.call_function(pack_arguments, tuple(inputs))
        results = graph.call_function(call, (arguments,))
        for k, node in enumerate(outputs):
            item = graph.call_function(operator.getitem, (results, k))
            item.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(item, delete_user_cb=lambda user: user not in nodes)
    for node in reversed(list(nodes)):
        graph.erase_node(node)


def pack_arguments(*values: Any) -> list[Any]:
    """Returns its arguments as a list, which a region empties so that they can be freed."""
    return list(values)


def _with_name(compiled: Compiled, last: fx.Node) -> Compiled:
    """Wraps a compiled region as a function that profiles show by the name of the region's last node."""

    def region(arguments: list[Any]) -> Sequence[Any]:
        return compiled(arguments)

    region.__name__ = f"region_{last.name}"
    return region
