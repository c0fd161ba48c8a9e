"""From what was recorded on each rank to the one profile that the launch order is computed from."""

from __future__ import annotations

import pytest

from embrace_fx.runtime.launch.profile import Profile, agree_on_profile, profile
from embrace_fx.runtime.launch.recorder import Recording, Transfer
from embrace_fx.vocabulary.operation_id import chunk_id, compute_id, rows_id

A, B = compute_id("backward", "a"), compute_id("backward", "b")
CHUNK, LATE, EARLY = chunk_id(0, 0), rows_id("t", "late"), rows_id("t", "early")
WINDOWS_MS = ((10.0, 2.0), (12.0, 4.0), (90.0, 3.0))
"""Of "a" and "b" in each whole window; the third was disturbed."""


def recording() -> Recording:
    """Three whole windows, and the beginning of a fourth. In the first, "a" waits for 5 ms in its middle."""
    found, now = Recording(), 0.0
    for window, (a_ms, b_ms) in enumerate((*WINDOWS_MS, (1000.0, 0.0))):
        found.marks.append((None, window, now))
        if window == 0:
            found.waits.append((CHUNK, window, now + 0.004, now + 0.009))
        now += a_ms / 1e3 + (0.005 if window == 0 else 0.0)
        found.marks.append((A, window, now))
        now += b_ms / 1e3
        found.marks.append((B, window, now))
        sent = 100 * (window + 1)
        found.transfers.append(Transfer(CHUNK, window, sent, now, now + 0.001))
        found.window = window
    return found


def test_durations_are_medians_of_whole_windows_less_waits() -> None:
    found = profile(recording())
    assert found.compute_ms == {A: pytest.approx(12.0), B: pytest.approx(3.0)}
    assert found.sent_bytes == {CHUNK: 250}


def test_the_slowest_ranks_compute_and_the_mean_of_what_ranks_send() -> None:
    fast = Profile({A: 1.0, B: 5.0}, {LATE: 100, EARLY: 10})
    slow = Profile({A: 4.0, B: 3.0}, {LATE: 300})
    assert agree_on_profile([fast, slow]) == Profile({A: 4.0, B: 3.0}, {LATE: 200, EARLY: 5})
