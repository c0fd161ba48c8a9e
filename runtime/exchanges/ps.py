"""Strategy `ps`: parameter servers on the ranks, each for an equal range of consecutive units (rows).

Like BytePS and Parallax with sparse gradients, on the same links as the other strategies: ranks push units to the
range's server, which sums them, and all ranks pull the sums. Ranges are even in units but not in traffic. For skewed
ids, such as words sorted by frequency, the server of the first range is the bottleneck (Zen, OSDI 2025, measures over
60 % of the non-zeros in the first of 8).
"""

from __future__ import annotations

import torch

from embrace_fx.cost.links import Cluster
from embrace_fx.cost.sparsity import range_starts
from embrace_fx.runtime.exchanges.channel import Channel, Steps
from embrace_fx.runtime.exchanges.gradient import RowSet, mean_by_id
from embrace_fx.runtime.exchanges.rounds import gather_units, push_units


def mean_parts(own: RowSet, channel: Channel, _cluster: Cluster) -> Steps[list[RowSet]]:
    """Averages sparse gradients over ranks. Each rank is a parameter server for a range of rows. Returns the mean as
    one set of rows from each server.

    Args:
        own: the rows of this rank's gradient.
        channel: sends the messages.
    """
    starts = torch.tensor([*range_starts(own.num_rows, channel.world_size), own.num_rows], device=own.ids.device)
    ids, rows, counts = yield from push_units(own, torch.searchsorted(own.ids, starts).diff(), channel)
    served = mean_by_id(ids, rows, counts, own.num_rows, channel.world_size)
    ids, rows, counts = yield from gather_units(served, channel)
    return [RowSet(*part, own.num_rows) for part in zip(ids.split(counts), rows.split(counts), strict=True)]
