"""The launcher: makes a rank's collectives start in the order of the schedule while the model computes.

Contract
    All launches submitted in a window leave in the schedule's total order, the same on all ranks, with at most
    `IN_FLIGHT` in flight, so that an urgent transfer queues behind no more than these. One more leaves if the last one
    takes longer than before: another rank may have launched others first.
    Each communication class has its own process group, which only the launcher uses. The thread that makes a launch due
    (it submits it, or sees the end of the launch before it) issues it, because waking another thread takes longer. The
    launcher's own thread watches the clock, and issues large launches for the thread that submits them.
    The order between classes is for speed. The order within a class makes ranks' collectives match, and never changes;
    but if nothing moves for `STANDSTILL_S` (a rank saves a checkpoint while the others train on), classes overtake each
    other. So all launches submitted on all ranks complete, and no rank waits for a launch that is not submitted yet.
    Only hurried waits (`flushing`) let a launch overtake launches that are not submitted yet.
    A backward's launches are held until every rank is known to be in that backward; if one is not, all are dropped, and
    no rank has sent data that another one will never receive.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, fx

from embrace_fx.runtime.launch.launch_queue import Launch, LaunchQueue, LaunchWindow, Ticket
from embrace_fx.runtime.launch.recorder import OUTSIDE
from embrace_fx.runtime.launch.spans import is_profiled, span
from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.vocabulary.operation_id import OperationId
from embrace_fx.vocabulary.ops import launch_of


class Launcher:
    """Launches a rank's collectives in the order of the schedule while the model computes.

    Args:
        order: ids of the launches of a window (a backward and the next forward), in order.
        of_forward: ids of the launches that the forward submits. The backward submits all others.
        queue: makes the launches.
        communicator: logs submissions, and names dead or stuck ranks if a wait fails.

    Attributes:
        order: the ids of the launches of the next window, in order.
        close, flushing: methods of the queue.
    """

    def __init__(
        self,
        order: Iterable[OperationId],
        of_forward: Iterable[OperationId],
        queue: LaunchQueue,
        communicator: Communicator,
    ) -> None:
        self.order, self._of_forward = tuple(order), frozenset(of_forward)
        self.queue, self.recorder, self._communicator = queue, queue.recorder, communicator
        self.close, self.flushing = queue.close, queue.flushing
        queue.windows.append(LaunchWindow(self.order))
        if self.order:
            queue.start(self)

    def reorder(self, order: Iterable[OperationId]) -> None:
        """Changes the launch order from the next window on."""
        self.order = tuple(order)

    def missing_from(self, submits: Collection[OperationId], *, forward: bool) -> tuple[OperationId, ...]:
        """Returns the launches of the forward, or else of the backward, that are not in `submits`."""
        return tuple(o for o in self.order if (o in self._of_forward) == forward and o not in submits)

    def open_window(self, *, held: bool = False) -> None:
        """Begins a window (a backward and the next forward). Launches of the last window that were not submitted are no
        longer expected. If `held`, launches of the new window wait until `release_after` allows them.
        """
        self.queue.open_window(self.order, held=held)

    def release_after(self, future: torch.futures.Future[Any], agreed: Callable[[], bool]) -> None:
        """Holds the launches of the current window, opened with `held=True`, until a future has completed. If the
        future has an error, the queue fails with it. If `agreed`, called then, returns False, the launches are dropped,
        and waiting for them raises `Dropped`.
        """

        def on_end(future: Any) -> None:
            """Allows the launches, drops them, or fails the queue."""
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
                    self.queue.arrived.notify_all()
            self.queue.issue()

        future.add_done_callback(self.queue.watch(on_end))

    def launch_of(self, node: fx.Node) -> OperationId | None:
        """Returns the launch that a graph node submits or awaits, or None if this launcher does not make it."""
        launch = launch_of(node)
        return launch if launch in self.order else None

    def expects(self, launch: OperationId) -> bool:
        """Returns whether the launch may still be submitted in the current window."""
        return launch in self.queue.windows[-1].expected

    def end_backward(self, *, holds: bool = True) -> None:
        """Ends the backward of the current window. Its launches that were not submitted are no longer expected. If not
        `holds`, which must be equal on all ranks, its other launches do not wait for those of the next forward before
        them in the order.
        """
        with self.queue.lock:
            self.queue.windows[-1].expected &= self._of_forward
        self.queue.issue()
        if not holds:
            self.queue.enqueue_submitted()

    def begin_forward(self) -> None:
        """Begins the forward of the current window, or of a new one if it has a forward. Ends the backward."""
        if self.queue.windows[-1].in_forward:
            self.open_window()
        window = self.queue.windows[-1]
        window.in_forward = True
        if not window.expected <= self._of_forward:
            self.end_backward()

    def skip(self, launches: Collection[OperationId]) -> None:
        """Declares that no other launch must wait for these, which will not be submitted in the current window."""
        if launches:
            with self.queue.lock:
                self.queue.windows[-1].expected.difference_update(launches)
            self.queue.issue()

    def submit(self, which: OperationId, launch: Launch, sent_bytes: int) -> Ticket:
        """Submits a launch, which is made when all that precede it in the order have been made. `sent_bytes` is the
        number of bytes that this rank sends, or an estimate if the number is not known yet. Returns the ticket to wait
        for.
        """
        queue, recording = self.queue, self.recorder.recording
        assert which in queue.windows[-1].expected, str(which)
        window = OUTSIDE if recording is None else recording.window
        ticket = queue.ticket(which, launch, sent_bytes, window, queue)
        if is_profiled():
            with span("submit", which):
                queue.enqueue(ticket)
        else:
            queue.enqueue(ticket)
        self._communicator.progress.record(which)
        return ticket

    def wait(self, ticket: Ticket) -> Tensor:
        """Waits for a launch, and returns the collective's result. Records the time of the wait."""
        if ticket.done:
            return ticket.wait()
        try:
            return self.recorder.timed(ticket.id, ticket.wait)
        except RuntimeError as error:
            self._communicator.name_ranks(error, ticket.id)
            raise
