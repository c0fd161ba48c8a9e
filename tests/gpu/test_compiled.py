"""Models on CUDA are captured, planned, lowered, and compiled for sm_90 by Inductor and Triton, without a GPU."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.gpu.matrix import WORKLOADS
from tests.gpu.needs import emulated, ends

pytestmark = [emulated, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    cache = str(tmp_path_factory.mktemp("inductor"))
    own = {"TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
    own |= {"EMULATED_CUDA_COMPILES": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    return json.loads(ends("tests.gpu.compiled", 800.0, **own))


@pytest.mark.parametrize("precision", ["", ", bfloat16"], ids=["float32", "bfloat16 autocast"])
@pytest.mark.parametrize("model", WORKLOADS)
def test_regions_become_cubins(model: str, precision: str, compiled: dict[str, dict[str, Any]]) -> None:
    found = compiled[f"{model}{precision}"]
    assert found["regions"] >= 1
    assert found["cubins"] >= 1
    assert found["apart"] <= (1e-2 if precision else 1e-5)
