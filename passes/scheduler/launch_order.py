"""Decides at compile time in which order a step launches collectives. The order is the same on all ranks.

Contract
    A pure function of the step's graph. A schedule never deadlocks, is in simulation never slower than the order in
    which communication becomes ready, and is the same on every machine: ties are broken by name, and the search is
    bounded by a count, not by time.

    order                     while the link is free: launch the ready communication with the least key
    policies                  readiness_key | embrace_key: two such keys
    schedule                  the best policy's order, then moves and swaps that shorten the step

Source: 2D communication scheduling, EmbRace (ICPP 2022, section 4), which runs a priority queue during training. Here
the queue runs once, before, on a simulated machine (`link_machine.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from embrace_fx.passes.scheduler.launch_search import improve_order
from embrace_fx.passes.scheduler.link_bound import link_bound_ms
from embrace_fx.passes.scheduler.link_machine import LinkMachine
from embrace_fx.vocabulary.schedule import SCHEDULES, Operation, Schedule, StepGraph

_WARM_UP_WINDOWS = 3


@dataclass(frozen=True)
class Ready:
    """A collective whose data is ready while the link is free, so that it may be launched next.

    Attributes:
        operation: the collective.
        ready_ms: the time when the last operation that it depends on ended, in milliseconds since the backward began.
        needed_at: the number of compute operations before the first one that needs the collective's result; infinite if
            none needs it.
    """

    operation: Operation
    ready_ms: float
    needed_at: float


Key = Callable[[Ready], Any]
"""A policy: the candidate with the least key is launched; of equal ones, the first by name."""


def readiness_key(candidate: Ready) -> float:
    """Returns a candidate's sort key for launching collectives in the order in which they become ready."""
    return candidate.ready_ms


def embrace_key(candidate: Ready) -> tuple[int, float]:
    """Returns a candidate's sort key for the launch order of the EmbRace paper (section 4): first ids and rows, then
    the collectives that the next forward needs first, and last the delayed gradients.
    """
    classes = {"gradients": 0, "ids": 0, "lookups": 0, "delayed": 2}
    return classes.get(candidate.operation.kind, 1), candidate.needed_at


POLICIES: tuple[Key, ...] = (embrace_key, readiness_key)
"""In order of preference, where two are equally fast."""


def schedule(steps: StepGraph, name: str, source: str = "cost model") -> Schedule:
    """Decides the order in which a step launches its collectives, and predicts the step's time.

    Args:
        name: one of `SCHEDULES`. "none" launches collectives as they become ready.
        source: where the durations in `steps` come from: "cost model" or "profile".

    Raises:
        ValueError: the name is unknown, or the step has no legal order.
    """
    if name not in SCHEDULES:
        raise ValueError(f"There is no schedule {name!r}. Pass one of {', '.join(SCHEDULES)}.")
    machine = LinkMachine(steps)
    naive = priority_order(machine, readiness_key)
    chosen = (
        naive
        if name == "none"
        else improve_order(machine, [priority_order(machine, key) for key in POLICIES], link_bound_ms(steps))
    )
    timeline, critical_path = machine.make_timeline(machine.run(machine.sequence(chosen)), chosen)
    return Schedule(name, machine.names(chosen), steps, timeline, critical_path, source)


def quick_step_ms(steps: StepGraph) -> float:
    """Predicts a step's milliseconds under the best priority rule, without searching for a better order."""
    machine = LinkMachine(steps)
    return min(machine.run(machine.sequence(priority_order(machine, key))).step_ms for key in POLICIES)


# -- list scheduling ---------------------------------------------------------------------------------------------------


def priority_order(machine: LinkMachine, key: Key) -> list[int]:
    """Returns the order in which a priority queue with this sort key launches collectives on the simulated machine.

    Windows (a backward and the next forward) are simulated until the link is as busy as in training.

    Raises:
        ValueError: the step has no legal order.
    """
    queue = _QueueSimulation(machine, key)
    for _ in range(_WARM_UP_WINDOWS - 1):
        queue.window()
    return queue.window()


