"""Measures what a rank's processor does and when it waits: the measured half of a timeline.

Contract
    Off, a mark tells the tally alone. On, marks cut the calling thread's time into the compute operations of
    `embrace_fx.vocabulary.schedule.StepGraph`, each told by the mark that ends it. On a device,
    whose work comes after the thread that enqueues it, moments are taken on the device's streams by a clock of its own,
    and become times at the end.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Protocol

from embrace_fx.runtime.launch.spans import is_profiled, span
from embrace_fx.runtime.launch.tally import Tally
from embrace_fx.vocabulary.operation_id import OperationId

Moment = Any
"""What a clock hands out: seconds on the host, an event on a stream."""


OUTSIDE = -2
"""The window of what no recording is told of; -1 is that before the first backward of one."""


class Clock(Protocol):
    """Takes moments of a recording."""

    def start(self) -> None:
        """Begins a recording."""

    def now(self) -> Moment:
        """This moment, in the program's order."""

    def stop(self) -> None:
        """Ends a recording: from here on `seconds` may be asked for."""

    def seconds(self, moment: Moment) -> float:
        """A moment on the scale of `time.perf_counter`."""


class HostClock:
    """`time.perf_counter`."""

    def start(self) -> None:
        """There is nothing to prepare."""

    def now(self) -> float:
        return time.perf_counter()

    def stop(self) -> None:
        """There is nothing to wait for."""

    def seconds(self, moment: Moment) -> float:
        return float(moment)


@dataclass(frozen=True)
class Transfer:
    """A launch as it went, seconds of `time.perf_counter`."""

    launch: OperationId
    window: int
    sent_bytes: int
    started_s: float
    ended_s: float


@dataclass
class Recording:
    """Raw marks of one rank, seconds of `time.perf_counter`. `window` counts backwards begun since the start.

    Attributes:
        marks: (operation, window, when): what was done by then; None: the window begins.
        waits: (launch, window, from, to).
        transfers: what was launched and completed meanwhile.
        memory: (when, bytes in use) at each mark.
        before: what was launched before the first window, by the forward of its batch.
    """

    marks: list[tuple[OperationId | None, int, float]] = field(default_factory=list)
    waits: list[tuple[OperationId, int, float, float]] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    window: int = -1
    memory: list[tuple[float, int]] = field(default_factory=list)
    before: list[Transfer] = field(default_factory=list)


@dataclass(frozen=True)
class ComputeSpan:
    """A piece of a compute operation between two waits, seconds of `time.perf_counter`."""

    operation: OperationId
    window: int
    started_s: float
    ended_s: float


def compute_spans(recording: Recording) -> list[ComputeSpan]:
    """Turns marks into spans of compute, less the time spent waiting."""
    spans: list[ComputeSpan] = []
    waits = sorted((start, end) for *_, start, end in recording.waits)
    for (_, _, started), (operation, window, ended) in pairwise(recording.marks):
        if operation is None or window < 0:
            continue
        at = started
        for start, end in waits:
            if at <= start and end <= ended:
                if start > at:
                    spans.append(ComputeSpan(operation, window, at, start))
                at = end
        if ended > at:
            spans.append(ComputeSpan(operation, window, at, ended))
    return spans


