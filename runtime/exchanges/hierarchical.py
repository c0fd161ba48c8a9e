"""Hierarchical centralisation: recursive doubling over sparse sets, for any number of ranks (SparCML; Zen's HC).

    N = 4:  0 <-> 1, 2 <-> 3;  then  0 <-> 2, 1 <-> 3
    N = 6:  4 -> 0, 5 -> 1;  then as N = 4;  then  0 -> 4, 1 -> 5

Sets grow as ranks join them: it wins where start-ups are dear, or ranks' units mostly the same.
"""

from __future__ import annotations

from statistics import fmean

import torch

from embrace_fx.runtime.exchanges.channel import Channel
from embrace_fx.runtime.exchanges.gradient import RowSet, mean_by_id
from embrace_fx.runtime.exchanges.prediction import Prediction, Sparsity, prediction
from embrace_fx.runtime.exchanges.rounds import COUNT_BYTES, send
from embrace_fx.runtime.exchanges.steps import Steps


def mean_by_doubling(units: RowSet, channel: Channel) -> Steps[RowSet]:
    """The mean of all ranks' units. Partial sums travel in the units' own type."""
    rank, paired = channel.rank, _paired_ranks(channel.world_size)
    extra = channel.world_size - paired
    above, below = rank + paired, rank - paired
    total = units
    if extra:
        folded = yield from _swap(total, below if rank >= paired else None, above if rank < extra else None, channel)
        total = _sum(total, folded)
    distance = 1
    while distance < paired:
        partner = rank ^ distance if rank < paired else None
        theirs = yield from _swap(total, partner, partner, channel)
        # The lower rank's first, on both sides.
        total = _sum(theirs, total) if rank & distance else _sum(total, theirs)
        distance *= 2
    if extra:
        received = yield from _swap(total, above if rank < extra else None, below if rank >= paired else None, channel)
        total = received if rank >= paired else total
    return RowSet(total.ids, total.rows / channel.world_size, total.num_rows)


def _paired_ranks(world_size: int) -> int:
    """The largest power of two of ranks; the others hand their units in and get the result."""
    return 1 << (world_size.bit_length() - 1)


def _sum(first: RowSet, second: RowSet) -> RowSet:
    ids, rows = torch.cat([first.ids, second.ids]), torch.cat([first.rows, second.rows])
    return mean_by_id(ids, rows, [first.ids.numel(), second.ids.numel()], first.num_rows, divisor=1)


def _swap(units: RowSet, to: int | None, source: int | None, channel: Channel) -> Steps[RowSet]:
    """Sends the units to one rank, returns what another one sent; an empty set where there is none."""
    world = range(channel.world_size)
    count = units.ids.numel()
    own = torch.full((int(to is not None),), count, device=units.ids.device)
    announced = yield channel.all_to_all(own, [int(r == to) for r in world], [int(r == source) for r in world])
    theirs = int(announced.sum())
    sent = units if to is not None else RowSet(units.ids[:0], units.rows[:0], units.num_rows)
    send_counts = [count if r == to else 0 for r in world]
    receive_counts = [theirs if r == source else 0 for r in world]
    ids, rows, _ = yield from send(sent, send_counts, receive_counts, channel)
    return RowSet(ids, rows, units.num_rows)


def predict(sparsity: Sparsity) -> Prediction:
    """sum over rounds of 8 + U(k) (i + s) bytes, U(k) the union of the k ranks that are one by then."""
    world_size = sparsity.world_size
    paired = _paired_ranks(world_size)
    extra = world_size - paired

    def sent_bytes(units: float) -> float:
        return COUNT_BYTES + units * sparsity.record_bytes

    def largest_union(ranks: int) -> float:
        """As if unions grew in proportion to the units of the ranks that have most."""
        of_most = fmean(sorted(sparsity.units_by_rank)[-ranks:]) / max(sparsity.mean_units, 1.0)
        return min(sparsity.union, sparsity.unions[ranks - 1] * of_most)

    mean = critical = 0.0
    distance = 1
    while distance < paired:
        # Groups of so many neighbours are one by now, with the ranks that handed in their units.
        sizes = [distance + max(0, min(distance, extra - first)) for first in range(0, paired, distance)]
        unions = [sent_bytes(sparsity.unions[size - 1]) for size in sizes]
        mean += fmean(unions) * paired / world_size
        critical += sent_bytes(largest_union(max(sizes)))
        distance *= 2
    rounds = distance.bit_length() - 1
    if extra:
        result = sent_bytes(sparsity.union)
        mean += (sent_bytes(sparsity.mean_units) + result) * extra / world_size
        critical += sent_bytes(largest_union(1)) + result
        rounds += 2
    return prediction(mean, critical, 2 * rounds)
