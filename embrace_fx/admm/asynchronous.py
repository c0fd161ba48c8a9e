"""Asynchronous consensus: what master and workers say to each other, and what a worker does.

Zhang and Kwok, Asynchronous Distributed ADMM for Consensus Optimization (ICML 2014). The formulas are those of
`consensus`; the mean takes the last contribution of every worker, however old. The master, rank 0, waits until
`arrivals` workers have arrived and nobody's contribution is older than `staleness` updates, makes z, and sends it to
those that have arrived (`master`).

    worker                                     master
    iterates, held to z - u                    waits
    theta + u, figures  ------------------->   keeps them in the place of the worker's former ones
                                               z = mean of all workers' last theta + u
    u += theta - z      <-------------------   z

Messages are point to point, and plain tensors: a header of numbers, float64, and a vector of weights.
"""

from __future__ import annotations

import time
from dataclasses import astuple, dataclass, fields
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from embrace_fx.admm.consensus import contribution, pull_of, take_agreed
from embrace_fx.admm.loop import Run
from embrace_fx.admm.model import Data
from embrace_fx.admm.operations import DUALS, FIGURES, TO_MASTER, TO_WORKER
from embrace_fx.admm.progress import Scores, Splits, progress_of
from embrace_fx.admm.state import State
from embrace_fx.admm.stopping import Best
from embrace_fx.admm.sweep import Sweeper
from embrace_fx.runtime.launch.recorder import Recorder, Transfer
from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.runtime.ranks.failure import DeadRank

MASTER = 0
"""Names in timelines."""

Order = Literal["go on", "end", "dead", "late"]
ORDERS: tuple[Order, ...] = ("go on", "end", "dead", "late")


class LateRank(RuntimeError):
    """A worker that the master has to wait for has not arrived in time."""


@dataclass(frozen=True)
class Asynchronous:
    """A master and workers that do not wait for each other.

    Attributes:
        strength: of the pull to the agreed weights (g), per sequence of a rank.
        arrivals: workers that the master waits for before it makes new weights (S).
        staleness: updates after which a worker's contribution must be renewed; with 1 everybody waits for everybody.
        patience_s: how long the master waits for a worker that it cannot go on without. Then all ranks raise. At most
            half of the process group's timeout.
    """

    strength: float = 0.03
    arrivals: int = 1
    staleness: int = 10
    patience_s: float = 60.0

    def __post_init__(self) -> None:
        if not 0 < self.strength < float("inf"):
            raise ValueError(f"expected a positive strength, in admm.Asynchronous(), found {self.strength}.")
        if self.arrivals < 1 or self.staleness < 1 or not self.patience_s > 0:
            raise ValueError(
                "expected arrivals and staleness of at least 1 and a positive patience_s, in admm.Asynchronous(), "
                f"found {self.arrivals}, {self.staleness} and {self.patience_s}."
            )


@dataclass(frozen=True)
class Report:
    """What a worker sends: its contribution theta + u, and its figures."""

    vector: Tensor
    splits: Splits


@dataclass(frozen=True)
class Reply:
    """What the master answers.

    Attributes:
        order: go on from these weights; end with them; or fail, for a rank is dead or late.
        vector: the agreed weights; at the end, the best ones.
        culprit: the rank that is dead or late.
        iteration, loss: of the best weights.
    """

    order: Order
    vector: Tensor
    culprit: int = -1
    iteration: int = 0
    loss: float = 0.0


