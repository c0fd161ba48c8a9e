"""Opens named ranges for `torch.profiler`, if it is active: phases of a step, submissions and waits."""

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
    """Opens a range in `torch.profiler`, named by the words `name`, if the calling thread is profiled."""
    if not is_profiled():
        return _NONE
    return record_function(f"embrace_fx: {' '.join(map(str, name))}")


_NONE = contextlib.nullcontext()


def spanned(name: str, call: Callable[..., Result], *arguments: Any, **options: Any) -> Result:
    """Calls `call(*arguments, **options)`, as the range `name` if the calling thread is profiled."""
    if not is_profiled():
        return call(*arguments, **options)
    with span(name):
        return call(*arguments, **options)
