"""From what was recorded on each rank to the one profile that the launch order is computed from."""

from __future__ import annotations

import pytest

from embrace_fx.runtime.launch.recorder import Recording, Transfer
from embrace_fx.scheduling.scheduling import Profile, agree_on_profile, profile

WINDOWS_MS = ((10.0, 2.0), (12.0, 4.0), (90.0, 3.0))
"""Of "a" and "b" in each whole window; the third was disturbed."""


def recording() -> Recording:
    """Three whole windows, and the beginning of a fourth. In the first, "a" waits for 5 ms in its middle."""
    found, now = Recording(), 0.0
    for window, (a_ms, b_ms) in enumerate((*WINDOWS_MS, (1000.0, 0.0))):
        found.marks.append(("", window, now))
        if window == 0:
            found.waits.append(("bucket 0 [0]", "dense", window, now + 0.004, now + 0.009))
        now += a_ms / 1e3 + (0.005 if window == 0 else 0.0)
        found.marks.append(("a", window, now))
        now += b_ms / 1e3
        found.marks.append(("b", window, now))
        sent = 100 * (window + 1)
        found.transfers.append(Transfer("bucket 0 [0]", "dense", window, sent, now, now + 0.001))
        found.window = window
    return found


def test_durations_are_medians_of_whole_windows_less_waits() -> None:
    found = profile(recording())

    assert found.compute_ms == {"a": pytest.approx(12.0), "b": pytest.approx(3.0)}
    assert found.sent_bytes == {"bucket 0 [0]": 250}


def test_the_slowest_ranks_compute_and_the_mean_of_what_ranks_send() -> None:
    fast = Profile({"a": 1.0, "b": 5.0}, {"rows": 100, "early rows": 10})
    slow = Profile({"a": 4.0, "b": 3.0}, {"rows": 300})

    assert agree_on_profile([fast, slow]) == Profile({"a": 4.0, "b": 3.0}, {"rows": 200, "early rows": 5})
