"""How fast a rank computes beside an estimate."""

from __future__ import annotations

import time
from functools import partial
from unittest import mock

import pytest
import torch

from embrace_fx.cost.links import CORE, Compute
from embrace_fx.runtime.probe.pace import measure_pace

CPU = torch.device("cpu")


def test_an_estimate_of_a_slower_device_passes_as_much_faster() -> None:
    slower, wait = Compute(CORE.flops_per_ms / 100, CORE.moved_bytes_per_ms / 100), partial(time.sleep, 0.02)
    with mock.patch.object(torch, "mm"), mock.patch.object(torch, "add"):
        assert measure_pace(CPU, slower, wait) / measure_pace(CPU, CORE, wait) == pytest.approx(100, rel=0.5)


def test_what_a_device_has_been_given_counts_until_it_has_done_it() -> None:
    """Each wait takes 20 ms: the products alone are over long before."""
    calls: list[None] = []

    def synchronize() -> None:
        calls.append(None)
        time.sleep(0.02)

    instant = Compute(1e30, 1e30, launch_ms=1.0)  # two operations of 1 ms each, however often they run
    with mock.patch.object(torch, "mm"), mock.patch.object(torch, "add"):
        assert measure_pace(CPU, instant, synchronize) == pytest.approx(2.0 / 20.0, rel=0.3)
    assert calls
