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
    """Sends each rank a part of this rank's units (rows or blocks) over a channel. Returns the ids and values of the
    units received, in rank order, and the number of units received from each rank.

    Args:
        units: the units, sorted by the rank to which they are sent.
        counts: (N,) int64, the number of units for each rank.
    """
    announced = yield channel.all_to_all_equal(counts)
    own: list[int] = counts.tolist()
    theirs: list[int] = announced.tolist()
    return (yield from send_units(units, own, theirs, channel))


def send_units(
    units: RowSet, send_counts: Sequence[int], receive_counts: list[int], channel: Channel
) -> Steps[Records]:
    """Does the same as `push_units`, if each rank already knows how many units it receives from every other rank.

    Args:
        units: the units, sorted by the rank to which they are sent.
        send_counts: the number of units to send to each rank.
        receive_counts: the number of units to receive from each rank.
    """
    records = encode_records(units.ids, units.rows, units.num_rows)
    size = records.shape[1]
    flat = yield channel.all_to_all(
        records.view(-1), [size * count for count in send_counts], [size * count for count in receive_counts]
    )
    ids, rows = decode_records(flat, units.num_rows, units.width, units.rows.dtype)
    return ids, rows, receive_counts


def gather_units(units: RowSet, channel: Channel) -> Steps[Records]:
    """Gathers the units (rows or blocks) of all ranks on every rank, over a channel. Returns the units' ids and values,
    in rank order, and the number of units of each rank.
    """
    count = torch.tensor([units.ids.numel()], device=units.ids.device)
    announced = yield channel.all_gather(count, [1] * channel.world_size)
    counts: list[int] = announced.tolist()
    records = encode_records(units.ids, units.rows, units.num_rows)
    flat = yield channel.all_gather(records.view(-1), [records.shape[1] * count for count in counts])
    ids, rows = decode_records(flat, units.num_rows, units.width, units.rows.dtype)
    return ids, rows, counts
