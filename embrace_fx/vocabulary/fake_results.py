"""Declares custom ops with fake kernels, which compute the shapes of results, including shapes that depend on data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import define, register_fake

Fake = Callable[..., Any]


def op(name: str, schema: str, *, tags: Sequence[torch.Tag] = ()) -> Callable[[Fake], Fake]:
    """Returns a decorator that declares the custom op `embrace::name`. The decorated function is the op's fake kernel,
    and its docstring documents the op.

    Args:
        schema: the op's arguments and results, as `torch.library.define` takes them: "(Tensor ids, int rows) ->
            Tensor".
        tags: torch's tags of the op, such as one for random ops.
    """
    define(f"embrace::{name}", schema, tags=tags)
    declare: Callable[[Fake], Fake] = register_fake(f"embrace::{name}")
    return declare


def unknown_size() -> torch.SymInt:
    """Returns a new symbol for a size that depends on data."""
    return torch.library.get_ctx().new_dynamic_size()


def empty_as(like: Tensor, shape: Sequence[int | torch.SymInt], dtype: torch.dtype | None = None) -> Tensor:
    """Returns a fake tensor of this shape, on the device of `like`. Takes half the time of `like.new_empty` for
    symbolic sizes.

    Args:
        dtype: the tensor's dtype; that of `like` by default.
    """
    return torch.empty(shape, dtype=dtype or like.dtype, device=like.device)
