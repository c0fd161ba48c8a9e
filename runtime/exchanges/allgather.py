"""Strategy `allgather`: each rank gathers and sums the non-zero units (rows) of all ranks, as Horovod and DDP do.

Units are coalesced first, so that no rank sends one twice. N ranks with the same unit still send it N times.
"""

from __future__ import annotations

from embrace_fx.cost.links import Cluster
from embrace_fx.runtime.exchanges.channel import Channel, Steps
from embrace_fx.runtime.exchanges.gradient import RowSet, mean_by_id
from embrace_fx.runtime.exchanges.rounds import gather_units


def mean_parts(own: RowSet, channel: Channel, _cluster: Cluster) -> Steps[list[RowSet]]:
    """Averages sparse gradients over ranks. Gathers the rows of all ranks, and sums them in rank order, so that all
    ranks get the same bits. Returns the mean as a list of one set of rows.

    Args:
        own: the rows of this rank's gradient.
        channel: sends the messages.
    """
    ids, rows, counts = yield from gather_units(own, channel)
    return [mean_by_id(ids, rows, counts, own.num_rows, channel.world_size)]
