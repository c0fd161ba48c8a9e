"""Declares ops with their fake kernels, whose results are tensors without data and may have data-dependent sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import define, register_fake

Fake = Callable[..., Any]


def op(name: str, schema: str, *, tags: Sequence[torch.Tag] = ()) -> Callable[[Fake], Fake]:
    """Declares `embrace::name`; decorates its fake kernel, whose docstring says what the op does."""
    define(f"embrace::{name}", schema, tags=tags)
    declare: Callable[[Fake], Fake] = register_fake(f"embrace::{name}")
    return declare


def unknown_size() -> torch.SymInt:
    """Makes a new symbol for a data-dependent size."""
    return torch.library.get_ctx().new_dynamic_size()


def empty_as(like: Tensor, shape: Sequence[int | torch.SymInt], dtype: torch.dtype | None = None) -> Tensor:
    """Makes a fake tensor of this shape, as `like.new_empty` would in twice the time where a size is unknown."""
    return torch.empty(shape, dtype=dtype or like.dtype, device=like.device)
