"""Rounds that several strategies use: sending units (rows or blocks) to servers, and gathering units on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from embrace_fx.runtime.exchanges.channel import Channel, Steps
from embrace_fx.runtime.exchanges.gradient import RowSet
from embrace_fx.runtime.exchanges.record_codec import decode_records, encode_records

Records = tuple[Tensor, Tensor, list[int]]
"""(ids (K,), rows (K, d), number of rows of each rank), in rank order."""


def push_units(units: RowSet, counts: Tensor, channel: Channel) -> Steps[Records]:
    """Sends `counts[r]` consecutive units (rows or blocks) to each rank r over a channel. Returns the ids and values of
    the units received, in rank order, and their number by rank.

    Args:
        units: the units, sorted by the rank that gets them.
        counts: (N,) int64, how many units each rank gets.
    """
    announced = yield channel.all_to_all_equal(counts)
    own: list[int] = counts.tolist()
    theirs: list[int] = announced.tolist()
    return (yield from send_units(units, own, theirs, channel))


def send_units(
    units: RowSet, send_counts: Sequence[int], receive_counts: list[int], channel: Channel
) -> Steps[Records]:
    """Sends units (rows or blocks) to all ranks over a channel, and returns those received, like `push_units`. The
    numbers of units are already known to sender and receiver.

    Args:
        units: the units, sorted by the rank that gets them.
        send_counts, receive_counts: the numbers of units for each rank, and from each rank.
    """
    records = encode_records(units.ids, units.rows, units.num_rows)
    size = records.shape[1]
    flat = yield channel.all_to_all(
        records.view(-1), [size * count for count in send_counts], [size * count for count in receive_counts]
    )
    ids, rows = decode_records(flat, units.num_rows, units.width, units.rows.dtype)
    return ids, rows, receive_counts


def gather_units(units: RowSet, channel: Channel) -> Steps[Records]:
    """Gathers the units (rows or blocks) of all ranks on every rank, over a channel. Returns their ids and values, in
    rank order, and their number by rank.
    """
    count = torch.tensor([units.ids.numel()], device=units.ids.device)
    announced = yield channel.all_gather(count, [1] * channel.world_size)
    counts: list[int] = announced.tolist()
    records = encode_records(units.ids, units.rows, units.num_rows)
    flat = yield channel.all_gather(records.view(-1), [records.shape[1] * count for count in counts])
    ids, rows = decode_records(flat, units.num_rows, units.width, units.rows.dtype)
    return ids, rows, counts
