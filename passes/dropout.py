"""Computes dropout as PyTorch's eager mode does, and removes dropout with p=0.

Contract
    Same distribution, and the same random numbers as the eager model: on one rank, the loss curve is the eager one.
    Dropout with p=0 is traced as a copy, where eager returns its input: the copy goes, on any device.
    ATen tracing yields `native_dropout`, whose CPU kernel multiplies by a mask of another dtype, twice; eager
    multiplies by scaled noise, once. On other devices `native_dropout` is the fused kernel, and stays.

    rewrite:  out, mask = aten.native_dropout(x, p, True); g = aten.native_dropout_backward(grad, mask, 1 / (1 - p))
    ->        noise = aten.div(aten.bernoulli(x, 1 - p), 1 - p); out = x * noise; g = grad * noise
    rewrite:  y = aten.clone(x); z = f(y)     ->   z = f(x)
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from embrace_fx.passes.rewriter import Rewriter, rewrite_each
from embrace_fx.vocabulary.graph import TrainingGraph
from embrace_fx.vocabulary.in_place import SHARES_MEMORY, same_layout, yields_views

aten = torch.ops.aten


@dataclass(frozen=True)
class EagerDropout:
    """The pass that replaces `native_dropout` on the CPU by the ops that eager mode runs, and removes the `clone` nodes
    that dropout with p=0 leaves.
    """

    def __call__(self, graph: TrainingGraph) -> TrainingGraph:
        return rewrite_each(rewrite_each(graph, _removable_copies, _remove_copy), _dropouts, use_scaled_noise)


def _removable_copies(graph: TrainingGraph) -> list[fx.Node]:
    """Returns the `clone` nodes that can be removed. A node can be removed if it keeps the layout of its input, and if
    neither the node nor a view of it is an output of the graph.
    """
    found = []
    for node in graph.graph.find_nodes(op="call_function", target=aten.clone.default):
        original = node.args[0]
        is_computed = isinstance(original, fx.Node) and original.op == "call_function" and not node.kwargs
        if is_computed and same_layout(original, node) and not _is_returned(node):
            found.append(node)
    return found


def _is_returned(node: fx.Node) -> bool:
    """Returns whether a node's value, or a view of it, is an output of the graph."""
    return any(user.op == "output" or (_is_view(user) and _is_returned(user)) for user in node.users)


def _is_view(node: fx.Node) -> bool:
    """Returns whether a node is a view of its input, or picks one item of its input."""
    is_op = isinstance(node.target, torch._ops.OpOverload)
    return node.target is operator.getitem or (is_op and (node.target in SHARES_MEMORY or yields_views(node.target)))


def _remove_copy(rewriter: Rewriter, node: fx.Node) -> None:
    """Makes the readers of a `clone` node read its input instead, and erases the node."""
    (original,) = node.all_input_nodes
    node.replace_all_uses_with(original)
    rewriter.graph.erase_node(node)


def _dropouts(graph: TrainingGraph) -> list[fx.Node]:
    """Returns the `native_dropout` nodes of a training graph that `use_scaled_noise` can replace."""
    return [
        node
        for node in graph.graph.find_nodes(op="call_function", target=aten.native_dropout.default)
        if node.args[2] is True and 0 < node.args[1] < 1 and _is_replaceable(node)
    ]


def _is_replaceable(node: fx.Node) -> bool:
    """Returns whether a `native_dropout` node runs on the CPU and its mask is read only by the dropout's backward."""
    (value,) = node.all_input_nodes
    readers = [user for item in node.users if item.args[1] == 1 for user in item.users]
    is_on_cpu = value.meta["val"].device.type == "cpu"
    return is_on_cpu and all(user.target is aten.native_dropout_backward.default for user in readers)


def use_scaled_noise(rewriter: Rewriter, node: fx.Node) -> None:
    """Replaces a dropout by a product of its input and noise that is already scaled by 1 / (1 - p), as eager mode
    does.
    """
    value, p = node.args[0], node.args[1]
    assert isinstance(p, float)
    with rewriter.before(node):
        drawn = rewriter.call(aten.bernoulli.p, value, 1 - p, name=f"{node.name}_drawn")
        noise = rewriter.call(aten.div.Tensor, drawn, 1 - p, name=f"{node.name}_noise")
        dropped = rewriter.call(aten.mul.Tensor, value, noise, name=f"{node.name}_out")
    for part in list(node.users):
        assert part.target is operator.getitem
        if part.args[1] == 0:
            part.replace_all_uses_with(dropped)
        else:
            _replace_backwards(rewriter, part, noise)
        rewriter.graph.erase_node(part)
    rewriter.graph.erase_node(node)


def _replace_backwards(rewriter: Rewriter, mask: fx.Node, noise: fx.Node) -> None:
    """Replaces each backward of a dropout, which reads its mask, by a product of the gradient and the scaled noise."""
    for backward in list(mask.users):
        with rewriter.before(backward):
            gradient = rewriter.call(aten.mul.Tensor, backward.args[0], noise, name=f"{backward.name}_scaled")
            # Later nodes may view the gradient, so make it contiguous. The product of a transposed gradient is not.
            traced: Tensor = backward.meta["val"]
            if traced.is_contiguous() and not gradient.meta["val"].is_contiguous():
                name = f"{backward.name}_contiguous"
                gradient = rewriter.call(aten.clone.default, gradient, name=name, memory_format=torch.contiguous_format)
        backward.replace_all_uses_with(gradient)
        rewriter.graph.erase_node(backward)
