"""Asynchronous consensus: a master that makes weights of what has arrived, and workers that do not wait for each other.

Zhang and Kwok, Asynchronous Distributed ADMM for Consensus Optimization (ICML 2014). The formulas are those of
`consensus`; the mean takes the last contribution of every worker, however old. The master, rank 0, waits until
`arrivals` workers have arrived and nobody's contribution is older than `staleness` updates.

    worker                                     master
    iterates, held to z - u                    waits
    theta + u, sums of figures  ----------->   keeps them in the place of the worker's former ones
                                               z = mean of all workers' last theta + u
    u += theta - z      <-------------------   z, to those that have arrived

A message is a plain tensor, float64, point to point: a few numbers, then a vector of weights. On the master a thread
for each worker carries its messages into one queue, so that it waits for whoever comes first.
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

from embrace_fx.admm.consensus import Run, contribution, pull_of, take_agreed
from embrace_fx.admm.model import Data, expect
from embrace_fx.admm.operations import DUALS, FIGURES, MEAN, TO_MASTER, TO_WORKER
from embrace_fx.admm.progress import Best, Sums
from embrace_fx.admm.state import State
from embrace_fx.admm.update import iterate
from embrace_fx.runtime.launch.recorder import Recorder, Transfer
from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.runtime.ranks.failure import DeadRank

MASTER = 0
NUMBERS = len(fields(Sums))  # at the head of a message

Order = Literal["go on", "end", "dead", "late"]
ORDERS: tuple[Order, ...] = ("go on", "end", "dead", "late")


class LateRank(RuntimeError):
    """A worker that the master has to wait for has not arrived in time."""


@dataclass(frozen=True)
class Asynchronous:
    """A master and workers that do not wait for each other.

    Attributes:
        strength: of the pull to the agreed weights (g), per sequence of a batch.
        arrivals: workers that the master waits for before it makes new weights (S).
        staleness: updates after which a worker's contribution must be renewed; with 1 everybody waits for everybody.
        patience_s: how long the master waits for a worker that it cannot go on without. Then all ranks raise. At most
            half of the process group's timeout.
    """

    strength: float = 0.003
    arrivals: int = 1
    staleness: int = 10
    patience_s: float = 60.0

    def __post_init__(self) -> None:
        fits = 0 < self.strength < float("inf") and min(self.arrivals, self.staleness) >= 1 and self.patience_s > 0
        wanted = "a positive strength and patience_s, arrivals and staleness of at least 1, in admm.Asynchronous()"
        expect(fits, wanted, str(self), "Change them.")


class Reply(NamedTuple):
    """The master's: go on from these weights; end with them, the best ones; or fail, for a rank is dead or late."""

    order: Order
    vector: Tensor
    culprit: float = -1
    iteration: float = 0
    loss: float = 0.0


class Line:
    """One end of the connection to a peer, a rank of the default group, for vectors of weights like this one."""

    def __init__(self, group: dist.ProcessGroup, peer: int, like: Tensor) -> None:
        self._group, self._peer, self._like = group, peer, like

    def send(self, numbers: Sequence[float], vector: Tensor) -> None:
        head = torch.tensor([*numbers, *[0.0] * (NUMBERS - len(numbers))], dtype=torch.float64)
        dist.send(torch.cat([head, vector.cpu().double()]), self._peer, group=self._group)

    def receive(self) -> tuple[list[float], Tensor]:
        message = torch.empty(NUMBERS + self._like.numel(), dtype=torch.float64)
        dist.recv(message, self._peer, group=self._group)
        return message[:NUMBERS].tolist(), message[NUMBERS:].to(self._like)


def open_lines(communicator: Communicator, like: Tensor) -> dict[int, Line]:
    """This rank's lines by the other end's rank: the master's to every worker, a worker's to the master."""
    group = communicator.host_group()
    ranks = dist.get_process_group_ranks(group)
    peers = range(1, communicator.world_size) if communicator.rank == MASTER else [MASTER]
    return {peer: Line(group, ranks[peer], like) for peer in peers}


