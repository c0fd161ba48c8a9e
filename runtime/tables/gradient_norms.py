"""Norms of the gradients of sharded tables, of which one reduction over the ranks gives several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from embrace_fx.runtime.tables.part_layout import Layout


class _Gradient(Protocol):
    """A rank's part of a gradient."""

    layout: Layout

    def own_norm(self, order: float) -> Tensor: ...


def whole_norms(asked: Sequence[_Gradient], order: float) -> list[Tensor]:
    """Norms of tables, of each rank's parts of them."""
    first = asked[0]
    own = [held.own_norm(order) for held in asked]
    if first.layout.is_alone:
        return own
    if abs(order) == float("inf"):
        return _together(first, own, dist.ReduceOp.MAX if order > 0 else dist.ReduceOp.MIN)
    if order == 0:
        return _together(first, own, dist.ReduceOp.SUM)
    return [total.pow(1.0 / order) for total in _together(first, [norm.pow(order) for norm in own], dist.ReduceOp.SUM)]


def _together(held: _Gradient, values: Sequence[Tensor], reduce_op: dist.ReduceOp.RedOpType) -> list[Tensor]:
    """Numbers reduced at once, in the widest of their types."""
    widest = max((value.dtype for value in values), key=lambda dtype: dtype.itemsize)
    joined = torch.stack([value.to(widest) for value in values])
    held.layout.reduce(joined, reduce_op, "" if joined.is_cuda else "norm")
    return [total.to(value.dtype) for total, value in zip(joined.unbind(), values, strict=True)]
