"""A launch queue on CUDA streams: the calling thread enqueues collectives in the order of the schedule, and never
waits.

Contract
    As `runtime/launch/launcher.py`: the same windows, the same total order, the same exceptions to it. But
    - a launch is enqueued on the stream of its class, behind an event recorded where it was submitted, and behind the
      end of the launch IN_FLIGHT places before it in the order. Such edges go from earlier to later places only,
      whatever was launched out of turn, so that no two ranks' streams wait for each other.
    - a ticket's `wait` lets the current stream wait for the launch's event.
    - a launch's inputs live until a stream of their owner has waited for the launch; its results, which its own stream
      allocated, are kept by the allocator for the reader's stream.
    - models that share a device launch in the order of their calls: each behind the last launches of the other one.
      A backward's end holds nothing back then. Otherwise a rank that alone reads a gradient would launch it before
      the other model's next launches, and the other ranks after them.
    A wait for a launch that is held back by launches not yet submitted makes it leave out of turn, and writes so into
    the ranks' store: another rank, which may be in a barrier of the user's, then does the same at that place.
"""

from __future__ import annotations

import bisect
import contextlib
import math
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from embrace_fx.runtime.launch.launch_queue import WAITING, LaunchQueue, Ticket
from embrace_fx.runtime.launch.recorder import OUTSIDE, Recorder, Transfer
from embrace_fx.runtime.launch.streams import Event, Streams
from embrace_fx.runtime.ranks.communicator import InTurn
from embrace_fx.runtime.ranks.groups import LANE_GROUP
from embrace_fx.vocabulary.operation_id import Lane, OperationId
from embrace_fx.vocabulary.schedule import IN_FLIGHT

_REMEMBERED = 4 * IN_FLIGHT
"""Number of recent launches kept to find the one that a launch must wait for."""

Place = tuple[int, int]
"""A rank's position in the calls that all ranks make: (the window's number, how much it may still submit there); a
launch's: (the window's number, its place in the order)."""


class StreamTicket(Ticket):
    """A submitted launch of a collective, which runs on a CUDA stream.

    Attributes:
        ready: the CUDA event recorded when the launch was submitted.
        ended: the CUDA event recorded after the collective, or None if it has not been enqueued.
    """

    place: Place
    ready: Event
    ended: Event = None
    queue: StreamQueue

    def issue(self) -> None:
        """Enqueues the collective on its CUDA stream, even if preceding launches have not been submitted yet.

        Raises:
            RuntimeError: a launch failed, or a preceding launch of the same class has not been submitted.
        """
        if self.ended is None:
            self.queue.issue(out_of_turn=True)
        if self.queue.error is not None:
            raise self.queue.error
        if self.ended is None:
            raise RuntimeError(
                f"'{self.id}' was awaited before it could be launched, because a collective that precedes it in lane "
                f"{self.id.lane!r} has not been submitted. Submit or skip the preceding collective first."
            )

    def has_ended(self) -> bool:
        """Returns whether the collective has ended on the device, without waiting."""
        return self.ended is not None and self.queue.streams.has_passed(self.ended)

    def wait(self) -> Tensor:
        """Makes the current CUDA stream, but not the host, wait for the collective. Returns its result.

        Raises:
            RuntimeError: a launch failed.
        """
        if self.ended is None or self.queue.error is not None:
            self.issue()
        streams = self.queue.streams
        streams.wait(self.ended)
        streams.keep(self.value)
        self.done, self.reads = True, ()
        self.queue.unwaited.pop(self.place, None)
        return self.value


