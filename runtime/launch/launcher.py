"""The launcher: issues a rank's collectives in the schedule's order, while the model computes.

Contract
    Everything submitted in a window is launched in the schedule's total order, the same on all ranks, with at most
    `IN_FLIGHT` launches on the way, so that an urgent transfer never queues behind more than what has already left. One
    more leaves where the last one takes longer than it took before: another rank may have launched others first.
    Each communication class has a process group of its own, used by this alone. Whichever thread makes a launch due
    issues it, the one that submits it or the one that sees the end of what stood before it: to wake another takes
    longer. A thread of the launcher's own looks at the clock, and issues what is large for the one that submits it.
    The order between classes is for speed. Within a class it is what makes ranks meet, and never changes; but where
    nothing moves for `STANDSTILL_S` (a rank saves a checkpoint while the others train on), classes overtake each
    other. So whatever has been submitted on all ranks completes, and no rank waits for a launch that is still to come.
    What someone in a hurry waits for (`hurrying`) overtakes launches that are still to come; nothing else does.
    A backward's launches are held until every rank is known to be in that backward: where one is not, all are dropped,
    and no rank has sent what another one will never receive.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from embrace_fx.runtime.launch.launch_queue import LaunchQueue
from embrace_fx.runtime.launch.recorder import OUTSIDE, Recorder
from embrace_fx.runtime.launch.spans import is_profiled, span
from embrace_fx.runtime.launch.ticket import Launch, Ticket
from embrace_fx.runtime.launch.window import LaunchWindow
from embrace_fx.runtime.ranks.communicator import Communicator, InTurn
from embrace_fx.runtime.ranks.groups import LANE_GROUP
from embrace_fx.vocabulary.operation_id import Lane, OperationId
from embrace_fx.vocabulary.schedule import IN_FLIGHT

_FAREWELL_S = 5.0
_POLL_S = 0.001

LARGE_BYTES = 1 << 18
"""From here on, writing what is sent takes longer than waking the thread that does it beside the model's."""


