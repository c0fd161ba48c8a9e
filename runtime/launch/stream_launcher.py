"""The launcher on streams: the calling thread enqueues a rank's collectives in the schedule's order, and never waits.

Contract
    As `runtime/launch/launcher.py`: the same windows, the same total order, the same behaviour where it gives way. But
    - a launch is enqueued on the stream of its class, behind an event recorded where it was submitted, and behind the
      end of the launch IN_FLIGHT places before it in the order. Such edges go from earlier to later places only,
      whatever was launched out of turn, so that no two ranks' streams wait for each other.
    - a ticket's `wait` lets the current stream wait for the launch's event.
    - what a launch reads lives until a stream of its owner has waited for it; what it received, which its own stream
      allocated, the allocator keeps for the reader's.
    What is held back by launches that are still to come, a thread issues where nothing is submitted for `STANDSTILL_S`:
    this rank may be standing in a barrier of the user's, while another one waits for it.
"""

from __future__ import annotations

import bisect
import contextlib
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from time import perf_counter

from torch import Tensor

from embrace_fx.runtime.launch import launcher
from embrace_fx.runtime.launch.launcher import Launcher
from embrace_fx.runtime.launch.recorder import OUTSIDE, Recorder, Transfer
from embrace_fx.runtime.launch.streams import Event, Streams
from embrace_fx.runtime.launch.ticket import Launch, Ticket
from embrace_fx.runtime.ranks.communicator import InTurn
from embrace_fx.runtime.ranks.groups import LANE_GROUP
from embrace_fx.vocabulary.operation_id import Lane, OperationId
from embrace_fx.vocabulary.schedule import IN_FLIGHT

_REMEMBERED = 4 * IN_FLIGHT
"""Launches among which the one is looked up that a launch has to wait for."""


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
    issuer: _Issuer = field(default=None)  # type: ignore[assignment]

    @property
    def done(self) -> bool:
        """Whether the current stream has waited for it."""
        return self.waited

    def issue(self) -> None:
        """Makes sure that it is launched.

        Raises:
            RuntimeError: a launch failed.
        """
        if self.ended is None:
            self.issuer.issue(hurry=True)
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
        streams = self.issuer.streams
        streams.wait(self.ended)
        streams.keep(self.value)
        self.waited, self.held = True, ()
        self.issuer.unwaited.pop(self.place, None)
        return self.value


class _Issuer:
    """Enqueues what is due. All under the state's lock; the thread that stands by must not keep the launcher alive."""

    def __init__(self, state: launcher._State, streams: Streams) -> None:
        self.state = state
        self.streams = streams
        self.overtook = False
        self.unwaited: dict[tuple[int, int], StreamTicket] = {}
        self._issued: list[tuple[tuple[int, ...], Lane, Event]] = []  # place, class and end of launches, by place

    def issue(self, hurry: bool = False) -> None:
        """Enqueues everything whose turn it is; with `hurry` all that has been submitted, each class in its order."""
        state = self.state
        with state.changed:
            if state.error is not None:
                return
            was_draining, state.draining = state.draining, state.draining or hurry
            try:
                while (ticket := state.next()) is not None:
                    assert isinstance(ticket, StreamTicket)
                    self.overtook |= self._is_out_of_turn(ticket)
                    self._enqueue(ticket)
            except BaseException as error:
                state.error = error
                raise
            finally:
                state.draining = was_draining

    @contextlib.contextmanager
    def in_turn(self) -> Iterator[None]:
        """A context in which a collective that is none of the window's is enqueued on the current stream: behind all
        launches that have been issued, and before all that will be."""
        with self.state.changed:
            place: tuple[int, ...] = (-1,)
            if self._issued:
                place, _, ended = self._issued[-1]
                self.streams.wait(ended)
            yield
            self._issued.append(((*place, 1), "compute", self.streams.record("collective done")))

    def _is_out_of_turn(self, ticket: StreamTicket) -> bool:
        windows = [window for window in self.state.windows if window.number <= ticket.place[0]]
        before = [
            launch
            for window in windows
            for k, launch in enumerate(window.order)
            if (window.number, k) < ticket.place and (launch in window.expected or launch in window.waiting)
        ]
        return bool(before)

    def _enqueue(self, ticket: StreamTicket) -> None:
        streams, recorder = self.streams, self.state.recorder
        recorded = ticket.window > OUTSIDE and recorder.recording is not None
        place: tuple[int, ...] = ticket.place
        at = bisect.bisect_left(self._issued, place, key=lambda each: each[0])
        with streams.on(ticket.id.lane, str(ticket.id)):
            streams.wait(ticket.ready)
            if at >= IN_FLIGHT:
                _, lane, ended = self._issued[at - IN_FLIGHT]
                if lane != ticket.id.lane:
                    streams.wait(ended)
            started = recorder.clock.now() if recorded else 0.0
            assert ticket.launch is not None
            launched, ticket.launch = ticket.launch(), None
            if launched.work is not None:
                launched.work.wait()  # the stream does
            ticket.ended = streams.record(f"{ticket.id} done")
            over = recorder.clock.now() if recorded else 0.0
        ticket.value, ticket.held = launched.value, launched.reads
        self._issued.insert(at, (ticket.place, ticket.id.lane, ticket.ended))
        del self._issued[:-_REMEMBERED]
        if recorded:
            sent = ticket.sent_bytes if launched.sent_bytes is None else launched.sent_bytes()
            recorder.transferred(Transfer(ticket.id, ticket.window, sent, started, over))


