"""The master of an asynchronous training: makes new weights of what has arrived, and answers those that wait.

A thread for each worker carries its messages: it receives a report, waits for the answer, sends it. What arrives goes
into one queue, so the master waits for whoever comes first.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from embrace_fx.admm.asynchronous import Asynchronous, Line, Order, Reply, Report, failure
from embrace_fx.admm.loop import Run
from embrace_fx.admm.operations import FIGURES, MEAN, TO_MASTER
from embrace_fx.admm.progress import Scores, Splits, progress_of
from embrace_fx.admm.state import State
from embrace_fx.runtime.ranks.communicator import Communicator


@dataclass(frozen=True)
class Arrival:
    """What has come from a worker: a report, or the error of a broken line."""

    worker: int
    report: Report | RuntimeError


class Carrier(threading.Thread):
    """Carries a worker's messages until an answer ends them, or the line breaks."""

    def __init__(self, worker: int, line: Line, arrivals: queue.SimpleQueue[Arrival]) -> None:
        super().__init__(name=f"embrace_fx admm {worker}", daemon=True)
        self.worker, self._line, self._arrivals = worker, line, arrivals
        self._replies: queue.SimpleQueue[Reply] = queue.SimpleQueue()
        self.dismissed = False

    def reply(self, reply: Reply) -> None:
        """Answers the worker's report: the one that waits, or the next."""
        self._replies.put(reply)

    def run(self) -> None:
        try:
            reply = None
            while reply is None or reply.order == "go on":
                self._arrivals.put(Arrival(self.worker, self._line.receive_report()))
                reply = self._replies.get()
                self._line.send_reply(reply)
            self.dismissed = True
        except RuntimeError as error:
            self._arrivals.put(Arrival(self.worker, error))


class Contributions:
    """The workers' last contributions, and how old they are.

    Args:
        start: every worker's contribution before its first report.
        known: whether that is what they are; if not, the first update waits for all workers.
        arrivals: workers without which there is no update.
        staleness: updates after which a worker's contribution must be renewed.
    """

    def __init__(self, start: Tensor, workers: int, arrivals: int, staleness: int, known: bool) -> None:
        self._vectors = torch.stack([start] * workers)
        self._splits: dict[int, Splits] = {}
        self._ages = [1 if known else staleness] * workers
        self._arrivals, self._staleness = arrivals, staleness
        self.arrived: set[int] = set()

    def take(self, worker: int, report: Report) -> None:
        """Worker 1 is the first."""
        self._vectors[worker - 1] = report.vector
        self._splits[worker] = report.splits
        self.arrived.add(worker)

    def missing(self) -> list[int]:
        """Workers without which there must be no update; of those whose number alone counts, all."""
        absent = [worker for worker in range(1, len(self._ages) + 1) if worker not in self.arrived]
        stale = [worker for worker in absent if self._ages[worker - 1] >= self._staleness]
        return stale or (absent if len(self.arrived) < self._arrivals else [])

    def update(self) -> tuple[Tensor, set[int], int]:
        """New agreed weights, who has arrived for them, and the age of the oldest contribution in them."""
        ages = [0 if k + 1 in self.arrived else age for k, age in enumerate(self._ages)]
        self._ages = [age + 1 for age in ages]
        arrived, self.arrived = self.arrived, set()
        return self._vectors.mean(0), arrived, max(ages)

    def splits(self) -> Splits:
        """Summed over the workers that have ever reported."""
        return Splits(*map(sum, zip(*map(astuple, self._splits.values()), strict=True)))


class Lost(Exception):
    """A worker is dead or late."""

    def __init__(self, order: Order, culprit: int) -> None:
        super().__init__(order, culprit)
        self.order, self.culprit = order, culprit


class Inbox:
    """What has arrived from all workers.

    Args:
        patience_s: how long to wait for workers without which there is no update.
    """

    def __init__(self, communicator: Communicator, patience_s: float) -> None:
        self.arrivals: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self._communicator, self._patience_s = communicator, patience_s

    def collect(self, contributions: Contributions) -> None:
        """Takes all that has arrived, and waits until there can be an update.

        Raises:
            Lost: a worker's line is broken, or one that is waited for does not come.
        """
        deadline_s = time.monotonic() + self._patience_s
        while not self.arrivals.empty() or contributions.missing():
            try:
                arrival = self.arrivals.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                raise Lost("late", contributions.missing()[0]) from None
            if isinstance(arrival.report, RuntimeError):
                # A line breaks when its worker dies, or after so long that it is late in any case.
                dead = arrival.worker in self._communicator.missing_ranks()
                raise Lost("dead" if dead else "late", arrival.worker) from arrival.report
            contributions.take(arrival.worker, arrival.report)


def lead(state: State, run: Run, communicator: Communicator, lines: Mapping[int, Line], options: Asynchronous) -> None:
    """The master's iterations, an update each. `state` is brought forward in place.

    Raises:
        DeadRank, LateRank: on every rank that lives; on a late one when it arrives.
    """
    inbox = Inbox(communicator, options.patience_s)
    carriers = {worker: Carrier(worker, line, inbox.arrivals) for worker, line in lines.items()}
    for carrier in carriers.values():
        carrier.start()
    try:
        _update(state, run, inbox, carriers, options)
        best = state.best
        _dismiss(carriers, Reply("end", best.weights.flat(), -1, best.iteration, best.loss), options.patience_s)
    except Lost as lost:
        with contextlib.suppress(Lost):  # the culprit does not take its leave, which is known
            _dismiss(carriers, Reply(lost.order, state.agreed.flat(), lost.culprit), options.patience_s)
        raise failure(lost.order, lost.culprit, communicator.rank) from lost.__cause__


def _update(state: State, run: Run, inbox: Inbox, carriers: Mapping[int, Carrier], options: Asynchronous) -> None:
    recorder = run.recorder
    resumed = state.iteration > 0  # only the workers know what they had sent
    contributions = Contributions(
        state.agreed.flat(), len(carriers), options.arrivals, options.staleness, known=not resumed
    )
    start_s = time.perf_counter() - state.elapsed_s
    state.stopped = None
    while state.iteration < run.iterations and state.stopped is None:
        recorder.window()
        with recorder.waiting(TO_MASTER):
            inbox.collect(contributions)
        vector, arrived, oldest = contributions.update()
        state.agreed = state.weights = state.agreed.unflat(vector)
        state.iteration += 1
        recorder.mark(MEAN)
        for worker in arrived:
            carriers[worker].reply(Reply("go on", vector))
        scores = Scores.of(state.agreed, run.monitored)
        progress = progress_of(
            state.iteration,
            scores,
            contributions.splits(),
            staleness=oldest,
            elapsed_s=time.perf_counter() - start_s,
        )
        recorder.mark(FIGURES)
        state.advance(progress, run.stopping)
        if run.on_iteration is not None:
            run.on_iteration(progress)


def _dismiss(carriers: Mapping[int, Carrier], reply: Reply, patience_s: float) -> None:
    """Answers every worker's report, the one that waits or the next, and waits until all have the answer.

    Raises:
        Lost: a worker has not come for it.
    """
    for carrier in carriers.values():
        carrier.reply(reply)
    deadline_s = time.monotonic() + patience_s
    for worker, carrier in carriers.items():
        carrier.join(max(0.0, deadline_s - time.monotonic()))
        if not carrier.dismissed:
            raise Lost("late" if carrier.is_alive() else "dead", worker)
