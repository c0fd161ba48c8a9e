"""Fixtures and options of the whole suite."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import settings

from tests.support import golden, ranks


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
    examples = 25 if "not long" in config.option.markexpr else 60
    settings.register_profile("suite", max_examples=examples, deadline=None, derandomize=True)
    settings.load_profile("suite")
    torch.set_num_threads(1)  # the models are tiny, and the ranks of a test share the cores


def pytest_sessionfinish() -> None:
    ranks.close_pool()


@pytest.fixture(autouse=True)
def _independent_of_earlier_tests() -> None:
    ranks.reset_torch_state()