class StreamLauncher(Launcher):
    """Enqueues launches on streams, in the schedule's order.

    Args:
        order, of_forward, recorder, channel: as for `Launcher`.
    """

    def __init__(
        self,
        order: Iterable[OperationId],
        of_forward: Iterable[OperationId],
        recorder: Recorder,
        streams: Streams,
        channel: Mapping[Lane, str] = LANE_GROUP,
    ) -> None:
        self._streams = streams
        super().__init__(order, of_forward, recorder, channel)

    def _start(self) -> None:
        self._issuer = _Issuer(self._state, self._streams)
        thread = threading.Thread(target=_stand_by, args=(self._issuer,), name="embrace_fx launcher", daemon=True)
        thread.start()
        self._stop = weakref.finalize(self, _stop, self._state, thread)

    def close(self) -> None:
        """Has the current stream wait for everything submitted, and ends the thread."""
        self.catch_up()
        for ticket in list(self._issuer.unwaited.values()):
            ticket.wait()
        self._stop()

    @contextlib.contextmanager
    def _changing(self) -> Iterator[launcher._Window]:
        with self._state.changed:
            if self._state.error is not None:
                raise self._state.error
            yield self._state.windows[-1]
            self._state.moved_s = perf_counter()
            self._issuer.issue()
            if self._state.under_way():
                self._state.changed.notify_all()  # something is held back: the thread stands by

    @contextlib.contextmanager
    def hurrying(self) -> Iterator[None]:
        """Does nothing: a ticket that is waited for is launched then, out of its turn only where it must be."""
        yield

    def _ticket(self, which: OperationId, launch: Launch, sent_bytes: int, window: int) -> Ticket:
        current = self._state.windows[-1]
        place = (current.number, current.order.index(which))
        ready = self._streams.record(f"{which} ready")
        ticket = StreamTicket(
            which, launch, sent_bytes, window, state=self._state, place=place, ready=ready, issuer=self._issuer
        )
        self._issuer.unwaited[place] = ticket
        return ticket

    def open_window(self, *, held: bool = False) -> None:
        super().open_window(held=held)
        # What nobody has waited for in a whole window, nobody will: its memory may go once this stream has.
        current = self._state.windows[-1].number
        for place, ticket in list(self._issuer.unwaited.items()):
            if place[0] < current - 1 and ticket.ended is not None:
                ticket.wait()

    def took_turns(self) -> bool:
        """Whether, since it was last asked, everything left in its turn. Where not, all ranks must come to know."""
        overtook, self._issuer.overtook = self._issuer.overtook, False
        return not overtook

    @property
    def in_turn(self) -> InTurn | None:
        """The context in which the communicator runs collectives of the calling thread. It does not keep this alive."""
        return self._issuer.in_turn

    def catch_up(self) -> None:
        """Launches everything that has been submitted, as another rank may have done already. On all ranks."""
        self._issuer.issue(hurry=True)
        self._issuer.overtook = False


def _stand_by(issuer: _Issuer) -> None:
    state = issuer.state
    issuer.streams.use_device()
    while True:
        with state.changed:
            if state.stopped or state.error is not None:
                return
            state.changed.wait(launcher.STANDSTILL_S / 2 if state.under_way() else None)
            if not state.under_way() or perf_counter() - state.moved_s <= launcher.STANDSTILL_S:
                continue
        try:
            issuer.issue(hurry=True)
        except BaseException:  # whoever submits or waits next raises it
            return


def _stop(state: launcher._State, thread: threading.Thread) -> None:
    with state.changed:
        state.stopped = True
        state.changed.notify_all()
    if thread is not threading.current_thread():
        thread.join(timeout=launcher._FAREWELL_S)
