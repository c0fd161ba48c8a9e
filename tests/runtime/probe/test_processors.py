"""What transfers take of processors that compute."""

from __future__ import annotations

from dataclasses import replace

import pytest

from embrace_fx.runtime.probe.processors import Load, delay_share

ONE = Load("a", (0, 1), threads=1, took_ms=50.0, wall_ms=100.0)


@pytest.mark.parametrize(
    ("ranks", "share"),
    [
        ([ONE, ONE], 0.5),  # two ranks on two cores; a rank's transfers need half a core
        ([ONE], 0.0),  # transfers run on an idle core
        ([replace(ONE, threads=2)], 0.25),  # one rank computes on both cores
        ([ONE] * 8, 1.0),  # at most all of the time
        ([replace(ONE, took_ms=150.0)], 0.25),  # 1.5 cores of transfers, of which the idle core runs one
        ([replace(ONE, cores=(0,)), replace(ONE, cores=(1,))], 0.5),  # each rank is pinned to its own core
        ([replace(ONE, host="b"), ONE, ONE], 0.5),  # the share on the busiest host
    ],
)
def test_the_share_of_a_transfer_that_compute_loses(ranks: list[Load], share: float) -> None:
    assert delay_share(ranks) == pytest.approx(share)
