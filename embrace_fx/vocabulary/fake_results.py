"""Results of fake kernels: tensors without data, of sizes that may depend on data."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def unknown_size() -> torch.SymInt:
    """A size that depends on data, a new one at each call."""
    return torch.library.get_ctx().new_dynamic_size()


def empty_as(like: Tensor, shape: Sequence[int | torch.SymInt], dtype: torch.dtype | None = None) -> Tensor:
    """A fake tensor of a shape, else as another. `new_empty` takes twice as long where a size is unknown."""
    return torch.empty(shape, dtype=dtype or like.dtype, device=like.device)
