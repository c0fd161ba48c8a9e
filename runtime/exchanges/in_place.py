"""Exchanges of a step's gradients: each in place, one after the other, on a thread and a process group of their own.

Contract
    An exchange takes several rounds of collectives, between which its rank computes. Neither the model's thread nor the
    launcher waits for a round: the launcher starts an exchange when its turn comes, and counts it as one launch. What
    is started in the same order on all ranks meets in that order, as this thread alone launches on its group.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from embrace_fx.cost.links import Cluster
from embrace_fx.runtime.exchanges import allgather, hierarchical, omnireduce, ps, zen
from embrace_fx.runtime.exchanges.blocks import cut_rows, write_blocks_
from embrace_fx.runtime.exchanges.channel import Channel
from embrace_fx.runtime.exchanges.gradient import RowSet, join_parts
from embrace_fx.runtime.exchanges.steps import Steps, run
from embrace_fx.runtime.ranks.communicator import InFlight


@dataclass(frozen=True)
class Strategy:
    """One way to the mean of all ranks' gradients, which has the same bits on all of them.

    Attributes:
        mean_parts: from a rank's units to disjoint parts of the mean, which have no common order.
        units: cuts a gradient (rows, width) into units: what has an index of its own on the wire.
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
"""By name, one of `embrace_fx.plan.EXCHANGES`, and scheme."""


@dataclass(frozen=True)
class ExchangeKind:
    """The kind of exchange of one parameter's gradient, equal on all ranks.

    Attributes:
        rows: size of the gradient's first dimension, whose indices have an index of their own on the wire.
        strategy, scheme: a key of `STRATEGY_OF`.
    """

    rows: int
    strategy: str
    scheme: str


def exchange_gradient_(flat: Tensor, kind: ExchangeKind, channel: Channel, cluster: Cluster) -> Tensor:
    """The mean over ranks of a gradient, in place; waits for every round.

    Args:
        flat: (rows * width,); or (rows, width) of layout COO, coalesced, where the strategy has rows for units: the
            same travels, so that ranks need not have the same layout.
        cluster: the links that blocks are cut for.
    """
    strategy = STRATEGY_OF[kind.strategy, kind.scheme]
    if flat.is_sparse:
        units = RowSet(flat.indices()[0], flat.values(), kind.rows)
        mean = join_parts(run(strategy.mean_parts(units, channel, cluster)), kind.rows)
        return flat.copy_(rows_of(mean, flat))
    units = strategy.units(flat.view(kind.rows, flat.numel() // max(kind.rows, 1)), cluster)
    for part in run(strategy.mean_parts(units, channel, cluster)):
        write_blocks_(flat, part)  # whatever is not among them is zero on this rank too
    return flat


def rows_of(rows: RowSet, like: Tensor) -> Tensor:
    """A row set as a coalesced tensor of layout COO, of the shape of another tensor."""
    return torch.sparse_coo_tensor(rows.ids.view(1, -1), rows.rows, like.shape, is_coalesced=True)


Exchange = Callable[[Tensor, str, Channel], object]
"""Exchanges a packed gradient in place, and waits for every round; given the name of its launch."""


def exchange_at_once(exchange: Exchange, channel: Channel, flat: Tensor, name: str) -> InFlight:
    """An exchange that has ended when this returns; with what it sent."""
    before = channel.sent_bytes
    with torch.no_grad():
        exchange(flat, name, channel)
    sent = channel.sent_bytes - before
    return InFlight(flat, None, lambda: sent)


@dataclass
class _Job:
    exchange: Exchange
    flat: Tensor
    name: str
    done: torch.futures.Future[Any] = field(default_factory=torch.futures.Future)
    sent_bytes: int = 0

    def get_future(self) -> torch.futures.Future[Any]:
        """Returns the future that a collective's work has."""
        return self.done


class ExchangeThread:
    """Runs exchanges in the order in which they are started.

    Args:
        group: used by nobody else.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        arguments = (self._jobs, Channel(group))
        threading.Thread(target=_serve, args=arguments, name="embrace_fx exchanges", daemon=True).start()
        # Not at the end of the interpreter, where exchanges may still be on their way: the thread ends with it.
        weakref.finalize(self, self._jobs.put, None).atexit = False

    def start(self, exchange: Exchange, flat: Tensor, name: str) -> InFlight:
        """An exchange in the background; `sent_bytes` of what is in flight is known once it has arrived."""
        job = _Job(exchange, flat, name)
        self._jobs.put(job)
        return InFlight(flat, job, lambda: job.sent_bytes)


def _serve(jobs: queue.SimpleQueue[_Job | None], channel: Channel) -> None:
    with torch.no_grad():
        while (job := jobs.get()) is not None:
            before = channel.sent_bytes
            try:
                job.exchange(job.flat, job.name, channel)
            except Exception as error:  # whoever waits for it shall hear of it
                job.done.set_exception(error)
                continue
            job.sent_bytes = channel.sent_bytes - before
            job.done.set_result(None)
            del job  # its gradient must not live until the next one comes
