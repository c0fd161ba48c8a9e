"""Adds up the training thread's time by category (compute, waits, loader, ..) in every step, for reports and
metrics.

Contract
    A mark costs less than a microsecond: it reads a clock and adds to a number. A step lasts from the start of one
    backward to that of the next. On a device it is the host's time, with the host's waits.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping

from embrace_fx.vocabulary.operation_id import OperationId
from embrace_fx.vocabulary.step_parts import SHARES, Share, time_category

REMEMBERED = 32
"""Number of steps that a report covers."""


class StepTimes:
    """Measures how much time each of the last steps spent in each category, and counts the bytes that this rank has
    sent.

    Attributes:
        steps: (seconds by category, bytes that this rank sent) for each of the last complete steps, in order.
        sent_bytes: bytes of the collectives that have completed since the last step. Any thread may add to it.
    """

    def __init__(self) -> None:
        self.steps: deque[tuple[Mapping[Share, float], int]] = deque(maxlen=REMEMBERED)
        self._step: dict[Share, float] = {}
        self._at_s: float | None = None  # the time of the last mark, or None before the first backward
        self._waited_s = 0.0  # time waited since the last mark
        self.sent_bytes = 0

    def mark(self, operation: OperationId) -> None:
        """Adds the time since the last mark or the step's begin, without waits, to the category of `operation`."""
        if self._at_s is not None:
            share, now_s, step = time_category(operation), time.perf_counter(), self._step
            step[share] = step.get(share, 0.0) + now_s - self._at_s - self._waited_s
            self._at_s, self._waited_s = now_s, 0.0

    def waited(self, launch: OperationId, seconds: float) -> None:
        """Adds the duration of a wait for a launch to the category of the launch."""
        share = time_category(launch)
        self._step[share] = self._step.get(share, 0.0) + seconds
        self._waited_s += seconds

    def window(self) -> None:
        """Ends the current step and begins the next one. Called when a backward begins."""
        now_s = time.perf_counter()
        if self._at_s is not None:
            self._step["between"] = self._step.get("between", 0.0) + now_s - self._at_s - self._waited_s
            self.steps.append((self._step, self.sent_bytes))
        self._step, self.sent_bytes = {}, 0
        self._at_s, self._waited_s = now_s, 0.0

    def shares_ms(self) -> dict[Share, float] | None:
        """Returns the median step's time in each category, not counting the first step. None if there is no other."""
        steps = sorted((parts for parts, _ in [*self.steps][1:]), key=lambda parts: sum(parts.values()))
        if not steps:
            return None
        typical = steps[(len(steps) - 1) // 2]
        return {share: typical.get(share, 0.0) * 1e3 for share in SHARES}
