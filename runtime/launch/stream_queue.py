"""A launch queue on streams: the calling thread enqueues a rank's collectives in the schedule's order, and never waits.

Contract
    As `runtime/launch/launcher.py`: the same windows, the same total order, the same behaviour where it gives way. But
    - a launch is enqueued on the stream of its class, behind an event recorded where it was submitted, and behind the
      end of the launch IN_FLIGHT places before it in the order. Such edges go from earlier to later places only,
      whatever was launched out of turn, so that no two ranks' streams wait for each other.
    - a ticket's `wait` lets the current stream wait for the launch's event.
    - what a launch reads lives until a stream of its owner has waited for it; what it received, which its own stream
      allocated, the allocator keeps for the reader's.
    - models that share a device launch in the order of the calls: each behind what another one launched last.
    Whoever waits for what is held back by launches that are still to come has it leave out of its turn, and says so in
    the ranks' store: another rank, which may stand in a barrier of the user's, does so where it stands at that place.
"""

from __future__ import annotations

import bisect
import contextlib
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from embrace_fx.runtime.launch.launch_queue import LaunchQueue, LaunchWindow
from embrace_fx.runtime.launch.recorder import OUTSIDE, Recorder, Transfer
from embrace_fx.runtime.launch.streams import Event, Streams
from embrace_fx.runtime.launch.ticket import Launch, Ticket
from embrace_fx.runtime.ranks.communicator import InTurn
from embrace_fx.runtime.ranks.groups import LANE_GROUP
from embrace_fx.vocabulary.operation_id import Lane, OperationId
from embrace_fx.vocabulary.schedule import IN_FLIGHT

_REMEMBERED = 4 * IN_FLIGHT
"""Launches among which the one is looked up that a launch has to wait for."""

Place = tuple[int, int]
"""Where a rank stands in the calls that all ranks make: the window's number, and how much it may still submit there."""


@dataclass
class StreamTicket(Ticket):
    """A submitted launch.

    Attributes:
        place: (window, place in the order).
        ready: recorded where it was submitted.
        ended: recorded behind it on the stream of its class; None: held back.
        held: what it reads.
    """

    place: tuple[int, int] = (0, 0)
    ready: Event = None
    ended: Event = None
    held: tuple[Tensor, ...] = ()
    waited: bool = False
    queue: StreamQueue = field(default=None)  # type: ignore[assignment]

    @property
    def done(self) -> bool:
        """Tells whether the current stream has waited for it."""
        return self.waited

    def issue(self) -> None:
        """Makes sure that it is launched.

        Raises:
            RuntimeError: a launch failed.
        """
        if self.ended is None:
            self.queue.issue(hurry=True)
        if self.state.error is not None:
            raise self.state.error
        if self.ended is None:
            raise RuntimeError(
                f"expected '{self.id}' to be launched before it is waited for, found that an earlier launch of class "
                f"{self.id.lane!r} is still to be submitted. Submit or skip that one first."
            )

    def wait(self) -> Tensor:
        """The value, for the current stream, which waits for it. The host does not.

        Raises:
            RuntimeError: a launch failed.
        """
        self.issue()
        assert self.value is not None
        streams = self.queue.streams
        streams.wait(self.ended)
        streams.keep(self.value)
        self.waited, self.held = True, ()
        self.queue.unwaited.pop(self.place, None)
        return self.value