def work(state: State, data: Data, run: Run, communicator: Communicator, line: Line, strength: float) -> None:
    """A worker's iterations, until the master ends them, or a dead or late rank. The best weights are the master's."""
    recorder, start_s = run.recorder, time.perf_counter() - state.elapsed_s
    state.stopped = None
    while state.stopped is None:
        recorder.window()
        splits = iterate(state, data, run.batch_size, pull_of(state, strength), recorder.mark)
        splits, state.iteration = splits + Sums.between(state.weights, state.agreed), state.iteration + 1
        own = Sums.of(state.agreed, run.monitored) + splits
        state.history.append(own.progress(state.iteration, staleness=0, elapsed_s=time.perf_counter() - start_s))
        run.log(state.history[-1])
        recorder.mark(FIGURES)
        with communicator.watching():
            reply = _converse(line, splits, contribution(state), recorder)
        if reply.order == "go on":
            take_agreed(state, reply.vector)
            recorder.mark(DUALS)
        elif reply.order == "end":
            state.best = Best(int(reply.iteration), reply.loss, state.agreed.unflat(reply.vector))
            state.stopped = "the master ended the training"
        else:
            raise failure(reply.order, int(reply.culprit), communicator.rank)


def _converse(line: Line, splits: Sums, vector: Tensor, recorder: Recorder) -> Reply:
    """Sends what this worker has and waits for the answer."""
    started_s = time.perf_counter()
    with recorder.waiting(TO_WORKER):
        line.send(astuple(splits), vector)
        sent_s = time.perf_counter()
        (order, culprit, iteration, loss, *_), agreed = line.receive()
    if recorder.recording is not None:
        recorder.transferred(Transfer(TO_MASTER, recorder.recording.window, 8 * vector.numel(), started_s, sent_s))
    return Reply(ORDERS[int(order)], agreed, culprit, iteration, loss)


def failure(order: Order, culprit: int, rank: int) -> RuntimeError:
    """Makes the error that every other rank raises for a dead or late worker."""
    dead = (
        f"expected every rank to take part in an asynchronous training, on rank {rank}; found that rank(s) {culprit} "
        "no longer answer. Look at the log of the ranks named, and restart the job from saved states."
    )
    late = (
        f"expected rank {culprit} to arrive within the master's patience, on rank {rank}; found that it has not, and "
        "that its contribution is too old to go on without. Raise patience_s or staleness, or look at that rank."
    )
    return DeadRank(dead) if order == "dead" else LateRank(late)


Arrivals = queue.SimpleQueue[tuple[int, tuple[Sums, Tensor] | RuntimeError]]
"""From which worker: its sums and its theta + u, or the error of a broken line."""


class Carrier(threading.Thread):
    """Carries a worker's messages until an answer ends them, or the line breaks."""

    def __init__(self, worker: int, line: Line, arrivals: Arrivals) -> None:
        super().__init__(name=f"embrace_fx admm {worker}", daemon=True)
        self._worker, self._line, self._arrivals, self.dismissed = worker, line, arrivals, False
        self.replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()

    def run(self) -> None:
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
    """The workers' last contributions, and how old they are.

    Before a first report it is `start`; where that is not known, the first update waits for all workers.
    """

    def __init__(self, start: Tensor, workers: int, options: Asynchronous, known: bool) -> None:
        self._vectors, self._options = torch.stack([start] * workers), options
        self._sums: dict[int, Sums] = {}
        self._ages = [1 if known else options.staleness] * workers
        self.arrived: set[int] = set()

    def take(self, worker: int, sums: Sums, vector: Tensor) -> None:
        """Worker 1 is the first."""
        self._vectors[worker - 1], self._sums[worker] = vector, sums
        self.arrived.add(worker)

    def missing(self) -> list[int]:
        """Workers without which there must be no update; of those whose number alone counts, all."""
        absent = [worker for worker in range(1, len(self._ages) + 1) if worker not in self.arrived]
        stale = [worker for worker in absent if self._ages[worker - 1] >= self._options.staleness]
        return stale or (absent if len(self.arrived) < self._options.arrivals else [])

    def update(self) -> tuple[Tensor, set[int], int]:
        """Averages the weights anew; returns them, who has arrived for them, and the age of the oldest contribution."""
        ages = [0 if k + 1 in self.arrived else age for k, age in enumerate(self._ages)]
        self._ages = [age + 1 for age in ages]
        arrived, self.arrived = self.arrived, set()
        return self._vectors.mean(0), arrived, max(ages)

    def sums(self) -> Sums:
        """Adds up the sums of all workers that have ever reported."""
        return reduce(add, self._sums.values())


