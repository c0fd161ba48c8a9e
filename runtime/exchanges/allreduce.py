"""`allreduce`: the whole tensor, zeros included, by the collective of that name."""

from __future__ import annotations

import torch.nn.functional as F

from embrace_fx.runtime.exchanges.blocks import join_blocks
from embrace_fx.runtime.exchanges.channel import Channel
from embrace_fx.runtime.exchanges.gradient import Gradient, RowSet
from embrace_fx.runtime.exchanges.options import ExchangeOptions
from embrace_fx.runtime.exchanges.steps import Steps
from embrace_fx.runtime.exchanges.units import units_of


def exchange(gradient: Gradient, channel: Channel, options: ExchangeOptions) -> Steps[Gradient]:
    """The mean over ranks; the collective sums in the gradient's own type."""
    if not isinstance(gradient, RowSet):
        total = yield channel.all_reduce_(gradient.reshape(-1).clone())
        return (total / channel.world_size).view(gradient.shape)
    marked = units(gradient, options)
    flat = yield channel.all_reduce_(join_blocks(marked, (marked.num_rows * marked.width,)))
    total = flat.view(marked.num_rows, marked.width)
    ids = (total[:, -1] > 0).nonzero().view(-1)
    return RowSet(ids, total[ids, :-1] / channel.world_size, gradient.num_rows)


def units(gradient: Gradient, options: ExchangeOptions) -> RowSet:
    """Cuts a gradient into rows. Rows of a row set get one more column, 1 for a row that is present."""
    if isinstance(gradient, RowSet):
        return RowSet(gradient.ids, F.pad(gradient.rows, (0, 1), value=1.0), gradient.num_rows)
    return units_of(gradient, options)
