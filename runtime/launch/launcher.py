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
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor

from embrace_fx.runtime.launch.launch_queue import LaunchQueue, LaunchWindow
from embrace_fx.runtime.launch.spans import is_profiled, span
from embrace_fx.runtime.launch.ticket import Launch, Ticket
from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.vocabulary.operation_id import OperationId


class Launcher:
    """Hands launches to their queue.

    Args:
        order: the launch order of a window.
        of_forward: those of them that the forward submits; all others are the backward's.
        queue: has them leave; this one's alone.
        communicator: told of every submission; in a wait for one that never comes it names the ranks that are missing.
    """

    def __init__(
        self,
        order: Iterable[OperationId],
        of_forward: Iterable[OperationId],
        queue: LaunchQueue,
        communicator: Communicator,
    ) -> None:
        self._order = tuple(order)
        self._of_forward = frozenset(of_forward)
        self.recorder = queue.recorder
        self._communicator = communicator
        self.queue = queue
        queue.windows.append(LaunchWindow(self._order))
        queue.start(self)

    def close(self) -> None:
        """Waits until everything submitted has completed, and ends.

        Raises:
            RuntimeError: a collective failed.
        """
        self.queue.close()

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
        self.queue.open_window(self._order, held=held)

    def release_after(self, future: torch.futures.Future[Any], agreed: Callable[[], bool]) -> None:
        """Lets what the held window submits leave once a future has ended, or drops it.

        Args:
            agreed: asked then; whether it may leave. Else the waits of its tickets raise `Dropped`.
        """

        def ended(future: Any) -> None:
            try:
                future.value()
            except BaseException as error:
                self.queue.fail(error)
                return
            with self.queue.lock:
                window = self.queue.windows[-1]
                window.held = False
                if not agreed():
                    window.drop()
            self.queue.note_change(window)

        self.queue.callbacks.add(ended)
        future.add_done_callback(ended)

    def expects(self, launch: OperationId) -> bool:
        """Tells whether a launch of the current window is still to be submitted, and may be."""
        return launch in self.queue.windows[-1].expected

    def leave_backward(self) -> None:
        """Expects no more of what the window's backward submits."""
        with self.queue.lock:
            window = self.queue.windows[-1]
            window.expected &= self._of_forward
        self.queue.note_change(window)

    def enter_forward(self) -> None:
        """Makes sure that there is a window for what a forward submits, also where no backward came before it."""
        if self.queue.windows[-1].in_forward:
            self.open_window()
        self.queue.windows[-1].in_forward = True
        self.leave_backward()

    def skip(self, launches: Collection[OperationId]) -> None:
        """Expects no more of some launches of the current window."""
        if launches:
            with self.queue.lock:
                window = self.queue.windows[-1]
                window.expected.difference_update(launches)
            self.queue.note_change(window)

    def submit(self, which: OperationId, launch: Launch, sent_bytes: int) -> Ticket:
        """Queues a launch at its place in the current window.

        Args:
            sent_bytes: what this rank sends, for the recorder; a guess where what is in flight tells it in the end.
        """
        queue = self.queue
        assert which in queue.windows[-1].expected, str(which)
        ticket = queue.ticket(which, launch, sent_bytes)
        if is_profiled():
            with span("submit", which):
                queue.enter(ticket)
        else:
            queue.enter(ticket)
        self._communicator.progress.note(which)
        return ticket

    def wait(self, ticket: Ticket) -> Tensor:
        """Waits for the value of a launch; the recorder is told of a wait that takes time."""
        if ticket.done:
            return ticket.wait()
        with self._communicator.watching(ticket.id), self.recorder.waiting(ticket.id):
            return ticket.wait()

    def hurrying(self) -> contextlib.AbstractContextManager[None]:
        """A context in which what has not been submitted does not hold up what the caller waits for."""
        return self.queue.hurrying()
