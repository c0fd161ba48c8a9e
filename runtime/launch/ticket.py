"""Tickets: a ticket represents a submitted launch of a collective, and can be waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from embrace_fx.runtime.ranks.communicator import InFlight
from embrace_fx.vocabulary.operation_id import OperationId

if TYPE_CHECKING:
    from embrace_fx.runtime.launch.launch_queue import LaunchQueue

Launch = Callable[[], InFlight]


class Dropped(Exception):
    """Raised when waiting for a launch that was dropped, because a rank has given up its backward."""


class Ticket(InFlight):
    """A submitted launch of a collective. The launcher starts the collective in the order of the schedule.

    Args:
        which: the launch's id.
        launch: function that starts the collective.
        sent_bytes: the number of bytes that this rank sends, or an estimate if the number is not known yet.
        window: the index of the recorder's current window (a backward and the next forward), or `OUTSIDE` if nothing is
            recorded.
        queue: the queue to which the launch was submitted.

    Attributes:
        id: the launch's id.
        launch: function that starts the collective; None once it has been started.
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
