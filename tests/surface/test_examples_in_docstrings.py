"""Every example in a docstring runs, and prints what it says."""

from __future__ import annotations

import doctest
from importlib import import_module

import pytest

from tests.support.rooms import modules

WITH_EXAMPLES = sorted(name for name, path in modules().items() if ">>> " in path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_print_what_they_say(name: str) -> None:
    found = doctest.testmod(import_module(name), optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert found.attempted > 0
    assert found.failed == 0
