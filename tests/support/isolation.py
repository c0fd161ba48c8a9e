"""A plugin of each process that runs tests: its settings, and what makes a test independent of those before it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from tests.support import golden, ranks


def pytest_configure(config: pytest.Config) -> None:
    golden.options.update = config.getoption("--update-golden")
    # Every run has the same examples and no deadline, so that tests do not fail on a busy machine.
    examples = 25 if "not long" in config.option.markexpr else 60
    settings.register_profile("suite", max_examples=examples, deadline=None, derandomize=True)
    settings.load_profile("suite")
    torch.set_num_threads(1)  # models are tiny, and the ranks of a test share the cores


def pytest_collection_finish() -> None:
    gc.freeze()  # excludes imported modules from collections, which took a tenth of the tests' time
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _ranks_end_with_the_session() -> Iterator[None]:
    yield
    ranks.close_pool()


@pytest.fixture(autouse=True)
def _independent_of_earlier_tests() -> None:
    ranks.reset_torch_state()
