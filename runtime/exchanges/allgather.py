"""`allgather`: every rank gets every rank's non-zero units and adds them up, as Horovod and DDP do.

Units are coalesced before, so none is sent twice by a rank; but N ranks that have the same unit send it N times.
"""

from __future__ import annotations

from embrace_fx.runtime.exchanges.channel import Channel
from embrace_fx.runtime.exchanges.gradient import Gradient, RowSet, mean_by_id
from embrace_fx.runtime.exchanges.options import ExchangeOptions
from embrace_fx.runtime.exchanges.rounds import gather
from embrace_fx.runtime.exchanges.steps import Steps
from embrace_fx.runtime.exchanges.units import restore, units_of

units = units_of


def exchange(gradient: Gradient, channel: Channel, options: ExchangeOptions) -> Steps[Gradient]:
    """The mean over ranks. Every rank adds in the order of ranks, so that all have the same bits."""
    (mean,) = yield from mean_parts(units_of(gradient, options), channel, options)
    return restore(mean, gradient)


def mean_parts(own: RowSet, channel: Channel, _options: ExchangeOptions) -> Steps[list[RowSet]]:
    """The mean of all ranks' units, in one part."""
    ids, rows, counts = yield from gather(own, channel)
    return [mean_by_id(ids, rows, counts, own.num_rows, channel.world_size)]