class _QueueSimulation:
    """Simulates steps in which the ready collective with the least sort key is launched whenever the link is free."""

    def __init__(self, machine: LinkMachine, key: Key) -> None:
        self._machine = machine
        self._key = key
        self._needed = _first_need(machine)
        self._processor = self._link = 0.0  # when the processor, the link and each lane are free
        self._finished: list[list[float]] = []  # for each simulated window, when its operations ended
        self._ends: list[float | None] = []  # when this window's operations ended; None if they have not run
        self._ran = 0  # the number of compute operations of this window that have run
        self._copies: list[int] = []  # positions of the window's host-device copies that have not run yet

    def window(self) -> list[int]:
        """Simulates the next window (a backward and the next forward). Returns its collectives in launch order."""
        machine, begun = self._machine, self._processor
        self._ends, self._ran, self._copies = [None] * len(machine.operations), 0, machine.copies_in_order
        waiting, order = list(range(machine.count, machine.copying)), list[int]()
        self._run_compute()
        while waiting:
            times = {k: ready for k in waiting if (ready := self._ready_at_ms(k)) is not None}
            if not times:
                # No operation can run: `sequence` raises and names the blocked one.
                machine.sequence([*order, *waiting])
                raise AssertionError(
                    "no collective can be launched next, but sequence() found no blocked operation. Please report this "
                    "bug of embrace_fx."
                )
            self._link = max(self._link, min(times.values()))
            launched = min(
                (k for k, ready in times.items() if ready <= self._link), key=partial(self._sort_key, times, begun)
            )
            self._ends[launched] = self._link = self._link + machine.durations[launched]
            waiting.remove(launched)
            order.append(launched)
            self._run_compute()
        while self._copies:
            self._run_copy()
        self._finished.append([end for end in self._ends if end is not None])
        return order

    def _sort_key(self, times: Mapping[int, float], free_at_ms: float, k: int) -> tuple[Any, str]:
        """Returns the sort key of a ready operation, followed by its name to break ties.

        Args:
            times: operation -> the time when all that it depends on has ended, in ms.
            free_at_ms: the time when the simulated window (a backward and the next forward) begins.
            k: the index of the operation.
        """
        operation = self._machine.operations[k]
        return self._key(Ready(operation, times[k] - free_at_ms, self._needed[k])), operation.name

    def _run_compute(self) -> None:
        """Runs compute operations in program order, until one needs a collective that has not been launched yet."""
        while self._ran < self._machine.count:
            while self._copies and self._ready_at_ms(self._copies[0]) is not None:
                self._run_copy()
            ready = self._ready_at_ms(self._ran)
            if ready is None:
                return
            self._processor = max(self._processor, ready) + self._machine.durations[self._ran]
            self._ends[self._ran] = self._processor
            self._ran += 1

    def _run_copy(self) -> None:
        """Runs the next copy between device and host whose dependences have ended."""
        first, *self._copies = self._copies
        ready = self._ready_at_ms(first)
        assert ready is not None
        self._ends[first] = ready + self._machine.durations[first]

    def _ready_at_ms(self, operation: int) -> float | None:
        """Returns the time in ms when everything that an operation depends on has ended, or None if some of it has not
        been simulated yet.
        """
        ready = 0.0
        for distance, before in self._machine.dependences(operation):
            if distance > len(self._finished):
                continue
            end = self._finished[-distance][before] if distance else self._ends[before]
            if end is None:
                return None
            ready = max(ready, end)
        return ready


def _first_need(machine: LinkMachine) -> list[float]:
    """Returns, for each operation of the machine, the number of compute operations before the first one that needs its
    result; infinity if none does.
    """
    windows = max(2, machine.reach + 1)
    size, sequence = len(machine.operations), machine.any_sequence()
    causes = [machine.dependences(k) for k in range(size)]
    for k in range(1, machine.count):
        causes[k].append((0, k - 1))
    if machine.count:
        causes[0].append((1, machine.count - 1))
    needed = [[float("inf")] * size for _ in range(windows)]
    for window in reversed(range(windows)):
        for k in reversed(sequence):
            reader = float(window * machine.count + k) if k < machine.count else needed[window][k]
            for distance, before in causes[k]:
                if distance <= window:
                    row = window - distance
                    needed[row][before] = min(needed[row][before], reader)
    return needed[0]