class StreamQueue(LaunchQueue):
    """Enqueues what is due on streams, under its lock.

    Attributes:
        overtook: something has left out of its turn, since the ranks last told each other.
        tells: where this rank stood when it had that done, as others are still to be told; None: they are not.
    """

    def __init__(self, recorder: Recorder, streams: Streams, channel: Mapping[Lane, str] = LANE_GROUP) -> None:
        super().__init__(recorder, channel)
        self.moved_s = math.inf  # however long nothing moves, nothing overtakes
        self.streams = streams
        self.overtook = False
        self.tells: Place | None = None
        self.unwaited: dict[tuple[int, int], StreamTicket] = {}
        self._issued: list[tuple[tuple[int, ...], Lane, Event]] = []  # place, class and end of launches, by place

    def issue(self, hurry: bool = False, agreed: bool = False) -> None:
        """Enqueues everything whose turn it is; with `hurry` all that has been submitted, each class in its order.

        Args:
            agreed: all ranks do so at this place: what leaves is behind what has been issued, and before all that will
                be, as in its turn.
        """
        with self.lock:
            if self.error is not None:
                return
            was_draining, self.draining = self.draining, self.draining or hurry
            try:
                while (ticket := self.next()) is not None:
                    assert isinstance(ticket, StreamTicket)
                    in_turn = agreed or not self._is_out_of_turn(ticket)
                    if not in_turn:  # told before: over gloo the host waits here for a rank that does likewise
                        self.overtook, self.tells = True, self.place()
                    last = self._issued[-1][0] if self._issued else (-1,)
                    self._enqueue(ticket, in_turn, (*last, 1) if agreed else ticket.place)
            except BaseException as error:
                self.error = error
                raise
            finally:
                self.draining = was_draining

    def start(self, owner: object) -> None:
        """Does nothing: what is due is enqueued by whoever submits it."""

    def close(self) -> None:
        """Has the current stream wait for everything submitted."""
        self.catch_up()
        for ticket in list(self.unwaited.values()):
            ticket.wait()

    def note_change(self, window: LaunchWindow) -> None:
        if self.error is not None:
            raise self.error
        self.issue()

    def hurrying(self) -> contextlib.AbstractContextManager[None]:
        """Does nothing: a ticket that is waited for is launched then, out of its turn only where it must be."""
        return contextlib.nullcontext()

    def ticket(self, which: OperationId, launch: Launch, sent_bytes: int) -> Ticket:
        current = self.windows[-1]
        place = (current.number, current.order.index(which))
        ready = self.streams.record(f"{which} ready")
        ticket = StreamTicket(
            which, launch, sent_bytes, self.recorded_window, state=self, place=place, ready=ready, queue=self
        )
        self.unwaited[place] = ticket
        return ticket

    def open_window(self, order: tuple[OperationId, ...], *, held: bool) -> None:
        super().open_window(order, held=held)
        # What nobody has waited for in a whole window, nobody will: its memory may go once this stream has.
        current = self.windows[-1].number
        for place, ticket in list(self.unwaited.items()):
            if place[0] < current - 1 and ticket.ended is not None:
                ticket.wait()

    def took_turns(self) -> bool:
        overtook, self.overtook = self.overtook, False
        return not overtook

    def catch_up(self) -> None:
        """Launches everything that has been submitted, as another rank may have done already. On all ranks."""
        self.issue(hurry=True, agreed=True)
        self.overtook, self.tells = False, None

    @property
    def in_turn(self) -> InTurn | None:
        """The context in which the communicator runs collectives of the calling thread."""
        return self._in_turn

    @contextlib.contextmanager
    def _in_turn(self) -> Iterator[None]:
        """A context in which a collective that is none of the window's is enqueued on the current stream: behind all
        launches that have been issued, and before all that will be."""
        with self.lock:
            place: tuple[int, ...] = (-1,)
            if self._issued:
                place, _, ended = self._issued[-1]
                self.streams.wait(ended)
            self._wait_for_other_models()
            yield
            ended = self.streams.record("collective done")
            self._issued.append(((*place, 1), "compute", ended))
            self.streams.last = (id(self), ended)

    def _wait_for_other_models(self) -> None:
        last = self.streams.last
        if last is not None and last[0] != id(self):
            self.streams.wait(last[1])

    def place(self) -> Place:
        window = self.windows[-1]
        return window.number, len(window.expected)

    def looks(self) -> Callable[[Any, str], None]:
        """Makes what a thread of the ranks' is to call, a few times a second, with its store and a name in it. It does
        not keep this alive.
        """
        found = weakref.ref(self)

        def look(store: Any, name: str) -> None:
            if (queue := found()) is not None:
                queue.look(store, f"{name}/out of turn")

        return look

    def look(self, store: Any, key: str) -> None:
        """Tells other ranks of what has left here out of its turn, or does as one of them has that stood where this
        rank stands. Called a few times a second, by a thread that nothing may hold up.

        Args:
            store: of that thread alone.
            key: where a rank says where it stood.
        """
        tells, self.tells = self.tells, None
        if tells is not None:
            store.set(key, f"{tells}")
        if tells is not None or not self.lock.acquire(blocking=False):
            return  # whoever has the lock launches
        try:
            place, held = self.place(), any(window.waiting for window in self.windows)
        finally:
            self.lock.release()
        if held and store.check([key]) and store.get(key).decode() == f"{place}":
            threading.Thread(target=self._follow, args=(place,), name="embrace_fx launcher", daemon=True).start()

    def _follow(self, place: Place) -> None:
        self.streams.use_device()
        with self.lock, contextlib.suppress(Exception):  # whoever submits or waits next raises it
            if self.place() == place:
                self.issue(hurry=True)

    def _is_out_of_turn(self, ticket: StreamTicket) -> bool:
        windows = [window for window in self.windows if window.number <= ticket.place[0]]
        before = [
            launch
            for window in windows
            for k, launch in enumerate(window.order)
            if (window.number, k) < ticket.place and (launch in window.expected or launch in window.waiting)
        ]
        return bool(before)

    def _enqueue(self, ticket: StreamTicket, in_turn: bool, place: tuple[int, ...]) -> None:
        streams, recorder = self.streams, self.recorder
        recorded = ticket.window > OUTSIDE and recorder.recording is not None
        at = bisect.bisect_left(self._issued, place, key=lambda each: each[0])
        with streams.on(ticket.id.lane, str(ticket.id)):
            streams.wait(ticket.ready)
            if at >= IN_FLIGHT:
                _, lane, ended = self._issued[at - IN_FLIGHT]
                if lane != ticket.id.lane:
                    streams.wait(ended)
            if in_turn:
                self._wait_for_other_models()
            started = recorder.clock.now() if recorded else 0.0
            assert ticket.launch is not None
            launched, ticket.launch = ticket.launch(), None
            if launched.work is not None:
                launched.work.wait()  # the stream does
            ticket.ended = streams.record(f"{ticket.id} done")
            over = recorder.clock.now() if recorded else 0.0
        if in_turn:
            streams.last = (id(self), ticket.ended)
        ticket.value, ticket.held = launched.value, launched.reads
        self._issued.insert(at, (place, ticket.id.lane, ticket.ended))
        del self._issued[:-_REMEMBERED]
        recorder.tally.sent(ticket.sent_bytes)
        if recorded:
            sent = ticket.sent_bytes if launched.sent_bytes is None else launched.sent_bytes()
            recorder.transferred(Transfer(ticket.id, ticket.window, sent, started, over))
