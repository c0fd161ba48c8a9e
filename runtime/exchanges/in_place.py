"""Runs exchanges of gradients in place, sequentially, on a separate thread and process group.

Contract
    An exchange has several rounds of collectives with compute in between. Neither the model's thread nor the launcher
    waits for a round: the launcher starts an exchange as one launch. Exchanges match if all ranks start them in the
    same order, because only this thread launches on the group.
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
from embrace_fx.runtime.ranks.worker import FutureWork, Worker


@dataclass(frozen=True)
class Strategy:
    """A way to average all ranks' gradients that gives the same bits on all ranks.

    Attributes:
        mean_parts: exchanges a rank's units, and returns disjoint parts of the mean in any order.
        units: splits a gradient (rows, width) into units, each with an index on the wire.
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
    """How one parameter's gradient is exchanged; equal on all ranks.

    Attributes:
        rows: size of the gradient's first dimension.
        strategy, scheme: a key of `STRATEGY_OF`.
    """

    rows: int
    strategy: str
    scheme: str


def exchange_gradient_(flat: Tensor, kind: ExchangeKind, channel: Channel, cluster: Cluster) -> Tensor:
    """Replaces a gradient with its mean over ranks, in place. Returns after the last round of the exchange.

    Args:
        flat: the gradient, dense (rows * width,) or, if the strategy's units are rows, coalesced COO (rows, width).
            Both layouts send the same messages, so ranks may use different ones.
        cluster: the links that determine block sizes.
    """
    strategy = STRATEGY_OF[kind.strategy, kind.scheme]
    if flat.is_sparse:
        units = RowSet(flat.indices()[0], flat.values(), kind.rows)
        mean = join_parts(run(strategy.mean_parts(units, channel, cluster)), kind.rows)
        return flat.copy_(torch.sparse_coo_tensor(mean.ids.view(1, -1), mean.rows, flat.shape, is_coalesced=True))
    units = strategy.units(flat.view(kind.rows, flat.numel() // max(kind.rows, 1)), cluster)
    for part in run(strategy.mean_parts(units, channel, cluster)):
        write_blocks_(flat, part)  # units in no part are already zero on this rank
    return flat


Exchange = Callable[[Tensor, str, Channel], object]
"""(packed gradient, name of its launch, channel) -> exchanges in place and waits for every round."""


def exchange_at_once(exchange: Exchange, channel: Channel, flat: Tensor, name: str) -> InFlight:
    """Runs an exchange to its end. The result includes the count of bytes sent."""
    sent = _sent_by(exchange, flat, name, channel)
    return InFlight(flat, None, lambda: sent)


def _sent_by(exchange: Exchange, flat: Tensor, name: str, channel: Channel) -> int:
    """Runs an exchange to its end, and returns the bytes sent."""
    before = channel.sent_bytes
    with torch.no_grad():
        exchange(flat, name, channel)
    return channel.sent_bytes - before


class ExchangeThread:
    """Runs exchanges on a thread, in the order in which `start` is called.

    Args:
        group: a process group for this thread only.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._worker, self._channel = Worker("exchanges"), Channel(group)

    def start(self, exchange: Exchange, flat: Tensor, name: str) -> InFlight:
        """Starts an exchange in the background. The bytes sent are known when it has ended."""
        sent = self._worker.submit(partial(_sent_by, exchange, flat, name, self._channel))
        return InFlight(flat, FutureWork(sent), sent.wait)
