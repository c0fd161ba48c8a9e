"""Asynchronous consensus: a master updates the weights from arrived contributions, and workers do not wait for each
other.

Zhang and Kwok, Asynchronous Distributed ADMM for Consensus Optimization (ICML 2014). The formulas are those of
`consensus`. The mean uses the last contribution of every worker. The master, rank 0, waits until `arrivals` workers
have arrived and no contribution is older than `staleness` updates.

    worker                                     master
    iterates, pulled to z - u                  waits
    theta + u, sums of metrics  ----------->   replaces the worker's previous ones
                                               z = mean of all workers' last theta + u
    u += theta - z      <-------------------   z, to workers that have arrived

A message is a float64 tensor, point to point: a few numbers, then a vector of weights. On the master, one thread per
worker puts messages into a common queue, so that the master waits for the first to arrive.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from functools import reduce
from operator import add
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from embrace_fx.admm.consensus import Run, contribution, pull_to_agreed, store_agreed
from embrace_fx.admm.model import Data, require
from embrace_fx.admm.operations import DUALS, FIGURES, MEAN, TO_MASTER, TO_WORKER
from embrace_fx.admm.progress import Best, Sums
from embrace_fx.admm.state import State
from embrace_fx.admm.update import run_epoch
from embrace_fx.runtime.launch.recorder import Recorder, Transfer
from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.runtime.ranks.failure import DeadRank

MASTER = 0
NUMBERS = len(fields(Sums))  # how many numbers come before the vector in a message

Order = Literal["go on", "end", "dead", "late"]
ORDERS: tuple[Order, ...] = ("go on", "end", "dead", "late")


class LateRank(RuntimeError):
    """Raised if a worker of asynchronous training does not send its weights to the master in time."""


@dataclass(frozen=True)
class Asynchronous:
    """Options of asynchronous training: rank 0, the master, averages the weights of all other ranks, the workers.
    Workers do not wait for each other.

    Attributes:
        strength: the factor g of the quadratic penalty on the difference between a worker's weights and the master's
            average. It applies to each sequence of a batch.
        arrivals: the number of workers that the master waits for before each update of the average.
        staleness: the number of updates that may use the same weights of a worker. After that, the master waits for new
            weights. With 1, each update waits for all workers.
        patience_s: seconds that the master waits for a worker whose weights it needs. After that, all ranks raise
            `LateRank`. Must be at most half of the process group's timeout.
    """

    strength: float = 0.003
    arrivals: int = 1
    staleness: int = 10
    patience_s: float = 60.0

    def __post_init__(self) -> None:
        fits = 0 < self.strength < float("inf") and min(self.arrivals, self.staleness) >= 1 and self.patience_s > 0
        require(fits, f"strength and patience_s must be positive, arrivals and staleness at least 1. Got admm.{self}.")


class Reply(NamedTuple):
    """The master's reply to a worker in asynchronous training.

    Attributes:
        order: what the worker does next: "go on" with the averaged weights, "end" with the best weights, or raise an
            error because a worker is "dead" or "late".
        vector: the averaged weights, or the best ones if `order` is "end".
        culprit: the rank of the dead or late worker, or -1.
        iteration: the iteration of the best weights if `order` is "end".
        loss: the loss of the best weights if `order` is "end".
    """

    order: Order
    vector: Tensor
    culprit: float = -1
    iteration: float = 0
    loss: float = 0.0


class Connection:
    """A point-to-point connection to one other rank of a process group. Each message consists of a few numbers and a
    vector of weights.

    Args:
        group: the process group.
        peer: the other rank, numbered as in the default group.
        like: a vector with the size, dtype and device of the weights.
    """

    def __init__(self, group: dist.ProcessGroup, peer: int, like: Tensor) -> None:
        self._group, self._peer, self._like = group, peer, like

    def send(self, numbers: Sequence[float], vector: Tensor) -> None:
        """Sends `numbers`, padded with zeros to `NUMBERS`, and a vector of weights as one float64 message."""
        head = torch.tensor([*numbers, *[0.0] * (NUMBERS - len(numbers))], dtype=torch.float64)
        dist.send(torch.cat([head, vector.cpu().double()]), self._peer, group=self._group)

    def receive(self) -> tuple[list[float], Tensor]:
        """Receives one message. Returns its `NUMBERS` numbers and its vector of weights."""
        message = torch.empty(NUMBERS + self._like.numel(), dtype=torch.float64)
        dist.recv(message, self._peer, group=self._group)
        return message[:NUMBERS].tolist(), message[NUMBERS:].to(self._like)


def open_connections(communicator: Communicator, like: Tensor) -> dict[int, Connection]:
    """Opens this rank's connections for asynchronous training, and returns them by the peer's rank. The master (rank 0)
    connects to every worker, and a worker only to the master.

    Args:
        like: a vector with the size, dtype and device of the weights to send and receive.
    """
    group = communicator.host_group()
    ranks = dist.get_process_group_ranks(group)
    peers = range(1, communicator.world_size) if communicator.rank == MASTER else [MASTER]
    return {peer: Connection(group, ranks[peer], like) for peer in peers}


def run_worker(
    state: State, data: Data, run: Run, communicator: Communicator, master: Connection, strength: float
) -> None:
    """Runs a worker's iterations of asynchronous training until the master ends them. Raises if a worker is dead or
    late.

    Args:
        state: the worker's state, updated in place.
        data: the worker's sequences to train on.
        run: the options of the run.
        master: the connection to the master.
        strength: the factor g of the penalty on the difference from the averaged weights.
    """
    recorder, start_s = run.recorder, time.perf_counter() - state.elapsed_s
    state.stopped = None
    while state.stopped is None:
        recorder.begin_window()
        splits = run_epoch(state, data, run.batch_size, pull_to_agreed(state, strength), recorder.mark)
        splits, state.iteration = splits + Sums.of_disagreement(state.weights, state.agreed), state.iteration + 1
        own = Sums.of_model(state.agreed, run.monitored) + splits
        state.history.append(own.progress(state.iteration, staleness=0, elapsed_s=time.perf_counter() - start_s))
        run.log(state.history[-1])
        recorder.mark(FIGURES)
        with communicator.watching():
            reply = _report_to_master(master, splits, contribution(state), recorder)
        if reply.order == "go on":
            store_agreed(state, reply.vector)
            recorder.mark(DUALS)
        elif reply.order == "end":
            state.best = Best(int(reply.iteration), reply.loss, state.agreed.from_flat(reply.vector))
            state.stopped = "the master ended the training"
        else:
            raise lost_worker_error(reply.order, int(reply.culprit), communicator.rank)


def _report_to_master(master: Connection, splits: Sums, vector: Tensor, recorder: Recorder) -> Reply:
    """Sends a worker's weights and sums to the master, and waits for the reply. Returns the reply.

    Args:
        splits: the sums from which the metrics of the worker's iteration are computed.
        vector: the worker's contribution to the average: its weights plus scaled multipliers
            (`consensus.contribution`).
        recorder: records the time of the messages.
    """
    started_s = time.perf_counter()
    with recorder.waiting(TO_WORKER):
        master.send(astuple(splits), vector)
        sent_s = time.perf_counter()
        (order, culprit, iteration, loss, *_), agreed = master.receive()
    if recorder.recording is not None:
        recorder.record_transfer(Transfer(TO_MASTER, recorder.recording.window, 8 * vector.numel(), started_s, sent_s))
    return Reply(ORDERS[int(order)], agreed, culprit, iteration, loss)


def lost_worker_error(order: Order, culprit: int, rank: int) -> RuntimeError:
    """Returns the error that the remaining ranks raise if a worker is lost: `DeadRank` or `LateRank`.

    Args:
        order: "dead" or "late", as the master sent it.
        culprit: the rank of the lost worker.
        rank: this rank.
    """
    dead = (
        f"Rank {culprit} no longer answers during asynchronous training (noticed by rank {rank}). Check its log, and "
        "restart the job from saved states."
    )
    late = (
        f"Rank {culprit} did not send its next contribution to the master within patience_s, and its last contribution "
        f"is older than staleness allows (noticed by rank {rank}). Check the log of rank {culprit}, or raise "
        "patience_s or staleness."
    )
    return DeadRank(dead) if order == "dead" else LateRank(late)


Arrivals = queue.SimpleQueue[tuple[int, tuple[Sums, Tensor] | RuntimeError]]
"""(worker, its sums and its theta + u, or the error of a broken connection)."""


class MessageThread(threading.Thread):
    """A thread of the master that exchanges messages with one worker. It ends when the training ends or the connection
    breaks.

    Args:
        worker: the worker's rank.
        line: the connection to the worker.
        arrivals: the queue for the worker's messages.
    """

    def __init__(self, worker: int, line: Connection, arrivals: Arrivals) -> None:
        super().__init__(name=f"embrace_fx admm {worker}", daemon=True)
        self._worker, self._line, self._arrivals, self.dismissed = worker, line, arrivals, False
        self.replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()

    def run(self) -> None:
        """Puts each message of the worker into the master's queue, and then sends the master's reply to the worker.
        Returns after a reply that ends the training. If the connection breaks, puts the error into the queue.
        """
        try:
            reply = None
            while reply is None or reply.order == "go on":
                numbers, vector = self._line.receive()
                self._arrivals.put((self._worker, (Sums(*numbers), vector)))
                reply = self.replies.get()
                numbers = [ORDERS.index(reply.order), reply.culprit, reply.iteration, reply.loss]
                self._line.send(numbers, reply.vector)
            self.dismissed = True
        except RuntimeError as error:
            self._arrivals.put((self._worker, error))


class Contributions:
    """The last contribution of each worker to the master's average, with its age. A contribution is a vector of the
    worker's weights plus scaled multipliers. Its age is the number of updates of the average since it arrived.

    Args:
        start: the vector to use for each worker before its first report.
        workers: the number of workers.
        options: the options of asynchronous training.
        known: whether `start` is every worker's true contribution. If not, as after a resume, the first update waits
            for all workers.
    """

    def __init__(self, start: Tensor, workers: int, options: Asynchronous, known: bool) -> None:
        self._vectors, self._options = torch.stack([start] * workers), options
        self._sums: dict[int, Sums] = {}
        self._ages = [1 if known else options.staleness] * workers
        self.arrived: set[int] = set()

    def store(self, worker: int, sums: Sums, vector: Tensor) -> None:
        """Stores a worker's new contribution.

        Args:
            worker: the worker's rank, from 1.
            sums: the sums from which the worker's metrics are computed.
            vector: the worker's weights plus scaled multipliers.
        """
        self._vectors[worker - 1], self._sums[worker] = vector, sums
        self.arrived.add(worker)

    def missing(self) -> list[int]:
        """Returns the ranks of the workers whose contributions the next update must wait for. Returns [] if it need not
        wait.
        """
        absent = [worker for worker in range(1, len(self._ages) + 1) if worker not in self.arrived]
        stale = [worker for worker in absent if self._ages[worker - 1] >= self._options.staleness]
        return stale or (absent if len(self.arrived) < self._options.arrivals else [])

    def update(self) -> tuple[Tensor, set[int], int]:
        """Averages the workers' last contributions. Returns (the mean, the ranks of the workers whose contributions
        arrived since the last update, the age of the oldest contribution in updates).
        """
        ages = [0 if k + 1 in self.arrived else age for k, age in enumerate(self._ages)]
        self._ages = [age + 1 for age in ages]
        arrived, self.arrived = self.arrived, set()
        return self._vectors.mean(0), arrived, max(ages)

    def sums(self) -> Sums:
        """Returns the sums from which the metrics are computed, added up over all workers that have reported."""
        return reduce(add, self._sums.values())


class LostWorker(Exception):
    """Raised on the master if a worker does not answer. Its arguments are "dead" or "late", and the worker's rank."""


