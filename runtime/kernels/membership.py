"""Finds ids that belong to a small known set, such as padding rows."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


def isin(ids: Tensor, rows: tuple[int, ...]) -> Tensor:
    """Returns a bool mask of the `ids` that are in `rows`."""
    return ids == rows[0] if len(rows) == 1 else torch.isin(ids, rows_on_device(rows, ids.device))


@lru_cache(maxsize=64)
def rows_on_device(rows: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns rows as a shared read-only tensor (K,), int64."""
    return torch.tensor(rows, dtype=torch.int64, device="cpu").to(device)
