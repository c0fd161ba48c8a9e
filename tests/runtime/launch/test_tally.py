"""A step's parts add up to it, and waits are no part of the compute around them."""

from __future__ import annotations

import pytest

from embrace_fx.runtime.launch.recorder import Recorder
from embrace_fx.vocabulary.operation_id import END, LOADER, OPTIMIZER, START, chunk_id


class Clock:
    """Seconds that the test lets pass."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_parts_add_up_to_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("time.perf_counter", clock)
    recorder = Recorder()
    recorder.mark(START)  # before the first backward: of no step

    for slow in (1, 1, 3, 5):
        recorder.window()
        clock.now_s += 2
        with recorder.waiting(chunk_id(0, 0)):
            clock.now_s += slow
        recorder.mark(END)
        for operation, seconds in ((OPTIMIZER, 4), (LOADER, 8), (START, 16)):
            clock.now_s += seconds
            recorder.mark(operation)
        clock.now_s += 32  # nothing tells of it
        recorder.tally.sent(100)
    recorder.window()

    tally = recorder.tally
    assert [sent for _, sent in tally.steps] == [100] * 4
    assert [sum(parts.values()) for parts, _ in tally.steps] == [63, 63, 65, 67]
    found = tally.shares_ms()
    assert found is not None
    assert {share: ms / 1e3 for share, ms in found.items() if ms} == {
        "backward": 2,
        "dense": 3,  # of 1, 3 and 5: the first step warms up
        "optimizer": 4,
        "loader": 8,
        "forward": 16,
        "between": 32,
    }
