"""Tests on devices. On emulated ones nothing may be found in any of them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def findings() -> Iterator[Path | None]:
    """Returns the file of emulated devices' errors, or None on real ones. A test that provokes errors removes it."""
    name = os.environ.get("EMULATED_CUDA_FINDINGS")
    path = Path(name) if name else None
    yield path
    if path is not None and path.exists():
        text = path.read_text(encoding="utf-8")
        path.unlink()
        pytest.fail(f"the emulated device reports:\n{text}")
