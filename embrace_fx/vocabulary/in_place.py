"""Finds ops of a functional graph that may overwrite an input with their result, as eager in-place code would.

A pointwise op may write into its first input if no other node reads that memory: an op of this phase allocated it, this
op is its only user, and the result has the same shape, dtype and strides.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

aten = torch.ops.aten

IN_PLACE: dict[Any, Any] = {
    aten.add.Tensor: aten.add_.Tensor,
    aten.mul.Tensor: aten.mul_.Tensor,
    aten.div.Tensor: aten.div_.Tensor,
    aten.sub.Tensor: aten.sub_.Tensor,
}
"""Op -> its in-place form."""

_COMMUTE = (aten.add.Tensor, aten.mul.Tensor)
SHARES_MEMORY = (aten._unsafe_view.default, aten.reshape.default, aten.lift_fresh_copy.default)
"""Ops that may return their input's memory although their schema does not say so."""


def overwritten_argument(node: fx.Node) -> int | None:
    """Returns the position of the argument whose memory a node's result may overwrite, or None if the result needs new
    memory.
    """
    if node.target not in IN_PLACE:
        return None
    for position in (0, 1) if node.target in _COMMUTE and not node.kwargs else (0,):
        source = node.args[position]
        if isinstance(source, fx.Node) and _is_read_once(source) and same_layout(source, node):
            return position
    return None


@functools.cache
def yields_views(op: OpOverload) -> bool:
    """Returns whether an op returns a view of an input."""
    returns = op._schema.returns
    return bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write


def _is_read_once(node: fx.Node) -> bool:
    """Returns whether only one node reads a node's value, and no other value shares its memory."""
    return len(node.users) == 1 and _owns_memory(node)


def _owns_memory(node: fx.Node) -> bool:
    """Returns whether a node's value has its own memory, rather than being an input or a view."""
    target = node.target
    if not isinstance(target, OpOverload) or target.namespace != "aten" or target in SHARES_MEMORY:
        return False
    returns = target._schema.returns
    return len(returns) == 1 and returns[0].alias_info is None


def same_layout(one: fx.Node, other: fx.Node) -> bool:
    """Returns whether two values have the same shape, dtype and strides."""
    a, b = one.meta.get("val"), other.meta.get("val")
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.dtype != b.dtype:
        return False
    # Compare sizes as text, because a comparison of symbolic sizes would add guards.
    return str((tuple(a.shape), a.stride())) == str((tuple(b.shape), b.stride()))
