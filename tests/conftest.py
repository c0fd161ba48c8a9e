"""Fixtures and options of the whole suite."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests.support import golden, ranks

LONG_TESTS = Path(__file__).parent / "long_tests.txt"
"""Cases by their node ids, one a line, that only `make test-all` runs; a test of its own is marked in its file."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write the golden files of the tests that run, instead of comparing",
    )


def pytest_configure(config: pytest.Config) -> None:
    os.environ["EMBRACE_FX_CACHE"] = ""  # a test starts from nothing, its ranks too
    golden.options.update = config.getoption("--update-golden")
    # The same examples in every run, and no limit of time: a busy machine must not fail a property.
    settings.register_profile("suite", max_examples=60, deadline=None, derandomize=True)
    settings.load_profile("suite")
    torch.set_num_threads(1)  # the models are tiny, and the ranks of a test share the cores


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the cases of `long_tests.txt` as `long`: what a quiet machine has no time for in the default suite."""
    found = set(LONG_TESTS.read_text(encoding="utf-8").splitlines())
    for item in items:
        if item.nodeid in found:
            item.add_marker(pytest.mark.long)


def pytest_sessionfinish() -> None:
    ranks.close_pool()


@pytest.fixture(autouse=True)
def _independent_of_earlier_tests() -> None:
    ranks.reset_torch_state()
