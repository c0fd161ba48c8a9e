"""Runs sparse exchanges of gradients in place, one after another, on a separate thread and process group.

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
from embrace_fx.runtime.exchanges.channel import Channel, Steps, run_exchange
from embrace_fx.runtime.exchanges.gradient import RowSet, join_parts
from embrace_fx.runtime.exchanges.rounded import sum_rounded_
from embrace_fx.runtime.ranks.communicator import Communicator, InFlight
from embrace_fx.runtime.ranks.wire_rounding import Rounding
from embrace_fx.runtime.ranks.worker import FutureWork, Worker
from embrace_fx.vocabulary.plan import Plan


@dataclass(frozen=True)
class Strategy:
    """An algorithm by which ranks average a gradient. All ranks get the same bits.

    Attributes:
        mean_parts: averages this rank's units with those of the other ranks. Returns the mean as disjoint sets of
            units.
        units: splits a gradient (rows, width) into units, which are its non-zero rows or blocks, each with an index.
    """

    mean_parts: Callable[[RowSet, Channel, Cluster], Steps[list[RowSet]]]
    units: Callable[[Tensor, Cluster], RowSet] = cut_rows


STRATEGY_OF: Mapping[tuple[str, str], Strategy] = {
    ("allgather", ""): Strategy(allgather.mean_parts),
    ("omnireduce", ""): Strategy(omnireduce.mean_parts, omnireduce.nonzero_blocks),
    ("zen", "balanced"): Strategy(zen.mean_parts),
    ("zen", "hierarchical"): Strategy(hierarchical.mean_parts),
    ("ps", ""): Strategy(ps.mean_parts),
}
"""(name in `embrace_fx.plan.EXCHANGES`, scheme) -> strategy."""


@dataclass(frozen=True)
class ExchangeKind:
    """Describes how one parameter's gradient is exchanged. Equal on all ranks.

    Attributes:
        rows: the size of the gradient's first dimension.
        strategy, scheme: the key of the strategy in `STRATEGY_OF`.
    """

    rows: int
    strategy: str
    scheme: str


def exchange_gradient_(flat: Tensor, kind: ExchangeKind, channel: Channel, cluster: Cluster) -> Tensor:
    """Replaces a gradient by its mean over ranks, in place, and returns it. Blocks until the exchange has ended.

    Args:
        flat: the gradient, as a dense tensor (rows * width,). If the strategy's units are rows, it may also be a
            coalesced COO tensor (rows, width). Both layouts send the same messages, so ranks may use different layouts.
        kind: how the gradient is exchanged.
        channel: sends the messages.
        cluster: the links, from which the block size follows.
    """
    strategy = STRATEGY_OF[kind.strategy, kind.scheme]
    if flat.is_sparse:
        units = RowSet(flat.indices()[0], flat.values(), kind.rows)
        mean = join_parts(run_exchange(strategy.mean_parts(units, channel, cluster)), kind.rows)
        return flat.copy_(torch.sparse_coo_tensor(mean.ids.view(1, -1), mean.rows, flat.shape, is_coalesced=True))
    units = strategy.units(flat.view(kind.rows, flat.numel() // max(kind.rows, 1)), cluster)
    for part in run_exchange(strategy.mean_parts(units, channel, cluster)):
        write_blocks_(flat, part)  # units that are in none of the parts are zero on this rank already
    return flat


Exchange = Callable[[Tensor, str, Channel], object]
"""(packed gradient, name of its launch, channel) -> exchanges in place and waits for every round."""


def create_exchanges(
    plan: Plan, parameter: Callable[[str], Tensor], communicator: Communicator, *, at_once: bool
) -> dict[int, Callable[[Tensor, str], InFlight]]:
    """Creates the exchanges of all buckets that are not AllReduced. Returns a map from the index of each bucket to the
    function that starts its exchange. Collective.

    Args:
        plan: the plan, which has the buckets and strategies.
        parameter: function that returns a parameter by its name.
        at_once: whether each function runs its exchange to the end, instead of starting it on a thread.
    """
    made = [_create_exchange(plan, name, parameter(name), communicator.rounding) for name, *_ in plan.buckets]
    found = {k: exchange for k, exchange in enumerate(made) if exchange is not None}
    if not found:
        return {}
    group = communicator.open_group("exchanges")
    if at_once:
        channel = Channel(group)
        return {k: partial(exchange_blocking, each, channel) for k, each in found.items()}
    start = ExchangeThread(group).start
    return {k: partial(start, each) for k, each in found.items()}


def _create_exchange(plan: Plan, name: str, first: Tensor, rounding: Rounding) -> Exchange | None:
    """Returns a function that exchanges the gradient of a bucket, or None if the bucket is AllReduced.

    Args:
        name: the name of the bucket's first parameter.
        first: the bucket's first parameter.
        rounding: rounds gradients before they are sent.
    """
    if name in plan.exchanged:
        decision = plan[name]
        kind = ExchangeKind(next(iter(first.shape), 1), decision.strategy, decision.scheme)
        return lambda flat, _, channel: exchange_gradient_(flat, kind, channel, plan.links)
    if not rounding.rounds(first):
        return None
    return lambda flat, name, channel: run_exchange(sum_rounded_(flat, name, channel, rounding))


def exchange_blocking(exchange: Exchange, channel: Channel, flat: Tensor, name: str) -> InFlight:
    """Runs the exchange of a packed gradient to its end. Returns the result as a launch that has already ended.

    Args:
        exchange: function that runs the exchange.
        channel: sends the messages.
        flat: the packed gradient.
        name: the name of the launch.
    """
    sent = _run_and_count(exchange, flat, name, channel)
    return InFlight(flat, None, lambda: sent)


def _run_and_count(exchange: Exchange, flat: Tensor, name: str, channel: Channel) -> int:
    """Runs the exchange of a packed gradient to its end. Returns the number of bytes that this rank has sent. The
    arguments are those of `exchange_blocking`.
    """
    before = channel.sent_bytes
    with torch.no_grad():
        exchange(flat, name, channel)
    return channel.sent_bytes - before


class ExchangeThread:
    """Runs exchanges on a thread, in the order in which `start` is called.

    Args:
        group: a process group that only this thread uses.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._worker, self._channel = Worker("exchanges"), Channel(group)

    def start(self, exchange: Exchange, flat: Tensor, name: str) -> InFlight:
        """Starts the exchange of a packed gradient on the thread. Returns a launch in flight.

        Args:
            exchange: function that runs the exchange.
            flat: the packed gradient.
            name: the name of the launch.
        """
        sent = self._worker.submit(partial(_run_and_count, exchange, flat, name, self._channel))
        return InFlight(flat, FutureWork(sent), sent.wait)
