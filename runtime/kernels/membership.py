"""Tests which ids are in a small fixed set, such as padding rows."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


def isin(ids: Tensor, rows: tuple[int, ...]) -> Tensor:
    """Returns a mask of the `ids` that are in `rows`."""
    return ids == rows[0] if len(rows) == 1 else torch.isin(ids, rows_on_device(rows, ids.device))


@lru_cache(maxsize=64)
def rows_on_device(rows: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns row numbers as a tensor (K,), int64. It is cached; do not write to it."""
    return torch.tensor(rows, dtype=torch.int64, device="cpu").to(device)