class Line:
    """One end of the connection between the master and a worker.

    Args:
        group: of all ranks, whose tensors are on the hosts.
        peer: the other one's rank in the default group.
        like: a vector of weights, for its length and dtype.
    """

    def __init__(self, group: dist.ProcessGroup, peer: int, like: Tensor) -> None:
        self._group, self._peer, self._like = group, peer, like

    def send_report(self, report: Report) -> None:
        self._send(torch.tensor(astuple(report.splits), dtype=torch.float64), report.vector)

    def receive_report(self) -> Report:
        header, vector = self._receive(len(fields(Splits)))
        return Report(vector, Splits(*header))

    def send_reply(self, reply: Reply) -> None:
        header = [ORDERS.index(reply.order), reply.culprit, reply.iteration, reply.loss]
        self._send(torch.tensor(header, dtype=torch.float64), reply.vector)

    def receive_reply(self) -> Reply:
        (order, culprit, iteration, loss), vector = self._receive(4)
        return Reply(ORDERS[int(order)], vector, int(culprit), int(iteration), loss)

    def _send(self, header: Tensor, vector: Tensor) -> None:
        for tensor in (header, vector.cpu()):
            dist.send(tensor, self._peer, group=self._group)

    def _receive(self, numbers: int) -> tuple[list[float], Tensor]:
        header = torch.empty(numbers, dtype=torch.float64)
        vector = torch.empty(self._like.shape, dtype=self._like.dtype)
        for tensor in (header, vector):
            dist.recv(tensor, self._peer, group=self._group)
        return header.tolist(), vector.to(self._like.device)


def open_lines(communicator: Communicator, like: Tensor) -> dict[int, Line]:
    """This rank's lines by the other end's rank: the master's to every worker, a worker's to the master."""
    group = communicator.host_group()
    ranks = dist.get_process_group_ranks(group)
    peers = range(1, communicator.world_size) if communicator.rank == MASTER else [MASTER]
    return {peer: Line(group, ranks[peer], like) for peer in peers}


def work(state: State, data: Data, run: Run, communicator: Communicator, line: Line, strength: float) -> None:
    """A worker's iterations, until the master ends them. `state` is brought forward in place; its history is the
    worker's own, its best weights are the master's.

    Args:
        strength: g.

    Raises:
        DeadRank: a rank is gone, by its name.
        LateRank: the master has waited too long for a worker.
    """
    sweeper, recorder = Sweeper(data, state.penalties), run.recorder
    assert state.variables is not None
    start_s = time.perf_counter() - state.elapsed_s
    state.stopped = None
    while state.stopped is None:
        recorder.window()
        state.weights, state.variables, residuals = sweeper.iterate(
            state.weights, state.variables, pull_of(state, strength), recorder.mark
        )
        state.iteration += 1
        splits = Splits.of(residuals, state.variables, data, state.penalties, state.gap())
        scores = Scores.of(state.agreed, run.monitored)
        elapsed_s = time.perf_counter() - start_s
        progress = progress_of(state.iteration, scores, splits, staleness=0, elapsed_s=elapsed_s)
        state.history.append(progress)
        if run.on_iteration is not None:
            run.on_iteration(progress)
        recorder.mark(FIGURES)
        with communicator.watching():
            reply = _converse(line, Report(contribution(state), splits), recorder)
        if reply.order == "go on":
            take_agreed(state, reply.vector)
            recorder.mark(DUALS)
        elif reply.order == "end":
            state.best = Best(reply.iteration, reply.loss, state.agreed.unflat(reply.vector))
            state.stopped = "the master ended the training"
        else:
            raise failure(reply.order, reply.culprit, communicator.rank)


def failure(order: Order, culprit: int, rank: int) -> RuntimeError:
    """The error that a dead or late worker is to every other rank."""
    if order == "dead":
        return DeadRank(
            f"expected every rank to take part in an asynchronous training, on rank {rank}; found that rank(s) "
            f"{culprit} no longer answer. Look at the log of the ranks named, and restart the job from saved states."
        )
    return LateRank(
        f"expected rank {culprit} to arrive within the master's patience, on rank {rank}; found that it has not, and "
        "that its contribution is too old to go on without. Raise patience_s or staleness, or look at that rank."
    )


def _converse(line: Line, report: Report, recorder: Recorder) -> Reply:
    """Sends what this worker has and waits for the answer."""
    started_s = time.perf_counter()
    with recorder.waiting(TO_WORKER):
        line.send_report(report)
        sent_s = time.perf_counter()
        reply = line.receive_reply()
    if recorder.recording is not None:
        size = report.vector.numel() * report.vector.element_size()
        recorder.transferred(Transfer(TO_MASTER, recorder.recording.window, size, started_s, sent_s))
    return reply
