"""Hierarchical centralization: recursive doubling over sparse sets of rows, for any number of ranks (SparCML; Zen's
HC).

    N = 4:  0 <-> 1, 2 <-> 3;  then  0 <-> 2, 1 <-> 3
    N = 6:  4 -> 0, 5 -> 1;  then as N = 4;  then  0 -> 4, 1 -> 5

Sets grow in each round. The scheme is fastest if latency is high, or if ranks have mostly the same units.
"""

from __future__ import annotations

import torch

from embrace_fx.cost.exchanges import power_of_two_below
from embrace_fx.cost.links import Cluster
from embrace_fx.runtime.exchanges.channel import Channel, Steps
from embrace_fx.runtime.exchanges.gradient import RowSet, mean_by_id
from embrace_fx.runtime.exchanges.rounds import send_units


def mean_parts(units: RowSet, channel: Channel, _cluster: Cluster) -> Steps[list[RowSet]]:
    """Averages sparse gradients over ranks by recursive doubling. Partial sums are sent in the gradients' dtype.
    Returns the mean as a list of one set of rows.

    Args:
        units: the rows of this rank's gradient.
        channel: sends the messages.
    """
    rank, paired = channel.rank, power_of_two_below(channel.world_size)
    extra = channel.world_size - paired
    above, below = rank + paired, rank - paired
    total = units
    if extra:
        folded = yield from _exchange_with(
            total, below if rank >= paired else None, above if rank < extra else None, channel
        )
        total = _sum_row_sets(total, folded)
    distance = 1
    while distance < paired:
        partner = rank ^ distance if rank < paired else None
        theirs = yield from _exchange_with(total, partner, partner, channel)
        # Both ranks add the lower rank's rows first, so that they get the same bits.
        total = _sum_row_sets(theirs, total) if rank & distance else _sum_row_sets(total, theirs)
        distance *= 2
    if extra:
        received = yield from _exchange_with(
            total, above if rank < extra else None, below if rank >= paired else None, channel
        )
        total = received if rank >= paired else total
    return [RowSet(total.ids, total.rows / channel.world_size, total.num_rows)]


def _sum_row_sets(first: RowSet, second: RowSet) -> RowSet:
    """Returns the sum of two sets of rows, with each id once. Rows of `first` are added before those of `second`."""
    ids, rows = torch.cat([first.ids, second.ids]), torch.cat([first.rows, second.rows])
    return mean_by_id(ids, rows, [first.ids.numel(), second.ids.numel()], first.num_rows, divisor=1)


def _exchange_with(units: RowSet, to: int | None, source: int | None, channel: Channel) -> Steps[RowSet]:
    """Exchanges units (rows or blocks) with other ranks over a channel. Returns the units received.

    Args:
        units: the units to send.
        to: the rank to send to, or None to send nothing.
        source: the rank to receive from, or None to receive nothing.
        channel: sends the messages.
    """
    world = range(channel.world_size)
    count = units.ids.numel()
    own = torch.full((int(to is not None),), count, device=units.ids.device)
    announced = yield channel.all_to_all(own, [int(r == to) for r in world], [int(r == source) for r in world])
    theirs = int(announced.sum())
    sent = units if to is not None else RowSet(units.ids[:0], units.rows[:0], units.num_rows)
    send_counts = [count if r == to else 0 for r in world]
    receive_counts = [theirs if r == source else 0 for r in world]
    ids, rows, _ = yield from send_units(sent, send_counts, receive_counts, channel)
    return RowSet(ids, rows, units.num_rows)
