"""Which launch leaves next."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from embrace_fx.runtime.launch import launch_queue
from tests.support.launches import LONG_S, Link, make, submit


def test_a_pause_in_which_nothing_waits_is_no_standstill(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr(launch_queue, "STANDSTILL_S", LONG_S)
    clock = SimpleNamespace(perf_counter=lambda: now_s[0], monotonic=time.monotonic, sleep=time.sleep)
    monkeypatch.setattr(launch_queue, "time", clock)
    launcher, link = make(), Link()
    submit(launcher, link, "early rows")
    link.expect("early rows")
    link.end("early rows")
    now_s[0] = 10 * LONG_S
    submit(launcher, link, "bucket 0")
    link.expect("early rows")
