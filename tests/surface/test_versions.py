"""README, metadata, Makefile, workflow and pages name the same versions of Python and torch."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from tests.release.matrix import OLDEST_TORCH, PYTHONS

ROOT = Path(__file__).parents[2]


def text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def metadata() -> dict[str, Any]:
    return tomllib.loads(text("pyproject.toml"))["project"]


def pythons() -> list[str]:
    """Returns the minor versions of Python that the classifiers list, the oldest first."""
    classifiers = " ".join(metadata()["classifiers"])
    return re.findall(r"Programming Language :: Python :: (3\.\d+)", classifiers)


def test_all_name_the_same_pythons() -> None:
    first, last = pythons()[0], pythons()[-1]
    assert metadata()["requires-python"] == f">={first}"
    for page in ("README.md", "CONTRIBUTING.md", "docs/index.md", ".ci/run"):
        assert f"Python {first} to {last}" in text(page), page
    assert " ".join(f"python{each}" for each in pythons()) in text("Makefile")
    assert ", ".join(f'"{each}"' for each in pythons()) in text(".github/workflows/ci.yml")
    assert set(pythons()) <= set(PYTHONS)


def test_all_name_the_same_oldest_torch() -> None:
    oldest = ".".join(map(str, OLDEST_TORCH))
    assert f"torch>={oldest}" in metadata()["dependencies"]
    for page in ("README.md", "docs/index.md"):
        assert f"torch {oldest} or later" in text(page), page
