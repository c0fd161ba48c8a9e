"""The device's queue: what is submitted takes its turn, in order, and the host goes on at once.

    queue = DeviceQueue()
    end_s = queue.submit(5.0)      # returns at once; the device is busy for 5 ms from now, or from the end of its work
    queue.wait(end_s)              # the host sleeps, its core is free

The device has no thread. Its work takes as long as it is said to, so that the end of a piece is known when the piece is
submitted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class DeviceQueue:
    """Emulates one stream of one device.

    Attributes:
        clock: the time in seconds; `sleep`: waits that long.
        free_s: the time at which all submitted work will have ended.
        busy_s: the total duration of all submitted work.
    """

    clock: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep
    free_s: float = 0.0
    busy_s: float = 0.0

    def submit(self, ms: float) -> float:
        """Occupies the device for `ms`, after all work submitted before. Returns the time at which this work will have
        ended.
        """
        self.free_s = max(self.clock(), self.free_s) + ms / 1e3
        self.busy_s += ms / 1e3
        return self.free_s

    def wait(self, end_s: float) -> None:
        """Blocks the host until the time `end_s`, at which a piece of work ends."""
        while (left_s := end_s - self.clock()) > 0:
            self.sleep(left_s)


QUEUE = DeviceQueue()
"""That of this process, which is one rank."""
