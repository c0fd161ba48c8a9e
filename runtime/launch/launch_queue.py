"""Launches on their way out: what has been submitted and is in flight, and which one leaves next.

Contract
    The launch order is what makes ranks meet: see `launcher.py`, whose rules `next` keeps. One thread launches at a
    time, whichever has made something due: it submitted it, or saw the end of what stood before it.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from embrace_fx.runtime.launch.recorder import OUTSIDE, Recorder, Transfer
from embrace_fx.runtime.launch.ticket import Ticket
from embrace_fx.runtime.launch.window import LaunchWindow
from embrace_fx.vocabulary.operation_id import Lane, OperationId

STANDSTILL_S = 0.5

LATE, SHORTEST_S = 1.5, 0.005
"""Times as long as it took when it was last alone on its way, and that at least: then a launch is late, and the next
one does not wait for it. A rank alone that reads a parameter has launched others first."""

_WAITING = attrgetter("waiting")  # called where a generator would be Python's


class LaunchQueue:
    """Launches on their way out: shared by a launcher, which submits them, and by whatever issues them, under one lock.

    A thread that waits for time to pass holds this, and not the launcher, which ends with whoever made it.

    Attributes:
        channel: the group that carries a class.
        at_once: how many may be on the way.
        hurried: how many wait in a hurry.
        draining: everything submitted is to leave, whatever is still to come.
        callbacks: of collectives, run and dropped by threads of theirs.
    """

    def __init__(self, recorder: Recorder, channel: Mapping[Lane, str], at_once: int) -> None:
        self.at_once = at_once
        self.recorder = recorder
        self.channel = channel
        self.lock = threading.RLock()  # to take it is no call of Python, as to take a condition is
        self.changed = threading.Condition(self.lock)  # time alone may let something leave
        self.arrived = threading.Condition(self.lock)  # something has, or failed, or was dropped
        self.windows: deque[LaunchWindow] = deque()
        self.in_flight: deque[Ticket] = deque()
        self.error: BaseException | None = None
        self.stopped = False
        self.issuing = False
        self.wakes_s = -math.inf  # when the thread looks; it does by itself while it is not waiting
        self.hurried = 0
        self.draining = False
        self.moved_s = time.perf_counter()
        self.took_s: dict[OperationId, float] = {}  # by launch, when it was last alone on its way
        self.callbacks: weakref.WeakSet[Any] = weakref.WeakSet()

    def issue(self) -> None:
        """Launches everything whose turn it is, unless another thread does: that one finds what has come since."""
        while not self.issuing:
            with self.lock:
                if self.issuing or self.stopped or self.error is not None:
                    return
                if (ticket := self.next()) is None:
                    if time.perf_counter() + self.until_due_s() < self.wakes_s:
                        self.changed.notify_all()
                    return
                self.issuing = True
                self.leaves(ticket)
            try:
                self._launch(ticket)
            except BaseException as error:
                self.fail(error)
                if not isinstance(error, Exception):  # of the user's thread alone
                    raise
            finally:
                self.issuing = False

    def _launch(self, ticket: Ticket) -> None:
        assert ticket.launch is not None
        launched, ticket.launch = ticket.launch(), None
        ticket.value, ticket.work, ticket.measured = launched.value, launched.work, launched.sent_bytes
        if launched.work is None:
            self.complete(ticket)
            return

        def completed(future: Any) -> None:
            try:
                future.value()
            except BaseException as error:
                self.fail(error)
                return
            self.complete(ticket)

        self.callbacks.add(completed)
        launched.work.get_future().add_done_callback(completed)

    def complete(self, ticket: Ticket) -> None:
        """Notes that a launch has arrived."""
        with self.lock:
            ticket.ended_s = self.moved_s = time.perf_counter()
            ticket.work = None
            if ticket.measured is not None:
                ticket.sent_bytes = ticket.measured()
            self.in_flight.remove(ticket)
            if (took_s := ticket.ended_s - ticket.started_s) > STANDSTILL_S:
                self.took_s.pop(ticket.id, None)  # a rank was elsewhere
            elif ticket.tells:
                self.took_s[ticket.id] = took_s
            self.arrived.notify_all()
        self.issue()
        self.recorder.tally.sent(ticket.sent_bytes)
        if ticket.window > OUTSIDE:
            self.recorder.transferred(
                Transfer(ticket.id, ticket.window, ticket.sent_bytes, ticket.started_s, ticket.ended_s)
            )

    def fail(self, error: BaseException) -> None:
        """Has whoever submits or waits from now on raise an error, the first one."""
        with self.lock:
            self.error = self.error or error
            self.arrived.notify_all()
            self.changed.notify_all()

    # -- everything below is called with the lock held

    def enters(self, ticket: Ticket) -> None:
        """Has a ticket of the current window wait for its turn. Nothing stands still while nothing waits to leave."""
        if not self.waits():
            self.moved_s = max(self.moved_s, time.perf_counter())
        self.windows[-1].waiting[ticket.id] = ticket

    def wait_for_change(self) -> None:
        """Waits until something may leave because of the time that has passed."""
        wait_s = self.until_due_s()
        self.wakes_s = time.perf_counter() + wait_s
        self.changed.wait(None if wait_s == math.inf else wait_s)
        self.wakes_s = -math.inf

    def until_due_s(self) -> float:
        """Seconds until something may leave because nothing else moves, or the last launch is late."""
        if not self.waits():
            return math.inf
        late_s = self.until_late_s()
        return min(late_s if late_s > 0 else math.inf, STANDSTILL_S / 2)

    def next(self) -> Ticket | None:
        """The ticket to launch now, or None."""
        if not self.waits():
            return None
        standing_still = time.perf_counter() - self.moved_s > STANDSTILL_S
        if standing_still:
            for each in self.in_flight:
                each.tells = False
                self.took_s.pop(each.id, None)
        if len(self.in_flight) >= self.at_once + (self.until_late_s() <= 0) and not standing_still:
            return None
        self.forget_windows()
        any_may = standing_still or self.draining
        tickets = (ticket for window in self.windows for ticket in window.waiting.values())
        hurried = any_may or self.hurried
        may_overtake = {self.channel[t.id.lane] for t in tickets if any_may or t.wanted} if hurried else set()
        passed_over: set[str] = set()
        for window in self.windows:
            if window.held:
                return None
            for launch in window.to_come():
                ticket = window.waiting.get(launch)
                if ticket is None and launch not in window.expected:
                    continue
                channel = self.channel[launch.lane]
                may_leave = channel not in passed_over and (not passed_over or channel in may_overtake)
                if ticket is not None and may_leave:
                    return window.waiting.pop(launch)
                if not may_overtake:
                    return None
                passed_over.add(channel)
        return None

    def waits(self) -> bool:
        """Tells whether anything has been submitted that has not left."""
        return any(map(_WAITING, self.windows))

    def forget_windows(self) -> None:
        """Forgets windows that have launched everything, but the current one."""
        while len(self.windows) > 1 and not self.windows[0].waiting:
            self.windows.popleft()

    def until_late_s(self) -> float:
        """Seconds that the last launch may still take without being late; 0 where nobody knows."""
        if not self.in_flight:
            return math.inf
        last = self.in_flight[-1]
        if (took_s := self.took_s.get(last.id)) is None:
            return 0.0
        return last.started_s + max(LATE * took_s, SHORTEST_S) - time.perf_counter()

    def leaves(self, ticket: Ticket) -> None:
        """Has a launch be on its way. One that shares the link with another tells its time only where none is known."""
        for each in self.in_flight:
            each.tells = each.tells and each.id not in self.took_s
        ticket.tells = not self.in_flight or ticket.id not in self.took_s
        self.in_flight.append(ticket)
        self.moved_s = ticket.started_s = time.perf_counter()

    def under_way(self) -> bool:
        """Tells whether anything has been submitted that has not completed."""
        return bool(self.in_flight) or self.waits()
