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
    sys.dont_write_bytecode = False  # write .pyc files, so that not every process compiles all modules
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["EMBRACE_FX_CACHE"] = ""  # no test or rank uses results cached by earlier ones
    if config.getoption("dist", "no") != "no":
        return  # this process only distributes tests: without importing torch, it starts seconds earlier
    gc.disable()  # imports create no garbage; `isolation` enables it again
    config.pluginmanager.import_plugin("tests.support.isolation")
