"""Options of the whole suite. What a process that runs tests needs is in `tests.support.isolation`."""

from __future__ import annotations

import gc
import os
import sys

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write the golden files of the tests that run, instead of comparing",
    )


def pytest_configure(config: pytest.Config) -> None:
    # Each module is compiled once, not by every process of every run, whatever the environment says.
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["EMBRACE_FX_CACHE"] = ""  # a test starts from nothing, its ranks too
    if config.getoption("dist", "no") != "no":
        return  # this process distributes tests over others: without torch, it starts them seconds earlier
    gc.disable()  # until all is imported, of which nothing becomes garbage
    config.pluginmanager.import_plugin("tests.support.isolation")