class Launcher:
    """Hands launches to the thread.

    Args:
        order: the launch order of a window.
        of_forward: those of them that the forward submits; all others are the backward's.
        recorder: told of every launch that completes.
        communicator: told of every submission; in a wait for one that never comes it names the ranks that are missing.
        channel: the group that carries a class. Launches of one channel never overtake each other.
        at_once: how many may be on the way: more where none is more urgent than another.
    """

    def __init__(
        self,
        order: Iterable[OperationId],
        of_forward: Iterable[OperationId],
        recorder: Recorder,
        communicator: Communicator,
        channel: Mapping[Lane, str] = LANE_GROUP,
        at_once: int = IN_FLIGHT,
    ) -> None:
        self._order = tuple(order)
        self._of_forward = frozenset(of_forward)
        self.recorder = recorder
        self._communicator = communicator
        self._state = LaunchQueue(recorder, channel, at_once)
        self._state.windows.append(LaunchWindow(self._order))
        self._start()

    def _start(self) -> None:
        """Begins to launch what is submitted."""
        thread = threading.Thread(target=_run, args=(self._state,), name="embrace_fx launcher", daemon=True)
        thread.start()
        self._stop = weakref.finalize(self, _stop, self._state, thread)

    def close(self) -> None:
        """Waits until everything submitted has completed, and ends the thread.

        Raises:
            RuntimeError: a collective failed.
        """
        self._state.draining = True
        self._state.issue()
        with self._state.lock:
            self._state.arrived.wait_for(lambda: self._state.error is not None or not self._state.under_way())
        self._stop()
        if self._state.error is not None:
            raise self._state.error

    def _note_change(self, window: LaunchWindow) -> None:
        """Has whatever is due be launched, once a window has changed."""
        if window.dropped:
            with self._state.lock:
                self._state.arrived.notify_all()
        self._state.issue()

    def reorder(self, order: Iterable[OperationId]) -> None:
        """Launches in another order, from the next window on."""
        self._order = tuple(order)

    def absent(self, submits: Collection[OperationId], *, forward: bool) -> tuple[OperationId, ...]:
        """The launches of a window that belong to a phase, the forward or the backward, and that it does not submit."""
        return tuple(o for o in self._order if (o in self._of_forward) == forward and o not in submits)

    def open_window(self, *, held: bool = False) -> None:
        """Ends the current window, whose unsubmitted launches are not coming any more, and begins the next one.

        Args:
            held: nothing of the next one leaves before `release_after` lets it.
        """
        state = self._state
        with state.lock:
            window = state.windows[-1]
            window.expected.clear()
            state.windows.append(LaunchWindow(self._order, window.number + 1, held=held))
            state.forget_windows()
        self._note_change(window)

    def release_after(self, future: torch.futures.Future[Any], agreed: Callable[[], bool]) -> None:
        """Lets what the held window submits leave once a future has ended, or drops it.

        Args:
            agreed: asked then; whether it may leave. Else the waits of its tickets raise `Dropped`.
        """

        def ended(future: Any) -> None:
            try:
                future.value()
            except BaseException as error:
                self._state.fail(error)
                return
            with self._state.lock:
                window = self._state.windows[-1]
                window.held = False
                if not agreed():
                    window.drop()
            self._note_change(window)

        self._state.callbacks.add(ended)
        future.add_done_callback(ended)

    def expects(self, launch: OperationId) -> bool:
        """Tells whether a launch of the current window is still to be submitted, and may be."""
        return launch in self._state.windows[-1].expected

    def leave_backward(self) -> None:
        """Expects no more of what the window's backward submits."""
        with self._state.lock:
            window = self._state.windows[-1]
            window.expected &= self._of_forward
        self._note_change(window)

    def enter_forward(self) -> None:
        """Makes sure that there is a window for what a forward submits, also where no backward came before it."""
        if self._state.windows[-1].in_forward:
            self.open_window()
        self._state.windows[-1].in_forward = True
        self.leave_backward()

    def skip(self, launches: Collection[OperationId]) -> None:
        """Expects no more of some launches of the current window."""
        if launches:
            with self._state.lock:
                window = self._state.windows[-1]
                window.expected.difference_update(launches)
            self._note_change(window)

    def submit(self, which: OperationId, launch: Launch, sent_bytes: int) -> Ticket:
        """Queues a launch at its place in the current window.

        Args:
            sent_bytes: what this rank sends, for the recorder; a guess where what is in flight tells it in the end.
        """
        state = self._state
        assert which in state.windows[-1].expected, str(which)
        recording = state.recorder.recording
        number = OUTSIDE if recording is None else recording.window
        ticket = self._ticket(which, launch, sent_bytes, number)
        if is_profiled():
            with span("submit", which):
                self._enter(ticket)
        else:
            self._enter(ticket)
        self._communicator.progress.note(which)
        return ticket

    def wait(self, ticket: Ticket) -> Tensor:
        """Waits for the value of a launch; the recorder is told of a wait that takes time."""
        if ticket.done:
            return ticket.wait()
        with self._communicator.watching(ticket.id), self.recorder.waiting(ticket.id):
            return ticket.wait()

    def _enter(self, ticket: Ticket) -> None:
        """Has a ticket wait for its turn."""
        state = self._state
        with state.lock:
            window = state.windows[-1]
            window.expected.remove(ticket.id)
            if window.dropped:
                ticket.drop()
            else:
                state.enters(ticket)
                if ticket.sent_bytes >= LARGE_BYTES and state.wakes_s > -math.inf:
                    state.changed.notify_all()
                    return
        self._note_change(window)

    def _ticket(self, which: OperationId, launch: Launch, sent_bytes: int, window: int) -> Ticket:
        return Ticket(which, launch, sent_bytes, window, state=self._state)

    def took_turns(self) -> bool:
        """Whether, since it was last asked, everything left in its turn; where not, all ranks must come to know.

        The thread launches whatever another rank has launched, in time: nobody needs to know.
        """
        return True

    def catch_up(self) -> None:
        """Launches what another rank may have launched out of turn. The thread does that by itself."""

    @property
    def in_turn(self) -> InTurn | None:
        """The context in which the communicator runs collectives of the calling thread; None: nothing orders them, on
        the host.
        """
        return None

    def hurrying(self) -> contextlib.AbstractContextManager[None]:
        """A context in which what has not been submitted does not hold up what the caller waits for."""
        return _Hurrying(self._state)


class _Hurrying(contextlib.AbstractContextManager[None]):
    def __init__(self, state: LaunchQueue) -> None:
        self._state = state

    def __enter__(self) -> None:
        with self._state.lock:
            self._state.hurried += 1

    def __exit__(self, *_: object) -> None:
        with self._state.lock:
            self._state.hurried -= 1


def _run(state: LaunchQueue) -> None:
    """Launches what time alone has made due, and what it is woken for."""
    while True:
        with state.lock:
            if not state.stopped:
                state.wait_for_change()
            if state.stopped:
                return
        state.issue()


def _stop(state: LaunchQueue, thread: threading.Thread) -> None:
    """Ends the thread, and everything under way: a completion that comes while the interpreter shuts down aborts it."""
    deadline_s = time.monotonic() + _FAREWELL_S
    state.draining = True
    state.issue()
    with state.lock:
        # All ranks have submitted the same, so it completes; unless one is gone.
        state.arrived.wait_for(lambda: state.error is not None or not state.under_way(), timeout=_FAREWELL_S)
        state.stopped = True
        state.changed.notify_all()
    if thread is not threading.current_thread():
        thread.join(timeout=_FAREWELL_S)
    # The thread of a collective needs the interpreter once more after its callback has run: to drop it.
    while state.callbacks and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
