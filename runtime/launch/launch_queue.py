"""Queues submitted launches of collectives, decides which one to launch next, and lets threads wait for them.

Contract
    The launch order makes ranks' collectives match (see `launcher.py`); `next` keeps its rules. One thread launches at
    a time: the one that submitted a due launch, or that saw the end of the launch before it.
    On a device a queue of another kind launches on streams: see `stream_queue.py`.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from operator import attrgetter
from typing import Any

from torch import Tensor

from embrace_fx.runtime.launch.recorder import OUTSIDE, Recorder, Transfer
from embrace_fx.runtime.ranks.communicator import InFlight, InTurn
from embrace_fx.runtime.ranks.groups import LANE_GROUP
from embrace_fx.vocabulary.operation_id import Lane, OperationId
from embrace_fx.vocabulary.schedule import IN_FLIGHT

STANDSTILL_S = 0.5

LATE, SHORTEST_S = 1.5, 0.005
"""A launch is late, and the next one does not wait for it, when it has taken this multiple of its time alone in flight,
and at least this many seconds: another rank, which alone reads a parameter, may have launched others first."""

WAITING = attrgetter("waiting")  # `attrgetter` runs in C, unlike a generator
_FAREWELL_S = 5.0
_POLL_S = 0.001

LARGE_BYTES = 1 << 18
"""Bytes from which on writing the data takes longer than waking the launcher's thread to do it."""


Launch = Callable[[], InFlight]


class Dropped(Exception):
    """Raised when waiting for a launch that was dropped, because a rank has given up its backward."""


class Ticket(InFlight):
    """A submitted launch of a collective.

    Attributes:
        id: the launch's id.
        launch: function that starts the collective; None once it has been started.
        sent_bytes: how many bytes this rank sends, or an estimate if the number is not known yet.
        window: the index of the recorder's current window, or `OUTSIDE` if nothing is recorded.
        done: whether the collective has completed. On a CUDA device, whether the current stream waits for it.
        dropped: whether the collective will never be started.
        wanted: whether a thread waits for the launch in a `flushing` context. The launch may then be made before other
            launches that precede it in the order.
        tells: whether no other launch was in flight at the same time, so that its duration is a good estimate for later
            steps.
        started_s, ended_s: times of `time.perf_counter` at which the collective was started and completed; 0 before.
    """

    def __init__(self, which: OperationId, launch: Launch, sent_bytes: int, window: int, queue: LaunchQueue) -> None:
        self.id, self.sent_bytes, self.window, self.queue = which, sent_bytes, window, queue
        self.launch: Launch | None = launch
        self.started_s = self.ended_s = 0.0
        self.done = self.dropped = self.wanted = False
        self.tells = True

    def drop(self) -> None:
        """Marks the launch as one that will never be made."""
        self.dropped, self.launch = True, None

    def has_ended(self) -> bool:
        """Returns whether the collective has completed, without waiting."""
        return self.done

    def wait(self) -> Tensor:
        """Waits until the collective has completed, and returns its result.

        Raises:
            RuntimeError: the collective, or an earlier one, failed.
            Dropped: the launch was dropped.
        """
        queue = self.queue
        if self.ended_s == 0.0:
            if queue.flushes:
                self.wanted = True
                queue.issue()
            with queue.lock:
                queue.sleepers += 1
                while self.ended_s == 0.0 and not self.dropped and queue.error is None:
                    queue.arrived.wait()
                queue.sleepers -= 1
        if queue.error is not None:
            raise queue.error
        if self.dropped:
            raise Dropped
        return self.value


class LaunchWindow:
    """The launches of one window (a backward and the next forward) in the order of the schedule. Keeps track of which
    of them have been made.

    Attributes:
        held: whether launches must wait until all ranks are known to be in this backward.
        dropped: whether the remaining launches will never be made, because a rank has given up the backward.
        passed: how many launches at the start of the order were made or will not be submitted, as of the last `head`.
        waiting: id -> ticket of the launches that were submitted and have not been made yet.
        expected: the ids of the launches that may still be submitted.
        in_forward: whether the window's forward has begun.
    """

    def __init__(self, order: tuple[OperationId, ...], number: int = 0, *, held: bool = False) -> None:
        self.order, self.number, self.held = order, number, held
        self.dropped = self.in_forward = False
        self.passed = 0
        self.waiting: dict[OperationId, Ticket] = {}
        self.expected = set(order)

    def head(self) -> OperationId | None:
        """Returns the next launch in the order that was or may still be submitted, or None if no launch is left."""
        order, waiting, expected = self.order, self.waiting, self.expected
        while self.passed < len(order) and order[self.passed] not in waiting and order[self.passed] not in expected:
            self.passed += 1
        return order[self.passed] if self.passed < len(order) else None

    def drop(self) -> None:
        """Drops the launches of the window that have not been made. They will never be made."""
        self.dropped = True
        for ticket in self.waiting.values():
            ticket.drop()
        self.waiting.clear()


