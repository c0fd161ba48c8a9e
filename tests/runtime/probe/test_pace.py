"""How fast a rank computes beside an estimate."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from embrace_fx.cost.links import CORE, Compute
from embrace_fx.runtime.probe import pace
from embrace_fx.runtime.probe.pace import measure_pace

CPU = torch.device("cpu")


def test_a_pace_is_the_estimate_beside_all_that_the_device_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the time of the reference work passes while the host waits for the device; later, a core is busy."""
    now_s, half_s = [0.0], 0.5e-3
    monkeypatch.setattr(pace, "time", SimpleNamespace(perf_counter=lambda: now_s[0]))
    runs: list[float] = []

    def product(*_: object) -> None:
        now_s[0] += half_s * (1 + (len(runs) > 70))
        runs.append(now_s[0])

    def synchronize() -> None:
        now_s[0] += half_s * (len(runs) - synchronized[-1])
        synchronized.append(len(runs))

    synchronized = [0]
    with mock.patch.object(torch, "mm", product), mock.patch.object(torch, "add"):
        found = measure_pace(CPU, CORE, synchronize)
    assert found == pytest.approx(pace.expected_ms(CORE))  # the work takes 1 ms
    taken = [b - a for a, b in itertools.pairwise(synchronized) if b > a]
    assert taken == [1, 1, 2, 4, 8, 16, *[16] * pace.TIMES]
    slower = Compute(CORE.flops_per_ms / 100, CORE.moved_bytes_per_ms / 100)
    assert pace.expected_ms(slower) == pytest.approx(100 * pace.expected_ms(CORE))
