"""Records when a rank computes, communicates and waits, for a measured timeline.

Contract
    Off, a mark only adds to `StepTimes`, in less than a microsecond. On, marks cut the calling thread's time into the
    compute operations of `embrace_fx.vocabulary.schedule.StepGraph`; the mark at an operation's end names it. On a
    device, which works behind the thread that enqueues, a clock of its own takes moments on the device's streams, which
    become times at the end.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeVar

from embrace_fx.runtime.launch.spans import is_profiled, span
from embrace_fx.vocabulary.operation_id import OperationId
from embrace_fx.vocabulary.step_parts import SHARES, Share, time_category

Result = TypeVar("Result")

Moment = Any
"""A clock's result: seconds on the host, an event on a stream."""


OUTSIDE = -2
"""The window of operations outside of a recording; -1 is the window before a recording's first backward."""


class Clock:
    """A clock for recordings. This one uses the host's `time.perf_counter`."""

    def start(self) -> None:
        """Prepares for a recording that begins now. Does nothing here."""

    def now(self) -> Moment:
        """Returns the current moment. Only the method `seconds` of this clock can convert it."""
        return time.perf_counter()

    def stop(self) -> None:
        """Ends the recording, so that `seconds` can convert its moments. Does nothing here."""

    def seconds(self, moment: Moment) -> float:
        """Converts a moment to seconds of `time.perf_counter`."""
        return float(moment)


Interval = tuple[OperationId, int, float, float]
"""(operation, index of its window, start, end) of a piece of compute or a wait, in seconds of `time.perf_counter`."""


@dataclass(frozen=True)
class Transfer:
    """A completed collective or copy.

    Attributes:
        window: the index, in the recording, of the window (a backward and the next forward) that submitted it.
        sent_bytes: the number of bytes that this rank sent or copied.
        started_s, ended_s: seconds of `time.perf_counter`.
    """

    launch: OperationId
    window: int
    sent_bytes: int
    started_s: float
    ended_s: float


@dataclass
class Recording:
    """Everything that one rank has recorded. Times are in seconds of `time.perf_counter`. A window is a backward and
    the next forward.

    Attributes:
        marks: (operation, index of its window, time at which it ended) for each piece of compute. The operation is None
            where a window begins.
        waits: the waits for launches.
        transfers: the completed collectives and copies.
        window: the index of the current window, or -1 before the first backward.
        memory: (time, bytes in use) at each mark.
        before: collectives and copies that were submitted before the first window.
    """

    marks: list[tuple[OperationId | None, int, float]] = field(default_factory=list)
    waits: list[Interval] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    window: int = -1
    memory: list[tuple[float, int]] = field(default_factory=list)
    before: list[Transfer] = field(default_factory=list)


def compute_spans(recording: Recording) -> list[Interval]:
    """Converts the marks of a recording to spans of compute. Waits are not part of them, and split them."""
    spans: list[Interval] = []
    waits = sorted((start, end) for *_, start, end in recording.waits)
    for (_, _, started), (operation, window, ended) in pairwise(recording.marks):
        if operation is None or window < 0:
            continue
        at = started
        for start, end in waits:
            if at <= start and end <= ended:
                if start > at:
                    spans.append((operation, window, at, start))
                at = end
        if ended > at:
            spans.append((operation, window, at, ended))
    return spans


REMEMBERED = 32
"""Number of steps that a report covers."""


