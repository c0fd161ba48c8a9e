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

import contextlib
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, fx

from embrace_fx.runtime.launch.launch_queue import LaunchQueue, LaunchWindow
from embrace_fx.runtime.launch.recorder import OUTSIDE
from embrace_fx.runtime.launch.spans import is_profiled, span
from embrace_fx.runtime.launch.ticket import Launch, Ticket
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
    """

    def __init__(
        self,
        order: Iterable[OperationId],
        of_forward: Iterable[OperationId],
        queue: LaunchQueue,
        communicator: Communicator,
    ) -> None:
        self.order = tuple(order)
        self._of_forward = frozenset(of_forward)
        self.recorder = queue.recorder
        self._communicator = communicator
        self.queue = queue
        queue.windows.append(LaunchWindow(self.order))
        if self.order:
            queue.start(self)

    def close(self) -> None:
        """Waits until all submitted launches have completed, and ends the queue.

        Raises:
            RuntimeError: a collective failed.
        """
        self.queue.close()

    def reorder(self, order: Iterable[OperationId]) -> None:
        """Changes the launch order from the next window on."""
        self.order = tuple(order)

    def missing_from(self, submits: Collection[OperationId], *, forward: bool) -> tuple[OperationId, ...]:
        """Returns the ids of the launches that belong to a phase (the forward or the backward) but are not in
        `submits`.

        Args:
            submits: ids of the launches that a variant of the phase submits.
            forward: whether the phase is the forward; otherwise it is the backward.
        """
        return tuple(o for o in self.order if (o in self._of_forward) == forward and o not in submits)

    def open_window(self, *, held: bool = False) -> None:
        """Begins a window (a backward and the next forward). Launches of the last window that were not submitted are no
        longer expected, so no launch waits for them.

        Args:
            held: whether launches of the new window must wait until `release_after` allows them.
        """
        self.queue.open_window(self.order, held=held)

    def release_after(self, future: torch.futures.Future[Any], agreed: Callable[[], bool]) -> None:
        """Waits in the background for a future that tells whether the launches of the current window may be made. The
        window must have been opened with `held=True`.

        Args:
            future: completes when all ranks have announced what they do. If it has an error, the queue fails with this
                error.
            agreed: called when the future has completed. If it returns True, the launches may be made. If it returns
                False, they are dropped, and waiting for them raises `Dropped`.
        """

        def on_end(future: Any) -> None:
            """Handles the completion of the future. If it has an error, fails the queue with that error. Otherwise,
            allows the launches if `agreed` returns True, and drops them if not.
            """
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
        """Returns the id of the launch that a graph node submits or awaits, or None if this launcher does not make that
        launch.
        """
        launch = launch_of(node)
        return launch if launch in self.order else None

    def expects(self, launch: OperationId) -> bool:
        """Returns whether the launch may still be submitted in the current window (a backward and the next forward)."""
        return launch in self.queue.windows[-1].expected

    def end_backward(self, *, holds: bool = True) -> None:
        """Ends the backward of the current window. The backward's launches that were not submitted are no longer
        expected, so no launch waits for them.

        Args:
            holds: whether launches that were submitted may wait for launches of the next forward that precede them in
                the order. If False, they are made now. Must be equal on all ranks.
        """
        with self.queue.lock:
            self.queue.windows[-1].expected &= self._of_forward
        self.queue.issue()
        if not holds:
            self.queue.enqueue_submitted()

    def begin_forward(self) -> None:
        """Begins the forward of the current window. Opens a new window if the current one already has a forward, and
        ends the backward if it has not ended.
        """
        if self.queue.windows[-1].in_forward:
            self.open_window()
        window = self.queue.windows[-1]
        window.in_forward = True
        if not window.expected <= self._of_forward:
            self.end_backward()

    def skip(self, launches: Collection[OperationId]) -> None:
        """Declares that these launches will not be submitted in the current window, so that no other launch waits for
        them.
        """
        if launches:
            with self.queue.lock:
                self.queue.windows[-1].expected.difference_update(launches)
            self.queue.issue()

    def submit(self, which: OperationId, launch: Launch, sent_bytes: int) -> Ticket:
        """Submits a launch, and returns its ticket. The launch is made when all launches that precede it in the order
        have been made.

        Args:
            which: the launch's id.
            launch: function that starts the collective.
            sent_bytes: the number of bytes that this rank sends, or an estimate if the number is not known yet.
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

    def flushing(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context for waits of the calling thread. If it waits for a launch, the launch may be made before
        preceding launches that have not been submitted yet.
        """
        return self.queue.flushing()
