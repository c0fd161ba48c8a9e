"""`ps`: a parameter server on the ranks themselves, each serving an even range of consecutive units.

What BytePS and Parallax do with sparse gradients, on the same links as the other strategies: push to the range's
server, add up there, pull by everyone. Ranges are even in units, not in traffic: where ids are skewed, as words sorted
by frequency are, the server of the first range is the bottleneck (Zen, OSDI 2025, measures over 60 % of the non-zeros
in the first of 8).
"""

from __future__ import annotations

import torch

from embrace_fx.runtime.exchanges.channel import Channel
from embrace_fx.runtime.exchanges.gradient import Gradient, RowSet, mean_by_id
from embrace_fx.runtime.exchanges.options import Options
from embrace_fx.runtime.exchanges.prediction import (
    Prediction,
    Sparsity,
    even_ranges,
    prediction,
    pull_bytes,
    push_bytes,
)
from embrace_fx.runtime.exchanges.rounds import COUNT_BYTES, gather, push
from embrace_fx.runtime.exchanges.steps import Steps
from embrace_fx.runtime.exchanges.units import restore, units_of

units = units_of


def exchange(gradient: Gradient, channel: Channel, options: Options) -> Steps[Gradient]:
    """The mean over ranks, each unit's computed by its server."""
    own = units_of(gradient, options)
    starts = torch.tensor([*even_ranges(own.num_rows, channel.world_size), own.num_rows], device=own.ids.device)
    ids, rows, counts = yield from push(own, torch.searchsorted(own.ids, starts).diff(), channel)
    served = mean_by_id(ids, rows, counts, own.num_rows, channel.world_size)
    # Ranges ascend with ranks, so the servers' units one after the other ascend too.
    ids, rows, _ = yield from gather(served, channel)
    return restore(RowSet(ids, rows, own.num_rows), gradient)


def predict(sparsity: Sparsity, options: Options) -> Prediction:
    """(N-1)/N (u + U) (i + s) bytes and 16 (N-1) of counts; the fullest range's server sends and receives its share."""
    del options
    others = sparsity.world_size - 1
    pushed, push_critical = push_bytes(sparsity, sparsity.record_bytes, sparsity.push_imbalance)
    pulled, pull_critical = pull_bytes(sparsity, sparsity.record_bytes, sparsity.pull_imbalance)
    counts = 2 * others * COUNT_BYTES
    return prediction(counts + pushed + pulled, counts + push_critical + pull_critical, 4 * others)
