"""Which cases of a parametrized test run by default."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def long_but(default: Iterable[str], cases: dict[str, tuple[Any, ...]]) -> list[Any]:
    """The cases under their names, as parameters of `pytest.mark.parametrize`; all but the default ones are `long`.

    Raises:
        ValueError: a default that is no case.
    """
    if unknown := set(default) - set(cases):
        raise ValueError(f"long_but() names {sorted(unknown)}, but the cases are {list(cases)}")
    return [
        pytest.param(*values, id=name, marks=() if name in set(default) else pytest.mark.long)
        for name, values in cases.items()
    ]
