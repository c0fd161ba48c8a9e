"""Models on CUDA are captured, planned, lowered, and compiled for sm_90 by Inductor and Triton, without a GPU."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.matrix import WORKLOADS
from tests.gpu.needs import emulated

pytestmark = [emulated, pytest.mark.timeout(900)]


@functools.cache
def compiled(cache: Path) -> dict[str, dict[str, Any]]:
    own = {
        "EMULATED_CUDA_COMPILES": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "TRITON_CACHE_DIR": str(cache / "triton"),
    }
    ended = subprocess.run(
        [sys.executable, "-m", "tests.gpu.compiled"],
        env=os.environ | own,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inductor")


@pytest.mark.parametrize("precision", ["", ", bfloat16"], ids=["float32", "bfloat16 autocast"])
@pytest.mark.parametrize("model", WORKLOADS)
def test_regions_become_cubins(model: str, precision: str, cache: Path) -> None:
    found = compiled(cache)[f"{model}{precision}"]
    assert found["regions"] >= 1
    assert found["cubins"] >= 1
    assert found["apart"] <= (1e-2 if precision else 1e-5)