class StepTimes:
    """Measures how much time each of the last steps spent in each category, such as compute, waits and the loader, and
    counts the bytes that this rank has sent. A step lasts from the start of one backward to that of the next. On a
    device, the times are the host's.

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


class Recorder:
    """Records this rank's compute, collectives and waits between `start` and `stop`.

    Args:
        clock: the clock that gives the times, or None for the host's clock.
        bytes_in_use: function that returns the number of bytes of memory in use. Called whenever a piece of compute
            ends. None to record no memory.

    Attributes:
        step_times: adds up the time of each step by category, also while nothing is recorded.
        segment: the id of the forward's current piece of compute, or None outside of a forward.
    """

    def __init__(self, clock: Clock | None = None, bytes_in_use: Callable[[], int] | None = None) -> None:
        self._bytes_in_use = bytes_in_use
        self.clock = clock or Clock()
        self.recording: Recording | None = None
        self.step_times = StepTimes()
        self.mark: Callable[[OperationId], None] = self.step_times.mark
        """Ends a piece of the calling thread's time, which is this operation's."""
        self.segment: OperationId | None = None
        self._stands = False

    def begin_window(self) -> None:
        """Records the beginning of a window (a backward and the next forward)."""
        self.step_times.window()
        if self.recording is not None:
            self.recording.window += 1
            self.recording.marks.append((None, self.recording.window, self.clock.now()))

    def _record(self, operation: OperationId) -> None:
        """Records that a piece of compute ends now, and how much memory is in use."""
        self.step_times.mark(operation)
        recording = self.recording
        assert recording is not None
        if recording.marks and recording.marks[-1][:2] == (operation, recording.window):
            recording.marks.pop()
        now = self.clock.now()
        recording.marks.append((operation, recording.window, now))
        if self._bytes_in_use is not None:
            recording.memory.append((now, self._bytes_in_use()))

    # The compute of a forward is recorded in segments. A segment ends when the forward waits or ends.

    def begin_segment(self, operation: OperationId) -> None:
        """Records that the forward begins a piece of compute."""
        self.segment, self._stands = operation, False

    def pause_segment(self) -> None:
        """Records the end of the forward's current piece of compute, because the forward starts to wait."""
        if self.segment is not None and not self._stands:
            self.mark(self.segment)
        self._stands = True

    def end_forward(self) -> None:
        """Records that the forward has ended."""
        self.pause_segment()
        self.segment = None

    @contextlib.contextmanager
    def waiting(self, launch: OperationId) -> Iterator[None]:
        """Opens a context that records a wait for a launch. Either the host thread or its CUDA stream waits."""
        recording, began_s = self.recording, time.perf_counter()
        start: Moment = None if recording is None else self.clock.now()
        try:
            with span("wait for", launch):
                yield
        finally:
            self.step_times.waited(launch, time.perf_counter() - began_s)
            if recording is not None:
                recording.waits.append((launch, recording.window, start, self.clock.now()))

    def timed(self, launch: OperationId, call: Callable[..., Result], *arguments: Any) -> Result:
        """Calls `call(*arguments)`, which waits for a launch, and records the wait. Returns the call's result."""
        if self.recording is not None or is_profiled():
            with self.waiting(launch):
                return call(*arguments)
        began_s = time.perf_counter()  # no context manager, because this runs twice in every step
        value = call(*arguments)
        self.step_times.waited(launch, time.perf_counter() - began_s)
        return value

    def record_transfer(self, transfer: Transfer) -> None:
        """Records a collective or copy that completes before the recording ends. Any thread may call this."""
        if self.recording is not None:
            (self.recording.transfers if transfer.window >= 0 else self.recording.before).append(transfer)

    def start(self) -> Recording:
        """Starts a new recording, and returns it."""
        self.clock.start()
        self.recording, self.mark = Recording(), self._record
        return self.recording

    def stop(self) -> Recording:
        """Ends the recording, converts its times to seconds, and returns it."""
        assert self.recording is not None
        recording, self.recording = self.recording, None
        self.mark = self.step_times.mark
        self.clock.stop()
        seconds = self.clock.seconds
        recording.marks = [(operation, window, seconds(at)) for operation, window, at in recording.marks]
        recording.waits = [
            (launch, window, seconds(start), seconds(end)) for launch, window, start, end in recording.waits
        ]
        recording.memory = [(seconds(at), nbytes) for at, nbytes in recording.memory]
        for transfers in (recording.transfers, recording.before):
            transfers[:] = (
                replace(each, started_s=seconds(each.started_s), ended_s=seconds(each.ended_s)) for each in transfers
            )
        return recording


class RecordedCopy:
    """A context that records when a copy of `nbytes` bytes runs, in the window in which the context is made. Any thread
    may enter it.

    Args:
        recorder: the recorder, or None to record nothing.
        on_host: whether to use the host's clock instead of the recorder's.
    """

    def __init__(self, launch: OperationId, nbytes: int, recorder: Recorder | None, *, on_host: bool = False) -> None:
        self.launch, self._nbytes = launch, nbytes
        recording = None if recorder is None else recorder.recording
        self._recorder, self._window = (None, OUTSIDE) if recording is None else (recorder, recording.window)
        self._clock = Clock() if on_host or recorder is None else recorder.clock

    def __enter__(self) -> None:
        if self._recorder is not None:
            self._started = self._clock.now()

    def __exit__(self, *_: object) -> None:
        if self._recorder is not None:
            transfer = Transfer(self.launch, self._window, self._nbytes, self._started, self._clock.now())
            self._recorder.record_transfer(transfer)
