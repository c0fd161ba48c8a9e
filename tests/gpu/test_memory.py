"""Memory that several streams use is not used again too early, with torch's caching allocator and without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.needs import gpus


@gpus(1)
@pytest.mark.parametrize("caching", [True, False], ids=["caching", "no caching"])
def test_a_stress_of_memory_across_streams(caching: bool) -> None:
    environment = os.environ | ({} if caching else {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
    ended = subprocess.run(
        [sys.executable, "-m", "tests.gpu.stress"],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
