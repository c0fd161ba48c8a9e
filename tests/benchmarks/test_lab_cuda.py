"""The page of systems on emulated CUDA devices, from turns that were made up."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from benchmarks.lab.cuda import markdown, step_ms
from benchmarks.lab.cuda_rank import CudaTurn
from benchmarks.lab.settings import SETTINGS
from tests.support.emulated_cuda import Times


def measured(steps_ms: dict[float, float]) -> dict[str, Any]:
    """Of two ranks, a turn at each k whose steps take so long."""
    turns = [
        CudaTurn(slow, ms, 20.0, 2.0, (0.0, 2.0, 0.0), ms / 2, ms / 4, 1e6, 100.0) for slow, ms in steps_ms.items()
    ]
    return {"ranks": [{"turns": [asdict(each) for each in turns], "first_step_s": 1.0}] * 2, "findings": ""}


def test_steps_are_perceived_and_the_page_says_whose_time_they_are() -> None:
    systems = {
        "ddp": measured({1.0: 50.0, 8.0: 320.0, 16.0: 640.0}),
        "ddp_sparse": {"failed": "RuntimeError: no"},
        "embrace_2d": measured({1.0: 90.0, 8.0: 100.0, 16.0: 160.0}),
    }
    found = {
        "date": "today",
        "configuration": asdict(SETTINGS["device-cuda"]),
        "machine": "a machine",
        "times": asdict(Times()),
        "models": {"lm": systems},
    }

    page = markdown(found)

    assert step_ms(systems["ddp"], 16.0).median == pytest.approx(40.0)
    assert "*emulated CUDA*" in page
    assert "| ddp | 8 | 40.0 (40.0 to 40.0) | 20.0 | 0, 2, 0 | 0.2 | 50% | 25% | 1.00 | 100 |" in page
    assert "ddp_sparse did not run: RuntimeError: no" in page
    assert "`ddp`: k = 8 and 16 differ by 0.0%: the device's time." in page
    assert "`embrace_2d`: k = 8 and 16 differ by 25.0%: the host still counts." in page
    assert "Over `embrace_2d`, each at its last k: ddp 4.00." in page
