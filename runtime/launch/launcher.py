"""The launcher: issues a rank's collectives in the schedule's order, while the model computes.

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
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, fx

from embrace_fx.runtime.launch.launch_queue import LaunchQueue, LaunchWindow
from embrace_fx.runtime.launch.recorder import OUTSIDE, RecordedWait
from embrace_fx.runtime.launch.spans import is_profiled, span
from embrace_fx.runtime.launch.ticket import Launch, Ticket
from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.vocabulary.operation_id import OperationId
from embrace_fx.vocabulary.ops import launch_of


class Launcher:
    """Submits a rank's launches in the schedule's order, while the model computes.

    Args:
        order: the launch order of a window.
        of_forward: launches that the forward submits; the backward submits all others.
        queue: the queue that issues them, used by this launcher only.
        communicator: counts every submission, and names missing ranks in a wait that never ends.

    Attributes:
        order: the launch order of the next window.
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
        """Changes the launch order, from the next window on."""
        self.order = tuple(order)

    def missing_from(self, submits: Collection[OperationId], *, forward: bool) -> tuple[OperationId, ...]:
        """Returns the launches of the window's forward or backward that are not in `submits`: a phase's variant may
        leave some out.
        """
        return tuple(o for o in self.order if (o in self._of_forward) == forward and o not in submits)

    def open_window(self, *, held: bool = False) -> None:
        """Ends the current window, whose unsubmitted launches will not come, and begins the next one.

        Args:
            held: whether `release_after` must allow the launches of the next window.
        """
        self.queue.open_window(self.order, held=held)

    def release_after(self, future: torch.futures.Future[Any], agreed: Callable[[], bool]) -> None:
        """Releases or drops the held window's launches once a future has ended.

        Args:
            agreed: called then. If it returns True, the launches are made; otherwise the waits of their tickets raise
                `Dropped`.
        """

        def on_end(future: Any) -> None:
            """Opens the held window if the ranks agree, drops it if they do not, and fails the queue on an error."""
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
        """Returns the launch that a node submits to the launcher or awaits from it, or None if there is none."""
        launch = launch_of(node)
        return launch if launch in self.order else None

    def expects(self, launch: OperationId) -> bool:
        """Returns whether a launch may still be submitted in this window."""
        return launch in self.queue.windows[-1].expected

    def end_backward(self, *, holds: bool = True) -> None:
        """Ends the backward of the current window: its launches that are missing so far will not come.

        Args:
            holds: whether submitted launches may wait for those of the next forward, equal on all ranks.
        """
        with self.queue.lock:
            self.queue.windows[-1].expected &= self._of_forward
        self.queue.issue()
        if not holds:
            self.queue.enqueue_submitted()

    def begin_forward(self) -> None:
        """Ends the backward's part of the window, or opens a window if no backward came before this forward."""
        if self.queue.windows[-1].in_forward:
            self.open_window()
        window = self.queue.windows[-1]
        window.in_forward = True
        if not window.expected <= self._of_forward:
            self.end_backward()

    def skip(self, launches: Collection[OperationId]) -> None:
        """Removes launches from those that the current window expects."""
        if launches:
            with self.queue.lock:
                self.queue.windows[-1].expected.difference_update(launches)
            self.queue.issue()

    def submit(self, which: OperationId, launch: Launch, sent_bytes: int) -> Ticket:
        """Queues a launch at its place in the current window.

        Args:
            sent_bytes: bytes that this rank sends, for the recorder; a guess if they are known only at the launch's
                end.
        """
        queue, recording = self.queue, self.recorder.recording
        assert which in queue.windows[-1].expected, str(which)
        window = OUTSIDE if recording is None else recording.window
        ticket = queue.ticket(which, launch, sent_bytes, window, queue=queue)
        if is_profiled():
            with span("submit", which):
                queue.enqueue(ticket)
        else:
            queue.enqueue(ticket)
        self._communicator.progress.record(which)
        return ticket

    def wait(self, ticket: Ticket) -> Tensor:
        """Waits for the value of a launch; the recorder records a wait that takes time."""
        if ticket.done:
            return ticket.wait()
        recorder = self.recorder
        try:
            if recorder.recording is not None or is_profiled():
                with RecordedWait(recorder, ticket.id):
                    return ticket.wait()
            began_s = time.perf_counter()  # inlined instead of a context manager, because it runs at every launch
            value = ticket.wait()
            recorder.step_times.waited(ticket.id, time.perf_counter() - began_s)
            return value
        except RuntimeError as error:
            self._communicator.name_ranks(error, ticket.id)
            raise

    def flushing(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which launches that are not submitted yet do not hold back those that the caller waits
        for.
        """
        return self.queue.flushing()
