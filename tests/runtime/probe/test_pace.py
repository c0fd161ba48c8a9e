"""How fast a rank computes beside an estimate, and small parts of the probe."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from embrace_fx.cost.links import CORE
from embrace_fx.runtime.probe import pace
from embrace_fx.runtime.probe.pace import measure_pace
from tests.support.golden import check_transcript, run_lines


def test_a_pace_is_the_estimate_beside_what_a_device_takes_until_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run takes 1 ms, which passes while the host waits for the device."""
    now_s, runs = [0.0], [0]
    monkeypatch.setattr(pace, "time", SimpleNamespace(perf_counter=lambda: now_s[0]))

    def product(*_: object) -> None:
        runs[-1] += 1

    def synchronize() -> None:
        now_s[0] += 1e-3 * runs[-1]
        runs.append(0)

    with mock.patch.object(torch, "mm", product), mock.patch.object(torch, "add"):
        assert measure_pace(torch.device("cpu"), CORE, synchronize) == pytest.approx(pace.expected_ms(CORE))
    assert [*filter(None, runs)] == [1, 1, 2, 4, 8, 16, *[16] * pace.TIMES]


def test_small_parts() -> None:
    check_transcript(
        "probe", partial(run_lines, "runtime.probe", ("disk_cache", "handling", "probe", "processors", "wire"))
    )
