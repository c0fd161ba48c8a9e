"""Opens named spans for `torch.profiler`, if it runs: the phases of a step, its submissions and its waits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.profiler import record_function

Result = TypeVar("Result")

is_profiled = torch._C._autograd._profiler_enabled
"""Tells whether the calling thread is profiled."""


def span(*name: object) -> contextlib.AbstractContextManager[object]:
    """Opens a span named by these words, if this thread is profiled; else returns an empty context."""
    if not is_profiled():
        return _NONE
    return record_function(f"embrace_fx: {' '.join(map(str, name))}")


_NONE = contextlib.nullcontext()


def spanned(name: str, call: Callable[..., Result], *arguments: Any, **options: Any) -> Result:
    """Makes a call in a span of this name, if this thread is profiled."""
    if not is_profiled():
        return call(*arguments, **options)
    with span(name):
        return call(*arguments, **options)