class Lost(Exception):
    """A worker is dead or late: an `Order`, and who."""


class Master:
    """Leads a training over lines to the workers, by rank."""

    def __init__(
        self, state: State, run: Run, communicator: Communicator, lines: Mapping[int, Line], options: Asynchronous
    ) -> None:
        self._state, self._run, self._communicator, self._options = state, run, communicator, options
        self._inbox: Arrivals = queue.SimpleQueue()
        self._carriers = {worker: Carrier(worker, line, self._inbox) for worker, line in lines.items()}

    def lead(self) -> None:
        """The iterations, an update of the agreed weights each, until they end, or a dead or late rank."""
        state = self._state
        for carrier in self._carriers.values():
            carrier.start()
        try:
            self._iterate()
            self._dismiss(Reply("end", state.best.weights.flat(), -1, state.best.iteration, state.best.loss))
        except Lost as lost:
            order, culprit = lost.args
            with contextlib.suppress(Lost):  # the culprit does not take its leave, which is known
                self._dismiss(Reply(order, state.agreed.flat(), culprit))
            raise failure(order, culprit, self._communicator.rank) from lost.__cause__

    def _iterate(self) -> None:
        state, run, recorder = self._state, self._run, self._run.recorder
        known = state.iteration == 0  # of a resumed training only the workers know what they had sent
        contributions = Contributions(state.agreed.flat(), len(self._carriers), self._options, known)
        start_s = time.perf_counter() - state.elapsed_s
        state.stopped = None
        while state.iteration < run.iterations and state.stopped is None:
            recorder.window()
            with recorder.waiting(TO_MASTER):
                self._collect(contributions)
            vector, arrived, oldest = contributions.update()
            state.agreed = state.weights = state.agreed.unflat(vector)
            state.iteration += 1
            recorder.mark(MEAN)
            for worker in arrived:
                self._carriers[worker].replies.put(Reply("go on", vector))
            sums = Sums.of(state.agreed, run.monitored) + contributions.sums()
            recorder.mark(FIGURES)
            progress = sums.progress(state.iteration, staleness=oldest, elapsed_s=time.perf_counter() - start_s)
            state.advance(progress, run.stopping)
            run.log(progress)

    def _collect(self, contributions: Contributions) -> None:
        """Takes all that has arrived, and waits until there can be an update, or raises Lost."""
        deadline_s = time.monotonic() + self._options.patience_s
        while not self._inbox.empty() or contributions.missing():
            try:
                worker, report = self._inbox.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                raise Lost("late", contributions.missing()[0]) from None
            if isinstance(report, RuntimeError):
                # A line breaks when its worker dies, or after so long that it is late in any case.
                raise Lost("dead" if worker in self._communicator.missing_ranks() else "late", worker) from report
            contributions.take(worker, *report)

    def _dismiss(self, reply: Reply) -> None:
        """Answers all workers' reports, those that wait or the next, and waits until all have it, or raises Lost."""
        for carrier in self._carriers.values():
            carrier.replies.put(reply)
        deadline_s = time.monotonic() + self._options.patience_s
        for worker, carrier in self._carriers.items():
            carrier.join(max(0.0, deadline_s - time.monotonic()))
            if not carrier.dismissed:
                raise Lost("late" if carrier.is_alive() else "dead", worker)
