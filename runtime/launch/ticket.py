"""A submitted launch: its state, its times, and waiting for it."""

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
    """Raised by waits for a launch that was dropped, because a rank has given up its backward."""


@dataclass
class Ticket:
    """A submitted launch.

    Attributes:
        id: the launch's id.
        window: the recorder's window.
        done: whether the launch has completed or, on a device, the current stream has waited for it.
        started_s, ended_s: `time.perf_counter` at the launch and at its completion.
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
        """Drops a launch that will not be made."""
        self.dropped, self.launch = True, None

    def has_ended(self) -> bool:
        """Returns whether the launch has ended, without a wait."""
        return self.done

    def wait(self) -> Tensor:
        """Waits until the collective has completed, and returns its value.

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
