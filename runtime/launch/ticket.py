"""Tickets: a ticket represents a submitted launch of a collective, and can be waited for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from embrace_fx.runtime.launch.recorder import OUTSIDE
from embrace_fx.runtime.ranks.communicator import InFlight
from embrace_fx.vocabulary.operation_id import OperationId

if TYPE_CHECKING:
    from embrace_fx.runtime.launch.launch_queue import LaunchQueue

Launch = Callable[[], InFlight]


class Dropped(Exception):
    """Raised when waiting for a launch that was dropped, because a rank has given up its backward."""


@dataclass
class Ticket:
    """A submitted launch of a collective, which can be waited for.

    Attributes:
        id: the launch's id.
        window: the recorder's number of the window in which it was submitted.
        done: whether the collective has completed or, on a device, the current stream waits for it.
        started_s, ended_s: `time.perf_counter` when the collective was launched and when it completed.
    """

    id: OperationId
    launch: Launch | None
    sent_bytes: int = 0
    window: int = OUTSIDE
    started_s: float = 0.0
    ended_s: float = 0.0
    value: Tensor | None = None
    work: Any = None
    measured: Callable[[], int] | None = None
    queue: LaunchQueue = field(default=None)  # type: ignore[assignment]
    done: bool = False
    dropped: bool = False
    wanted: bool = False  # whether a wait that flushes launches waits for it
    tells: bool = True  # whether the time in flight is that of the launch alone

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
        assert self.value is not None
        return self.value
