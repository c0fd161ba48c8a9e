"""Memory that several streams use is not used again too early, with torch's caching allocator and without."""

from __future__ import annotations

import pytest

from tests.gpu.needs import ends, gpus


@gpus(1)
@pytest.mark.parametrize("caching", [True, False], ids=["caching", "no caching"])
def test_a_stress_of_memory_across_streams(caching: bool) -> None:
    ends("tests.gpu.stress", 100.0, **({} if caching else {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}))
