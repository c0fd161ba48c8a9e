"""Finds ids among a few that are known before, as padding rows are."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


def among(ids: Tensor, rows: tuple[int, ...]) -> Tensor:
    """Marks which of `ids` are one of some rows: bool."""
    return ids == rows[0] if len(rows) == 1 else torch.isin(ids, on_device(rows, ids.device))


@lru_cache(maxsize=64)
def on_device(rows: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns rows as a tensor (K,), int64, which nobody may write."""
    return torch.tensor(rows, dtype=torch.int64, device="cpu").to(device)
