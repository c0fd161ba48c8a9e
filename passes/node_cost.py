"""Estimates the compute time of a node that has not been measured, from its FLOPs and the bytes that it reads and
writes.

FLOPs come from torch's own counter (`torch.utils.flop_counter`), where a user's op can register a formula
(`register_flop_formula`). For ops without a formula, only the bytes count. Views cost nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

import embrace_fx.vocabulary.rnn_ops  # noqa: F401  (declares the ops)
from embrace_fx.cost import links as cost
from embrace_fx.vocabulary.in_place import SHARES_MEMORY, yields_views
from embrace_fx.vocabulary.ops import op_name
from embrace_fx.vocabulary.sizes import NOTHING_EXPECTED, ExpectedSizes

Formula = Callable[..., float]

NodeMs = Callable[[fx.Node], float]
"""Returns the milliseconds of a node."""

ELEMENT_BYTES = 4

_COMPUTES = frozenset({"mm", "addmm", "bmm", "baddbmm", "conv", "rnn", "lstm", "gru", "attention"})
"""Words in the names of matrix products and convolutions."""


_LOOKUPS = frozenset(
    {"aten::embedding", "aten::_embedding_bag", "aten::_embedding_bag_forward_only", "embrace::lookup"}
)
"""Ops that read rows of their first input, by ids that are their second."""


def node_time_estimator(compute: cost.Compute, expected: ExpectedSizes = NOTHING_EXPECTED) -> NodeMs:
    """Returns a function that estimates a node's milliseconds on a processor of speed `compute`, and caches each
    estimate.

    Args:
        expected: the expected values of data-dependent sizes.
    """
    return functools.cache(lambda node: node_ms(node, compute, expected))


def node_ms(node: fx.Node, compute: cost.Compute, expected: ExpectedSizes = NOTHING_EXPECTED) -> float:
    """Estimates the milliseconds of one node on a processor of speed `compute`.

    Args:
        expected: expected values of data-dependent sizes.
    """
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload) or _is_view(node.target):
        return 0.0
    inputs = [_expected_shape(n.meta.get("val"), expected) for n in node.all_input_nodes]
    if op_name(node) in _LOOKUPS:
        (rows, *width), ids, *_ = inputs
        inputs[0] = [min(rows, prod(ids)), *width]
    outputs = [_expected_shape(v, expected) for v in pytree.tree_leaves(node.meta.get("val"))]
    moved = sum(prod(shape) for shape in (*inputs, *outputs) if shape) * ELEMENT_BYTES
    return compute.time_ms(flops(node, expected), moved)


def _is_view(op: torch._ops.OpOverload) -> bool:
    """Returns whether an op returns a view of its input, or the input itself."""
    return op in SHARES_MEMORY or op is torch.ops.embrace.defer_bucket.default or yields_views(op)


def flops(node: fx.Node, expected: ExpectedSizes = NOTHING_EXPECTED) -> float:
    """Returns a node's FLOPs, or 0 for ops without a formula.

    Args:
        expected: expected values of data-dependent sizes.
    """
    assert isinstance(node.target, torch._ops.OpOverload)
    formula = _formula(node)
    if formula is None:
        return 0.0

    def sized(leaf: Any) -> Any:
        """Returns a meta tensor of the expected sizes for a tensor, or for a node whose value is a tensor."""
        value = leaf.meta.get("val") if isinstance(leaf, fx.Node) else leaf
        return torch.empty(_expected_shape(value, expected), device="meta") if isinstance(value, Tensor) else value

    args, kwargs = pytree.tree_map(sized, (node.args, dict(node.kwargs)))
    return float(formula(*args, **kwargs, out_val=pytree.tree_map(sized, node.meta.get("val"))))


def is_heavy(node: fx.Node) -> bool:
    """Returns whether a node computes long enough that independent communication should be launched before it.

    True for ops that have a FLOP formula, and for ops whose name contains an entry of `_COMPUTES`.
    """
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    name = op_name(node).split("::")[-1]
    words = name.replace(".", "_").split("_")
    return _formula(node) is not None or any(word in _COMPUTES for word in words) or name.startswith("conv")


def _formula(node: fx.Node) -> Formula | None:
    """Returns the function that computes a node's FLOPs, or None if there is none for its op."""
    assert isinstance(node.target, torch._ops.OpOverload)
    packet = node.target.overloadpacket
    return _OWN.get(packet) or flop_registry.get(packet)


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> float:
    """Returns the FLOPs of scaled dot-product attention on these inputs. Further arguments of the op are ignored."""
    return float(sdpa_flop_count(query.shape, key.shape, value.shape))


def _attention_backward_flops(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> float:
    """Returns the FLOPs of the backward of scaled dot-product attention, for the gradient `grad` of its output. Further
    arguments of the op are ignored.
    """
    return float(sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape))


def _rnn_layer_flops(
    input: Tensor, h0: Tensor, c0: Tensor | None, weights: Sequence[Tensor], *_: Any, **__: Any
) -> float:
    """Returns the FLOPs of the op `rnn_layer` on these inputs: two for each element of its weight matrices and each
    position of the input. Biases and further arguments of the op are ignored.
    """
    return 2.0 * input.shape[:-1].numel() * sum(weight.numel() for weight in weights if weight.dim() > 1)


def _rnn_layer_backward_flops(_o: Any, _h: Any, _c: Any, *arguments: Any, **__: Any) -> float:
    """Returns the FLOPs of the op `rnn_layer_backward`: twice those of `rnn_layer`, whose arguments are `arguments`,
    because gradients of both inputs and weights are computed. The gradients of its three results are ignored.
    """
    return 2.0 * _rnn_layer_flops(*arguments)


_OWN: dict[Any, Formula] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
    torch.ops.embrace.rnn_layer: _rnn_layer_flops,
    torch.ops.embrace.rnn_layer_backward: _rnn_layer_backward_flops,
}
"""FLOP formulas of ops that torch's counter lacks."""


def _expected_shape(value: Any, expected: ExpectedSizes) -> list[int]:
    """Returns the expected sizes of a tensor, or an empty list for any other value."""
    return [expected.number(size) for size in tuple(value.shape)] if isinstance(value, Tensor) else []