class LaunchQueue:
    """Launches a rank's submitted collectives in the order of the schedule. Launches are made by any thread that
    submits a launch, by the thread on which a launch completes, and by a thread of the queue.

    The queue's thread refers to the queue and not to the launcher, so that the launcher can be freed.

    Args:
        channel: communication class -> name of the channel that carries it. Launches on one channel never overtake each
            other.
        at_once: the number of launches that may be in flight at the same time.

    Attributes:
        ticket: the class of the objects that represent submitted launches.
        flushes: the number of `flushing` contexts that are currently active.
        shares_device: whether another model launches collectives on the same device.
        draining: whether to make all submitted launches without waiting for launches that precede them in the order.
        callbacks: callbacks that are registered with collectives and have not returned.
        sleepers: the number of threads that wait for the condition `arrived`.
    """

    ticket: type[Ticket] = Ticket

    def __init__(self, recorder: Recorder, channel: Mapping[Lane, str] = LANE_GROUP, at_once: int = IN_FLIGHT) -> None:
        self.recorder, self.channel, self.at_once = recorder, channel, at_once
        self.lock = threading.RLock()  # unlike a condition, a lock is acquired without a Python call
        self.changed = threading.Condition(self.lock)  # wakes the queue's thread
        self.arrived = threading.Condition(self.lock)  # a launch has arrived, failed, or was dropped
        self.windows: deque[LaunchWindow] = deque()
        self.in_flight: deque[Ticket] = deque()
        self.error: BaseException | None = None
        self.stopped = self.issuing = self.draining = self.shares_device = False
        self.wakes_s = -math.inf  # when the queue's thread wakes next; -inf while it is awake
        self.flushes = self.sleepers = 0
        self.moved_s = time.perf_counter()
        self.took_s: dict[OperationId, float] = {}  # launch -> how long it took when it was last alone in flight
        self.callbacks: set[weakref.ref[Any]] = set()
        self._end: Callable[[], object] = lambda: None

    # -- methods for the launcher --------------------------------------------------------------------------------------

    def start(self, owner: object) -> None:
        """Starts the queue's thread, which makes launches until the queue is closed or `owner` is freed."""
        thread = threading.Thread(target=_run_thread, args=(self,), name="embrace_fx launcher", daemon=True)
        thread.start()
        self._end = weakref.finalize(owner, _stop_thread, self, thread)

    def close(self) -> None:
        """Waits until all submitted launches have completed, and ends the thread.

        Raises:
            RuntimeError: a collective failed.
        """
        self.drain()
        self._end()
        if self.error is not None:
            raise self.error

    def drain(self, timeout: float | None = None) -> None:
        """Makes all submitted launches. Waits until they have ended or one has failed, at most `timeout` seconds."""
        self.draining = True
        self.issue()
        with self.lock:
            self.sleepers += 1
            self.arrived.wait_for(
                lambda: self.error is not None or not (self.in_flight or any(map(WAITING, self.windows))), timeout
            )
            self.sleepers -= 1

    def watch(self, callback: Callable[..., None]) -> Callable[..., None]:
        """Registers a callback of a collective, for whose end the queue waits at shutdown. Returns the callback."""
        self.callbacks.add(weakref.ref(callback, self.callbacks.discard))
        return callback

    def enqueue(self, ticket: Ticket) -> None:
        """Adds a submitted launch to the current window, or drops it if that was dropped. Makes what is due."""
        with self.lock:
            window = self.windows[-1]
            window.expected.remove(ticket.id)
            if window.dropped:
                ticket.drop()
            else:
                if not any(map(WAITING, self.windows)):  # a standstill begins now at the earliest
                    self.moved_s = max(self.moved_s, time.perf_counter())
                window.waiting[ticket.id] = ticket
                if ticket.sent_bytes >= LARGE_BYTES and self.wakes_s > -math.inf:
                    self.changed.notify_all()
                    return
        self.issue()

    def open_window(self, order: tuple[OperationId, ...], *, held: bool) -> None:
        """Begins a window with launches in this order. Launches of the last window that were not submitted are no
        longer expected, so no launch waits for them.

        Args:
            held: whether the new window's launches must wait until `LaunchWindow.held` is set to False.
        """
        with self.lock:
            window = self.windows[-1]
            window.expected.clear()
            self.windows.append(LaunchWindow(order, window.number + 1, held=held))
            while len(self.windows) > 1 and not self.windows[0].waiting:
                self.windows.popleft()
        self.issue()

    @contextlib.contextmanager
    def flushing(self) -> Iterator[None]:
        """Opens a context for waits. A launch for which a thread waits in it may be made before preceding launches that
        have not been submitted yet.
        """
        with self.lock:
            self.flushes += 1
        try:
            yield
        finally:
            with self.lock:
                self.flushes -= 1

    def was_in_order(self) -> bool:
        """Returns True, because each rank makes the same launches after a standstill and none need be told."""
        return True

    def enqueue_submitted(self) -> None:
        """Makes all submitted launches, on CUDA streams. Does nothing here."""

    @property
    def in_turn(self) -> InTurn | None:
        """Returns a context for a collective outside of the queue. None here: only launches on CUDA streams need it."""
        return None

    # -- launching -----------------------------------------------------------------------------------------------------

    def issue(self) -> None:
        """Makes all launches that are due now. Does nothing if another thread is already doing so."""
        while not self.issuing:
            with self.lock:  # `windows` is changed only under this lock
                if self.issuing or self.stopped or self.error is not None:  # type: ignore[redundant-expr]  # threads
                    return
                if not any(map(WAITING, self.windows)):
                    return
                if (ticket := self.next()) is None:
                    # The thread wakes for a standstill. Wake it now if a late launch makes the next one due earlier.
                    wakes_s, last = self.wakes_s, self.in_flight[-1] if self.in_flight else None
                    may_be_late = last is not None and last.id in self.took_s and wakes_s > last.started_s + SHORTEST_S
                    if wakes_s == math.inf or (may_be_late and self.next_due_s() < wakes_s):
                        self.changed.notify_all()
                    return
                self.issuing = True
                for each in self.in_flight:
                    each.tells = each.tells and each.id not in self.took_s
                ticket.tells = not self.in_flight or ticket.id not in self.took_s
                self.in_flight.append(ticket)
                self.moved_s = ticket.started_s = time.perf_counter()
            try:
                self._launch(ticket)
            except BaseException as error:
                self.fail(error)
                if not isinstance(error, Exception):  # the user's thread must get exceptions such as KeyboardInterrupt
                    raise
            finally:
                self.issuing = False

    def _launch(self, ticket: Ticket) -> None:
        """Starts the collective of a ticket. The ticket completes when the collective ends."""
        assert ticket.launch is not None
        launched, ticket.launch = ticket.launch(), None
        ticket.value, ticket.work, ticket.measured = launched.value, launched.work, launched.measured
        if launched.work is None:
            self.complete(ticket)
        else:
            launched.work.get_future().add_done_callback(self.watch(partial(self.complete, ticket)))

    def complete(self, ticket: Ticket, future: Any = None) -> None:
        """Records that a launch has completed, or fails with the error of its future. Makes launches that are due."""
        if future is not None:
            try:
                future.value()
            except BaseException as error:
                self.fail(error)
                return
        with self.lock:
            ticket.ended_s = self.moved_s = time.perf_counter()
            ticket.work, ticket.done = None, True
            if ticket.measured is not None:
                ticket.sent_bytes = ticket.measured()
            self.in_flight.remove(ticket)
            if (took_s := ticket.ended_s - ticket.started_s) > STANDSTILL_S:
                self.took_s.pop(ticket.id, None)  # forget the usual time, because this launch waited for a late rank
            elif ticket.tells:
                self.took_s[ticket.id] = took_s
            if self.sleepers:
                self.arrived.notify_all()
        self.issue()
        self.recorder.step_times.sent_bytes += ticket.sent_bytes
        if ticket.window > OUTSIDE:
            self.recorder.record_transfer(
                Transfer(ticket.id, ticket.window, ticket.sent_bytes, ticket.started_s, ticket.ended_s)
            )

    def fail(self, error: BaseException) -> None:
        """Lets all later waits raise the first error, and makes no more launches."""
        with self.lock:
            self.error = self.error or error
            self.arrived.notify_all()
            self.changed.notify_all()

    # -- all methods below are called with the lock held

    def next_due_s(self) -> float:
        """Returns when the queue's thread should next look for launches to make, in seconds of `time.perf_counter`:
        when the last launch in flight becomes late, but at most half of `STANDSTILL_S` from now. Infinity if no launch
        waits.
        """
        if not any(map(WAITING, self.windows)):
            return math.inf
        now_s = time.perf_counter()
        due_s = now_s + STANDSTILL_S / 2
        if self.in_flight:
            last = self.in_flight[-1]
            late_s = last.started_s + max(LATE * self.took_s.get(last.id, -math.inf), SHORTEST_S)
            if last.id in self.took_s and now_s < late_s < due_s:
                return late_s
        return due_s

    def next(self) -> Ticket | None:
        """Takes the launch that is due out of its window, if any. Requires a submitted launch that waits."""
        now_s, beyond = time.perf_counter(), len(self.in_flight) - self.at_once
        standing_still = now_s - self.moved_s > STANDSTILL_S
        if standing_still:
            for each in self.in_flight:
                each.tells = False
                self.took_s.pop(each.id, None)
        elif beyond >= 0:  # launch one more only if the last one is late or its usual time is unknown
            last = self.in_flight[-1]
            took_s = self.took_s.get(last.id)
            if beyond > 0 or (took_s is not None and now_s < last.started_s + max(LATE * took_s, SHORTEST_S)):
                return None
        while len(self.windows) > 1 and not self.windows[0].waiting:
            self.windows.popleft()
        if not (standing_still or self.draining or self.flushes):
            for window in self.windows:
                if window.held:
                    return None
                if (launch := window.head()) is not None:
                    return window.waiting.pop(launch, None)
            return None
        return self._next_out_of_order(standing_still)

    def _next_out_of_order(self, standing_still: bool) -> Ticket | None:
        """Finds a launch to make now although preceding launches of other channels have not been submitted yet. Takes
        it out of its window, and returns its ticket. Returns None if there is no such launch.

        Args:
            standing_still: whether nothing has been launched or completed for `STANDSTILL_S`. If True, the launches of
                every channel may overtake others.
        """
        tickets = (ticket for window in self.windows for ticket in window.waiting.values())
        any_may, passed_over = standing_still or self.draining, set[str]()
        may_overtake = {self.channel[ticket.id.lane] for ticket in tickets if any_may or ticket.wanted}
        for window in self.windows:
            if window.held:
                return None
            window.head()
            for launch in window.order[window.passed :]:
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


