"""Combines the recordings of all ranks to a measured timeline on one clock."""

from __future__ import annotations

import time
from dataclasses import replace
from statistics import median

from embrace_fx.runtime.launch.recorder import Recording, compute_spans
from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.vocabulary.schedule import MemoryAt, Operation, Span, StepGraph, Timeline, Wait

ROUNDS = 9
"""Exchanges of clocks; a few delayed ones do not change a median of nine."""


def gather_timeline(communicator: Communicator, recording: Recording, steps: StepGraph) -> Timeline:
    """Combines the recordings of all ranks into one timeline of the operations `steps`, and returns it on every rank.
    Collective.

    Only complete windows (a backward and the next forward) are included. A recording of a single step is included
    whole. Times are in milliseconds since the start of the first window of rank 0.
    """
    offset_s = _clock_offset(communicator)
    everyone = communicator.gather((recording, offset_s), tuple[Recording, float])
    complete = min(each.window for each, _ in everyone)  # leave out the last window, which may be incomplete
    if not complete:
        everyone, complete = [(_single_step(each), offset) for each, offset in everyone], 1
    marks = everyone[0][0].marks
    zero_s = next((when for mark, window, when in marks if mark is None and window == 0), 0.0) - everyone[0][1]
    spans: list[Span] = []
    waits: list[Wait] = []
    memory: list[MemoryAt] = []
    for rank, (each, offset) in enumerate(everyone):
        found, stood = _rank_timeline(rank, each, steps, zero_s + offset)
        spans += [span for span in found if 0 <= span.window < complete]
        waits += [wait for wait in stood if 0 <= wait.window < complete]
        memory += _memory_growth(rank, each, zero_s + offset)
    return Timeline(tuple(spans), tuple(waits), communicator.world_size, steps.dependences, tuple(memory))


def _single_step(recording: Recording) -> Recording:
    """Returns the recording of a single step as one complete window. A window is a backward and the next forward; in a
    single step, the forward runs before the backward, and would be assigned to an earlier window.
    """
    return replace(
        recording,
        marks=[(each, 0, when) for each, _, when in recording.marks if each is not None],
        waits=[(launch, 0, start, end) for launch, _, start, end in recording.waits],
        transfers=[replace(each, window=0) for each in (*recording.before, *recording.transfers)],
    )


def _memory_growth(rank: int, recording: Recording, zero_s: float) -> list[MemoryAt]:
    """Returns how a rank's memory in use has changed since the recording's start, in time since `zero_s`."""
    if len({nbytes for _, nbytes in recording.memory}) < 2:
        return []
    return [MemoryAt(rank, (at - zero_s) * 1e3, nbytes - recording.memory[0][1]) for at, nbytes in recording.memory]


def _rank_timeline(rank: int, recording: Recording, steps: StepGraph, zero_s: float) -> tuple[list[Span], list[Wait]]:
    """Converts one rank's recording to (spans, waits), in milliseconds since `zero_s` of the rank's clock."""
    known = {operation.id: operation for operation in steps.operations}

    def ms(seconds: float) -> float:
        """Converts seconds of the recording to milliseconds since `zero_s`."""
        return (seconds - zero_s) * 1e3

    transfers = [(each.launch, each.window, each.started_s, each.ended_s) for each in recording.transfers]
    spans = [
        Span(known.get(which) or Operation.from_id(which, 0.0), window, rank, ms(start), ms(end))
        for which, window, start, end in [*compute_spans(recording), *transfers]
    ]
    waits = [
        Wait(str(launch), launch.lane, window, rank, ms(start), ms(end))
        for launch, window, start, end in recording.waits
        if window >= 0
    ]
    return spans, waits


def _clock_offset(communicator: Communicator) -> float:
    """Measures by how many seconds this rank's clock is ahead of the clock of rank 0. Collective."""
    clocks: list[list[float]] = []
    now = 0.0
    for _ in range(ROUNDS + 1):
        clocks.append(communicator.gather(now, float))
        now = time.perf_counter()
    return median(round_[communicator.rank] - round_[0] for round_ in clocks[1:])