class StreamQueue(LaunchQueue):
    """Launches a rank's submitted collectives on CUDA streams, in the order of the schedule. The queue has no thread of
    its own; it makes launches when one is submitted or awaited.

    Attributes:
        overtook: whether a launch was made out of order since `was_in_order` or `enqueue_submitted` was last called.
        tells: this rank's position at its last launch out of order. None if there is none, or if it has been reported
            to the other ranks.
    """

    ticket = StreamTicket

    def __init__(self, recorder: Recorder, streams: Streams, channel: Mapping[Lane, str] = LANE_GROUP) -> None:
        super().__init__(recorder, channel)
        # Disables the standstill timeout, after which a queue without streams lets launches overtake others.
        self.moved_s = math.inf
        self.streams = streams
        self.shares_device = streams.are_shared()
        self.overtook = False
        self.tells: Place | None = None
        self.unwaited: dict[tuple[int, int], StreamTicket] = {}
        # (position, lane, event at the end) of each launch, sorted by position.
        self._issued: list[tuple[tuple[int, ...], Lane, Event]] = []
        self._ends: dict[Lane, Event] = {}  # lane -> the event at the end of its last launch

    def issue(self, out_of_turn: bool = False, agreed: bool = False, follows: bool = False) -> None:
        """Enqueues all submitted launches that are due.

        Args:
            out_of_turn: whether to enqueue also those whose preceding launches have not been submitted yet.
            agreed: whether all ranks do the same at this point, so that the launches count as made in order.
            follows: whether another rank has already launched out of order here. If True, the launches do not wait for
                launches of other models on the device.
        """
        with self.lock:
            if self.error is not None:
                return
            was_draining, self.draining = self.draining, self.draining or out_of_turn
            try:
                while any(map(WAITING, self.windows)) and (ticket := self.next()) is not None:
                    assert isinstance(ticket, StreamTicket)
                    in_turn = agreed or not self.draining or not self._is_out_of_turn(ticket)
                    if not in_turn:  # record this before the next call, which over gloo waits for other ranks
                        self.overtook, self.tells = True, self.next_place()
                    self._enqueue(ticket, in_turn, follows)
            except BaseException as error:
                self.error = error
                raise
            finally:
                self.draining = was_draining

    def start(self, owner: object) -> None:
        """Does nothing, because the thread that submits a launch also enqueues it."""

    def close(self) -> None:
        """Enqueues all submitted launches, and makes the current CUDA stream wait for them."""
        self.enqueue_submitted()
        for ticket in list(self.unwaited.values()):
            ticket.wait()

    @contextlib.contextmanager
    def flushing(self) -> Iterator[None]:
        """Opens a context that does nothing, because each wait enqueues its own launch, even out of order."""
        yield

    def enqueue(self, ticket: Ticket) -> None:
        """Adds a submitted launch to the current window, and enqueues all launches that are due."""
        if self.error is not None:
            raise self.error
        assert isinstance(ticket, StreamTicket)
        current = self.windows[-1]
        ticket.place = current.number, current.order.index(ticket.id)
        ticket.ready = self.streams.record(ticket.id, "ready")
        self.unwaited[ticket.place] = ticket
        super().enqueue(ticket)

    def open_window(self, order: tuple[OperationId, ...], *, held: bool) -> None:
        """Begins a window. Frees launches that were not awaited for a whole one, which thus never will be."""
        super().open_window(order, held=held)
        self.shares_device = self.streams.are_shared()
        current = self.windows[-1].number
        for place, ticket in list(self.unwaited.items()):
            if place[0] < current - 1 and ticket.ended is not None:
                ticket.wait()

    def was_in_order(self) -> bool:
        """Returns whether all launches since the last call were enqueued in the order of the schedule."""
        overtook, self.overtook = self.overtook, False
        return not overtook

    def enqueue_submitted(self) -> None:
        """Enqueues all submitted launches, even if preceding launches have not been submitted yet. All ranks call this
        at the same point. Later launches wait for all of these, because ranks may have made them in different orders.
        """
        with self.lock:
            self.issue(out_of_turn=True, agreed=True)
            self.overtook, self.tells = False, None
            if not self._ends:
                return
            with self.streams.on("ids", "caught up"):
                for ended in self._ends.values():
                    self.streams.wait(ended)
                self._wait_for_other_models()
                all_ended = self.streams.record("caught up")
            self._issued, self._ends = [((-1,), "ids", all_ended)] * IN_FLIGHT, {"ids": all_ended}
            self.streams.last = (id(self), all_ended)
            self.streams.out_of_turn.pop(id(self), None)

    @property
    def in_turn(self) -> InTurn | None:
        """Returns a context for launching a collective outside of the queue, in an order that all ranks share."""
        return self._launch_in_order

    @contextlib.contextmanager
    def _launch_in_order(self) -> Iterator[None]:
        """Opens a context for launching a collective on the current CUDA stream, after all earlier launches of this
        queue and before all later ones.
        """
        with self.lock:
            place: tuple[int, ...] = (-1,)
            if self._issued:
                place, _, ended = self._issued[-1]
                self.streams.wait(ended)
            self._wait_for_other_models()
            yield
            ended = self.streams.record("collective done")
            self._issued.append(((*place, 1), "compute", ended))
            self._ends["compute"] = ended
            self.streams.last = (id(self), ended)

    def _wait_for_other_models(self) -> None:
        """Makes the current CUDA stream wait for the last launches of other models."""
        last = self.streams.last
        for other, ended in (*self.streams.out_of_turn.items(), *((last,) if last is not None else ())):
            if other != id(self):
                self.streams.wait(ended)

    def next_place(self) -> Place:
        """Returns this rank's position."""
        window = self.windows[-1]
        return window.number, len(window.expected)

    def agree_on_order(self, store: Any, name: str) -> None:
        """Reports this rank's position to the store, under the key `name`, if it has launched out of order since the
        last call. Otherwise, if another rank has reported the position at which this rank is now, enqueues the same
        launches. The thread that detects dead ranks calls this periodically, and uses the store alone.
        """
        tells, self.tells = self.tells, None
        if tells is not None:
            store.set(name, f"{tells}")
        if tells is not None or not self.lock.acquire(blocking=False):
            return  # the thread that holds the lock makes the launch
        try:
            place, held = self.next_place(), any(window.waiting for window in self.windows)
        finally:
            self.lock.release()
        if held and store.check([name]) and store.get(name).decode() == f"{place}":
            threading.Thread(
                target=self._follow_out_of_order, args=(place,), name="embrace_fx launcher", daemon=True
            ).start()

    def _follow_out_of_order(self, place: Place) -> None:
        """Enqueues all submitted launches, as another rank has done, if this rank is still at `place`."""
        self.streams.use_device()
        with self.lock, contextlib.suppress(Exception):  # the next submission or wait raises the error
            if self.next_place() == place:
                self.issue(out_of_turn=True, follows=True)

    def _is_out_of_turn(self, ticket: StreamTicket) -> bool:
        """Returns whether a launch that precedes this one in the order may still be made."""
        before = (window for window in self.windows if window.number <= ticket.place[0] and window.head() is not None)
        return any((window.number, window.passed) < ticket.place for window in before)

    def _enqueue(self, ticket: StreamTicket, in_turn: bool, follows: bool) -> None:
        """Enqueues a launch on the CUDA stream of its class, behind its inputs and preceding launches. `in_turn` is
        whether all ranks share the order. If `follows`, the launch does not wait for other models on the device.
        """
        streams, recorder, place = self.streams, self.recorder, ticket.place
        recorded = ticket.window > OUTSIDE and recorder.recording is not None
        at = bisect.bisect_left(self._issued, (place,))
        with streams.on(ticket.id.lane, ticket.id):
            streams.wait(ticket.ready)
            if at >= IN_FLIGHT:
                _, lane, ended = self._issued[at - IN_FLIGHT]
                if lane != ticket.id.lane:
                    streams.wait(ended)
            if not follows:
                self._wait_for_other_models()
            started = recorder.clock.now() if recorded else 0.0
            assert ticket.launch is not None
            launched, ticket.launch = ticket.launch(), None
            if launched.work is not None:
                launched.work.wait()  # this makes the stream wait, but not the host
            ticket.ended = streams.record(ticket.id, "done")
            over = recorder.clock.now() if recorded else 0.0
        if in_turn:
            streams.last = (id(self), ticket.ended)
        else:
            streams.out_of_turn[id(self)] = ticket.ended
        ticket.value, ticket.reads = launched.value, launched.reads
        self._issued.insert(at, (place, ticket.id.lane, ticket.ended))
        self._ends[ticket.id.lane] = ticket.ended
        del self._issued[:-_REMEMBERED]
        recorder.step_times.sent_bytes += ticket.sent_bytes
        if recorded:
            sent = ticket.sent_bytes if launched.measured is None else launched.measured()
            recorder.record_transfer(Transfer(ticket.id, ticket.window, sent, started, over))