def _run_thread(queue: LaunchQueue) -> None:
    """Runs the queue's thread. It makes launches when they become due by time, or when another thread wakes it, and
    looks again after `SHORTEST_S`, the shortest time in which a launch can become late.
    """
    is_woken = False
    while True:
        with queue.lock:
            if not queue.stopped:  # wait until a launch becomes due by time, or until woken
                now_s, queue.wakes_s = time.perf_counter(), queue.next_due_s()
                if is_woken:
                    queue.wakes_s = min(queue.wakes_s, now_s + SHORTEST_S)
                is_woken = queue.changed.wait(None if queue.wakes_s == math.inf else queue.wakes_s - now_s)
                queue.wakes_s = -math.inf
            if queue.stopped:
                return
        queue.issue()


def _stop_thread(queue: LaunchQueue, thread: threading.Thread) -> None:
    """Ends the queue's thread, after launches in flight: one that ended during shutdown would abort the process."""
    deadline_s = time.monotonic() + _FAREWELL_S
    queue.drain(_FAREWELL_S)  # all ranks have submitted the same launches, so they complete unless a rank is gone
    with queue.lock:
        queue.stopped = True
        queue.changed.notify_all()
    if thread is not threading.current_thread():
        thread.join(timeout=_FAREWELL_S)
    # A collective's thread needs the interpreter once more after its callback has run, to free the callback.
    while queue.callbacks and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
