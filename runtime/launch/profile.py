"""Measures the operations of a few steps, once: medians on each rank, then one profile for all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean, median

from embrace_fx.runtime.launch.recorder import Recorder, Recording, compute_spans
from embrace_fx.vocabulary.operation_id import OperationId

PROFILED_AFTER, PROFILED = 5, 6
"""Steps that warm up, and steps that are measured; one or two disturbed ones do not change a median of six."""


class StepProfiler:
    """Records a few steps after warm-up, and computes a profile from the recording."""

    def __init__(self) -> None:
        self._steps = 0
        self._recording: Recording | None = None

    def count(self, recorder: Recorder) -> Profile | None:
        """Counts a step that begins. Returns this rank's profile once all measured steps have ended, otherwise None."""
        self._steps += 1
        if self._steps == PROFILED_AFTER and recorder.recording is None:
            self._recording = recorder.start()
        if self._steps <= PROFILED_AFTER + PROFILED:
            return None
        if recorder.recording is None or recorder.recording is not self._recording:
            self._steps = 0  # start over, because the user is recording these steps
            return None
        return make_profile(recorder.stop())


@dataclass(frozen=True)
class Profile:
    """Medians over a few measured steps on one rank.

    Attributes:
        compute_ms: id of a piece of compute -> milliseconds per step.
        sent_bytes: id of a collective or copy -> bytes that this rank sends.
        byte_ms: id of a read or write of table rows in external storage -> milliseconds per byte.
    """

    compute_ms: dict[OperationId, float]
    sent_bytes: dict[OperationId, int]
    byte_ms: dict[OperationId, float] = field(default_factory=dict)


def make_profile(recording: Recording) -> Profile:
    """Computes a rank's profile: medians over the complete windows (a backward and the next forward) in a recording."""
    windows = range(recording.window)
    spans: dict[OperationId, list[float]] = {}
    for operation, window, start, end in compute_spans(recording):
        if window in windows:  # add up the pieces of an operation that waits have split
            spans.setdefault(operation, [0.0] * len(windows))[window] += (end - start) * 1e3
    sent: dict[OperationId, list[int]] = {}
    took_ms: dict[OperationId, float] = {}
    for transfer in recording.transfers:
        sent.setdefault(transfer.launch, []).append(transfer.sent_bytes)
        if transfer.launch.lane == "storage":
            took = (transfer.ended_s - transfer.started_s) * 1e3
            took_ms[transfer.launch] = took_ms.get(transfer.launch, 0.0) + took
    return Profile(
        {operation: median(values) for operation, values in spans.items()},
        {launch: round(median(values)) for launch, values in sent.items()},
        {launch: ms / sum(sent[launch]) for launch, ms in took_ms.items()},
    )


def agree_on_profile(everyone: Sequence[Profile]) -> Profile:
    """Combines all ranks' profiles: compute times of the slowest rank, mean sent bytes, the slowest storage."""
    slowest = max(everyone, key=lambda each: sum(each.compute_ms.values()))
    launched = {launch for each in everyone for launch in each.sent_bytes}
    sent = {launch: round(mean(each.sent_bytes.get(launch, 0) for each in everyone)) for launch in launched}
    moved = {launch for each in everyone for launch in each.byte_ms}
    paces = {launch: max(each.byte_ms.get(launch, 0.0) for each in everyone) for launch in moved}
    return Profile(slowest.compute_ms, sent, paces)
