"""Which cases of a parametrized test run by default; the others are `long`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
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


def crossed(*axes: Sequence[Any]) -> list[Any]:
    """All combinations of some values; by default as many of them run as there are values on the longest axis, each
    value at least once.
    """
    default = [tuple(axis[k % len(axis)] for axis in axes) for k in range(max(map(len, axes)))]
    return [pytest.param(*each, marks=() if each in default else pytest.mark.long) for each in product(*axes)]
