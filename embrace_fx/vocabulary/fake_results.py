"""Declares ops with their fake kernels, whose results are tensors without data, of sizes that may depend on data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import define, register_fake

Fake = Callable[..., Any]


def op(name: str, schema: str, *, tags: Sequence[torch.Tag] = ()) -> Callable[[Fake], Fake]:
    """Declares `embrace::name`; decorates its fake kernel, whose docstring tells what the op does."""
    define(f"embrace::{name}", schema, tags=tags)
    declare: Callable[[Fake], Fake] = register_fake(f"embrace::{name}")
    return declare


def unknown_size() -> torch.SymInt:
    """A size that depends on data, a new one at each call."""
    return torch.library.get_ctx().new_dynamic_size()


def empty_as(like: Tensor, shape: Sequence[int | torch.SymInt], dtype: torch.dtype | None = None) -> Tensor:
    """A fake tensor of a shape, else as another. `new_empty` takes twice as long where a size is unknown."""
    return torch.empty(shape, dtype=dtype or like.dtype, device=like.device)