class Master:
    """The master of asynchronous training, which averages its workers' weights."""

    def __init__(
        self, state: State, run: Run, communicator: Communicator, lines: Mapping[int, Connection], options: Asynchronous
    ) -> None:
        self._state, self._run, self._communicator, self._options = state, run, communicator, options
        self._inbox: Arrivals = queue.SimpleQueue()
        self._carriers = {worker: MessageThread(worker, line, self._inbox) for worker, line in lines.items()}

    def lead(self) -> None:
        """Runs the master: averages the workers' weights until all iterations are done or training stops early, and
        then sends the best weights to all workers. Raises `DeadRank` or `LateRank`, on all ranks, if a worker is dead
        or late.
        """
        state = self._state
        for carrier in self._carriers.values():
            carrier.start()
        try:
            self._iterate()
            self._dismiss(Reply("end", state.best.weights.flat(), -1, state.best.iteration, state.best.loss))
        except LostWorker as lost:
            order, culprit = lost.args
            with contextlib.suppress(LostWorker):  # a lost worker does not confirm that training has ended
                self._dismiss(Reply(order, state.agreed.flat(), culprit))
            raise lost_worker_error(order, culprit, self._communicator.rank) from lost.__cause__

    def _iterate(self) -> None:
        """Runs the master's iterations, until all are done or training stops early. Each waits for contributions,
        averages the last one of every worker, and replies with the mean to the workers that have arrived.
        """
        state, run, recorder = self._state, self._run, self._run.recorder
        known = state.iteration == 0  # in a resumed training, only the workers know their last contributions
        contributions = Contributions(state.agreed.flat(), len(self._carriers), self._options, known)
        start_s = time.perf_counter() - state.elapsed_s
        state.stopped = None
        while state.iteration < run.iterations and state.stopped is None:
            recorder.begin_window()
            with recorder.waiting(TO_MASTER):
                self._collect(contributions)
            vector, arrived, oldest = contributions.update()
            state.agreed = state.weights = state.agreed.from_flat(vector)
            state.iteration += 1
            recorder.mark(MEAN)
            for worker in arrived:
                self._carriers[worker].replies.put(Reply("go on", vector))
            sums = Sums.of_model(state.agreed, run.monitored) + contributions.sums()
            recorder.mark(FIGURES)
            progress = sums.progress(state.iteration, staleness=oldest, elapsed_s=time.perf_counter() - start_s)
            state.advance(progress, run.stopping)
            run.log(progress)

    def _collect(self, contributions: Contributions) -> None:
        """Receives workers' contributions, and stores them in `contributions`, until the average can be updated. Raises
        `LostWorker` if a worker is dead or late.
        """
        deadline_s = time.monotonic() + self._options.patience_s
        while not self._inbox.empty() or contributions.missing():
            try:
                worker, report = self._inbox.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                raise LostWorker("late", contributions.missing()[0]) from None
            if isinstance(report, RuntimeError):
                # A connection breaks when its worker dies, or after a timeout longer than the patience.
                raise LostWorker("dead" if worker in self._communicator.missing_ranks() else "late", worker) from report
            contributions.store(worker, *report)

    def _dismiss(self, reply: Reply) -> None:
        """Sends a final reply to every worker, in answer to its current or next report, and waits until all have it.
        Raises `LostWorker` if a worker does not take it within `patience_s`.
        """
        for carrier in self._carriers.values():
            carrier.replies.put(reply)
        deadline_s = time.monotonic() + self._options.patience_s
        for worker, carrier in self._carriers.items():
            carrier.join(max(0.0, deadline_s - time.monotonic()))
            if not carrier.dismissed:
                raise LostWorker("late" if carrier.is_alive() else "dead", worker)
