"""Recordings of all ranks on one clock."""

from __future__ import annotations

import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from embrace_fx.runtime.flow.next_batch import ANNOUNCEMENT
from embrace_fx.runtime.launch import recorder as recorder_module
from embrace_fx.runtime.launch import timeline as timeline_module
from embrace_fx.runtime.launch.profile import Profile, make_profile
from embrace_fx.runtime.launch.recorder import RecordedCopy, Recorder, Recording, Transfer, compute_spans
from embrace_fx.runtime.launch.timeline import gather_timeline
from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.vocabulary.operation_id import BETWEEN, EARLY, chunk_id, compute_id
from embrace_fx.vocabulary.schedule import Dependence, Operation, StepGraph, Timeline
from tests.support.ranks import run_ranks

A, B = compute_id("backward", "a"), compute_id("backward", "b")
CHUNK = chunk_id(0, 0)
STEPS = StepGraph(
    (
        Operation.from_id(EARLY, 1.0),
        Operation.from_id(compute_id("backward", "bucket 0"), 1.0, serves=("bucket 0",)),
        Operation.from_id(CHUNK, 1.0, 100, ("bucket 0",), 100),
    ),
    (Dependence("backward bucket 0", "bucket 0 [0]"),),
    (str(EARLY), "backward bucket 0"),
)
AHEAD_S = 1000.0
"""By how much each rank's clock is ahead of the one before it."""


class Clock:
    """Replaces the module `time` by a rank's own clock."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def perf_counter(self) -> float:
        return time.perf_counter() + AHEAD_S * self._rank


def records(rank: int, world_size: int) -> Timeline:
    """Two whole windows and one that is cut off; on rank 1 yet another one."""
    communicator = Communicator(dist.group.WORLD)
    ahead = AHEAD_S * rank
    dist.barrier()
    now = time.perf_counter() + ahead
    recording = Recording()
    for window in range(3 + (rank == 1)):
        start = now + window
        recording.window = window
        recording.marks += [(None, window, start), (EARLY, window, start + 0.1), (BETWEEN, window, start + 0.5)]
        recording.waits.append((CHUNK, window, start + 0.2, start + 0.3))
        recording.transfers.append(Transfer(CHUNK, window, 100, start + 0.1, start + 0.3))
    recording.waits.append((ANNOUNCEMENT, -1, now - 2, now - 1))
    timeline_module.time, before = Clock(rank), timeline_module.time  # type: ignore[assignment, attr-defined]
    found = gather_timeline(communicator, recording, STEPS)
    timeline_module.time = before  # type: ignore[attr-defined]
    return found


def test_recordings_of_all_ranks_on_one_clock() -> None:
    first, *others = run_ranks(3, records)

    assert all(other == first for other in others)
    assert (first.world_size, first.dependences) == (3, STEPS.dependences)
    assert {(s.rank, s.window) for s in first.spans} == {(rank, window) for rank in range(3) for window in range(2)}
    assert len(first.spans) == 6 * 4
    assert len(first.waits) == 6
    zero = next(s for s in first.spans if (s.rank, s.window, s.operation.id) == (0, 0, EARLY))
    assert zero.start_ms == pytest.approx(0.0, abs=1e-6)
    for span in first.spans:
        if span.operation.id in (EARLY, CHUNK):
            # The tolerance is large, because ranks leave the barrier at different times. Clocks differ by 1000 s.
            begin_ms = 1e3 * span.window + (0 if span.operation.id == EARLY else 100)
            assert span.start_ms == pytest.approx(begin_ms, abs=500.0)
    lengths = {round(s.end_ms - s.start_ms, 3) for s in first.spans if s.operation.name == "bucket 0 [0]"}
    assert lengths == {200.0}
    assert {s.operation for s in first.spans if s.operation.id in (EARLY, CHUNK)} == {
        STEPS[str(EARLY)],
        STEPS["bucket 0 [0]"],
    }
    assert {(w.launch, w.lane) for w in first.waits} == {("bucket 0 [0]", "dense")}


def test_a_recording_holds_what_ran_and_what_was_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]

    def passes(seconds: float) -> float:
        now_s[0] += seconds
        return seconds

    monkeypatch.setattr(recorder_module, "time", SimpleNamespace(perf_counter=lambda: now_s[0]))
    clock = Mock(now=lambda: now_s[0] + 500, seconds=lambda moment: moment + 500)
    recorder = Recorder(clock, bytes_in_use=lambda: int(now_s[0]))
    with RecordedCopy(CHUNK, 3, recorder), recorder.waiting(CHUNK):  # nothing is recorded yet
        passes(1)
    recorder.start()
    with RecordedCopy(CHUNK, 4, recorder), RecordedCopy(CHUNK, 5, recorder, on_host=True):
        assert recorder.timed(ANNOUNCEMENT, passes, 1) == 1
    recorder.begin_window()
    passes(1)
    recorder.mark(A)
    with RecordedCopy(CHUNK, 6, recorder), recorder.waiting(CHUNK):
        passes(2)
    passes(1)
    recorder.mark(A)
    recorder.begin_segment(EARLY)
    passes(3)
    recorder.pause_segment()
    passes(4)
    recorder.end_forward()  # the forward has waited since its last segment
    passes(5)
    recorder.step_times.sent_bytes += 7
    recorder.begin_window()
    recording = recorder.stop()

    assert recording == Recording(
        marks=[(None, 0, 1002), (A, 0, 1006), (EARLY, 0, 1009), (None, 1, 1018)],
        waits=[(ANNOUNCEMENT, -1, 1001, 1002), (CHUNK, 0, 1003, 1005)],
        transfers=[Transfer(CHUNK, 0, 6, 1003, 1005)],
        window=1,
        memory=[(1003, 3), (1006, 6), (1009, 9)],
        before=[Transfer(CHUNK, -1, 5, 501, 502), Transfer(CHUNK, -1, 4, 1001, 1002)],
    )
    assert [each[0] for each in clock.method_calls] == ["start", "stop"]
    del recording.waits[0]
    assert compute_spans(recording) == [(A, 0, 1002, 1003), (A, 0, 1005, 1006), (EARLY, 0, 1006, 1009)]
    assert make_profile(recording) == Profile({A: 2000.0, EARLY: 3000.0}, {CHUNK: 6})
    recorder.mark(A)  # is not recorded
    assert list(recorder.step_times.steps) == [({"backward": 2.0, "dense": 2.0, "optimizer": 3.0, "between": 9.0}, 7)]
    assert recorder.step_times.sent_bytes == 0
    assert recorder.step_times.shares_ms() is None  # the first step warms up
    for seconds in (9, 1, 3, 2):
        recorder.timed(CHUNK, passes, seconds)
        recorder.begin_window()
    assert {share: ms for share, ms in (recorder.step_times.shares_ms() or {}).items() if ms} == {"dense": 2000.0}
