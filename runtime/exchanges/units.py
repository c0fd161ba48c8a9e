"""Gradients by rows or by elements: the units that have an index of their own on the wire."""

from __future__ import annotations

from torch import Tensor

from embrace_fx.runtime.exchanges.blocks import cut_blocks, join_blocks
from embrace_fx.runtime.exchanges.gradient import Gradient, RowSet
from embrace_fx.runtime.exchanges.options import ExchangeOptions


def row_width(dense: Tensor) -> int:
    """Elements of one index of the first dimension."""
    return max(1, dense.shape[1:].numel())


def units_of(gradient: Gradient, options: ExchangeOptions) -> RowSet:
    """A row set as it is; of a dense gradient the non-zero rows or elements."""
    if isinstance(gradient, RowSet):
        return gradient
    return cut_blocks(gradient, row_width(gradient) if options.unit == "row" else 1)


def restore(mean: RowSet, gradient: Gradient) -> Gradient:
    """Inverse of `units_of`, as dense as the gradient was."""
    return mean if isinstance(gradient, RowSet) else join_blocks(mean, gradient.shape)
