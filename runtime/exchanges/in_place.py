"""Runs exchanges of gradients in place, one after the other, on their own thread and process group.

Contract
    An exchange takes several rounds of collectives, between which its rank computes. Neither the model's thread nor the
    launcher waits for a round: the launcher starts an exchange in its turn, as one launch. Exchanges that all ranks
    start in the same order match, because only this thread launches on its group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from embrace_fx.cost.links import Cluster
from embrace_fx.runtime.exchanges import allgather, hierarchical, omnireduce, ps, zen
from embrace_fx.runtime.exchanges.blocks import cut_rows, write_blocks_
from embrace_fx.runtime.exchanges.channel import Channel, Steps, run
from embrace_fx.runtime.exchanges.gradient import RowSet, join_parts
from embrace_fx.runtime.ranks.communicator import InFlight
from embrace_fx.runtime.ranks.worker import Ending, Worker


@dataclass(frozen=True)
class Strategy:
    """A way to compute the mean of all ranks' gradients, with the same bits on all of them.

    Attributes:
        mean_parts: exchanges a rank's units, and returns disjoint parts of the mean in any order.
        units: cuts a gradient (rows, width) into units, each of which has an index on the wire.
    """

    mean_parts: Callable[[RowSet, Channel, Cluster], Steps[list[RowSet]]]
    units: Callable[[Tensor, Cluster], RowSet] = cut_rows


STRATEGY_OF: Mapping[tuple[str, str], Strategy] = {
    ("allgather", ""): Strategy(allgather.mean_parts),
    ("omnireduce", ""): Strategy(omnireduce.mean_parts, omnireduce.units),
    ("zen", "balanced"): Strategy(zen.mean_parts),
    ("zen", "hierarchical"): Strategy(hierarchical.mean_parts),
    ("ps", ""): Strategy(ps.mean_parts),
}
"""(name in `embrace_fx.plan.EXCHANGES`, scheme) -> strategy."""


@dataclass(frozen=True)
class ExchangeKind:
    """The kind of exchange of one parameter's gradient, equal on all ranks.

    Attributes:
        rows: size of the gradient's first dimension.
        strategy, scheme: a key of `STRATEGY_OF`.
    """

    rows: int
    strategy: str
    scheme: str


def exchange_gradient_(flat: Tensor, kind: ExchangeKind, channel: Channel, cluster: Cluster) -> Tensor:
    """Replaces a gradient by its mean over ranks, in place; waits for every round.

    Args:
        flat: (rows * width,); or (rows, width) COO, coalesced, where the strategy's units are rows: both layouts send
            the same, so that ranks may differ.
        cluster: the links for which blocks are cut.
    """
    strategy = STRATEGY_OF[kind.strategy, kind.scheme]
    if flat.is_sparse:
        units = RowSet(flat.indices()[0], flat.values(), kind.rows)
        mean = join_parts(run(strategy.mean_parts(units, channel, cluster)), kind.rows)
        return flat.copy_(torch.sparse_coo_tensor(mean.ids.view(1, -1), mean.rows, flat.shape, is_coalesced=True))
    units = strategy.units(flat.view(kind.rows, flat.numel() // max(kind.rows, 1)), cluster)
    for part in run(strategy.mean_parts(units, channel, cluster)):
        write_blocks_(flat, part)  # units in no part are zero on this rank already
    return flat


Exchange = Callable[[Tensor, str, Channel], object]
"""Function (packed gradient, name of its launch, channel) that exchanges in place and waits for every round."""


def exchange_at_once(exchange: Exchange, channel: Channel, flat: Tensor, name: str) -> InFlight:
    """Runs an exchange to its end; the result knows the bytes sent."""
    sent = _sent_by(exchange, flat, name, channel)
    return InFlight(flat, None, lambda: sent)


def _sent_by(exchange: Exchange, flat: Tensor, name: str, channel: Channel) -> int:
    """Runs an exchange to its end; returns the bytes sent."""
    before = channel.sent_bytes
    with torch.no_grad():
        exchange(flat, name, channel)
    return channel.sent_bytes - before


class ExchangeThread:
    """Runs exchanges in the order in which they are started.

    Args:
        group: a process group that nothing else uses.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._worker, self._channel = Worker("exchanges"), Channel(group)

    def start(self, exchange: Exchange, flat: Tensor, name: str) -> InFlight:
        """Starts an exchange in the background; the bytes sent are known when it has ended."""
        sent = self._worker.submit(partial(_sent_by, exchange, flat, name, self._channel))
        return InFlight(flat, Ending(sent), sent.wait)
