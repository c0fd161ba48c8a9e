"""Launchers in tests."""

from __future__ import annotations

import pytest

from embrace_fx.runtime.launch import launch_queue


@pytest.fixture(autouse=True)
def _no_standstill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disables the detection of a standstill, which a busy machine could trigger."""
    monkeypatch.setattr(launch_queue, "STANDSTILL_S", 1e6)
    monkeypatch.setattr(launch_queue, "_FAREWELL_S", 0.1)  # launches that a test leaves in flight never complete
