"""Spans for `torch.profiler`: the phases of a step, its submissions and its waits by name. Nothing where none runs."""

from __future__ import annotations

import contextlib

import torch
from torch.profiler import record_function

is_profiled = torch._C._autograd._profiler_enabled
"""Tells whether the calling thread is profiled."""


def span(*name: object) -> contextlib.AbstractContextManager[object]:
    """Opens a span of these words where this thread is profiled; else it costs a question."""
    if not is_profiled():
        return _NONE
    return record_function(f"embrace_fx: {' '.join(map(str, name))}")


_NONE = contextlib.nullcontext()