class Recorder:
    """Records between `start` and `stop`.

    Args:
        clock: takes the moments.
        bytes_in_use: asked at each mark.

    Attributes:
        tally: told of each step, whether it is recorded or not.
    """

    def __init__(self, clock: Clock | None = None, bytes_in_use: Callable[[], int] | None = None) -> None:
        self._bytes_in_use = bytes_in_use
        self.clock: Clock = clock or HostClock()
        self.recording: Recording | None = None
        self.tally = Tally()
        self._segment: OperationId | None = None  # what the forward computes; None: no forward runs
        self._stands = False

    def window(self) -> None:
        """Notes that a backward begins."""
        self.tally.window()
        if self.recording is not None:
            self.recording.window += 1
            self.recording.marks.append((None, self.recording.window, self.clock.now()))

    def mark(self, operation: OperationId) -> None:
        """Notes that everything since the last mark was this operation, or more of it."""
        self.tally.mark(operation)
        recording = self.recording
        if recording is not None:
            if recording.marks and recording.marks[-1][:2] == (operation, recording.window):
                recording.marks.pop()
            now = self.clock.now()
            recording.marks.append((operation, recording.window, now))
            if self._bytes_in_use is not None:
                recording.memory.append((now, self._bytes_in_use()))

    # A forward's compute is told segment by segment: when it stands still for what is awaited, and when it ends.

    @property
    def in_forward(self) -> bool:
        """Tells whether a forward runs."""
        return self._segment is not None

    def begin_segment(self, operation: OperationId) -> None:
        """Notes that the forward computes this from here on."""
        self._segment, self._stands = operation, False

    def stand(self) -> None:
        """Notes that a forward's compute stands still, until what is awaited is put to use."""
        if self._segment is not None and not self._stands:
            self.mark(self._segment)
        self._stands = True

    def end_forward(self) -> None:
        """Notes that the forward ends."""
        self.stand()
        self.forget_forward()

    def forget_forward(self) -> None:
        """Notes that no forward runs any more."""
        self._segment = None

    def waiting(self, launch: OperationId) -> contextlib.AbstractContextManager[None]:
        """A context in which the thread, or its stream, stands still for a launch."""
        return _Waiting(self, launch)

    def transferred(self, transfer: Transfer) -> None:
        """Notes a launch that has completed, or will have by the recording's end; called by whichever thread saw it."""
        if self.recording is not None:
            (self.recording.transfers if transfer.window >= 0 else self.recording.before).append(transfer)

    def start(self) -> Recording:
        self.clock.start()
        self.recording = Recording()
        return self.recording

    def stop(self) -> Recording:
        """Ends the recording; returns it in seconds, the same object that `start` returned."""
        assert self.recording is not None
        recording, self.recording = self.recording, None
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


class _Waiting(contextlib.AbstractContextManager[None]):
    def __init__(self, recorder: Recorder, launch: OperationId) -> None:
        self._recorder, self._launch = recorder, launch

    def __enter__(self) -> None:
        recorder = self._recorder
        self._recording, self._began_s = recorder.recording, time.perf_counter()
        self._start: Moment = None if self._recording is None else recorder.clock.now()
        self._span = span("wait for", self._launch) if is_profiled() else None
        if self._span is not None:
            self._span.__enter__()

    def __exit__(self, *raised: Any) -> None:
        if self._span is not None:
            self._span.__exit__(*raised)
        recorder, recording = self._recorder, self._recording
        recorder.tally.waited(self._launch, time.perf_counter() - self._began_s)
        if recording is not None:
            recording.waits.append((self._launch, recording.window, self._start, recorder.clock.now()))


class Watch:
    """Tells a recorder of one copy, which begins and ends with this context, in whichever thread.

    Args:
        recorder: None: nobody is told.
        on_host: whether its moments are the host's, whatever the clock takes.
    """

    def __init__(self, launch: OperationId, nbytes: int, recorder: Recorder | None, *, on_host: bool = False) -> None:
        self.launch = launch
        self._nbytes = nbytes
        recording = recorder.recording if recorder is not None else None
        self._window = OUTSIDE if recording is None else recording.window
        self._recorder, self._on_host = recorder, on_host

    def __enter__(self) -> None:
        self._started = self._now()

    def __exit__(self, *_: object) -> None:
        if self._recorder is not None and self._window > OUTSIDE:
            self._recorder.transferred(Transfer(self.launch, self._window, self._nbytes, self._started, self._now()))

    def _now(self) -> Moment:
        if self._recorder is None or self._window == OUTSIDE:
            return 0.0
        return time.perf_counter() if self._on_host else self._recorder.clock.now()
