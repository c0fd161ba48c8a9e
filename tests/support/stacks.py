"""A model of many small tables."""

from __future__ import annotations

import torch
from torch import Tensor, nn

ROWS = (23, 4, 1, 31, 9)


class Many(nn.Module):
    """Five tables that are read at once. Two lookups read the first table, and bags read the second one."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, dim) for rows in ROWS)
        self.tables[1] = nn.EmbeddingBag(ROWS[1], dim, mode="sum")
        self.linear = nn.Linear(dim * (len(ROWS) + 1), 1)

    def forward(self, ids_BT: Tensor, wanted_B: Tensor) -> Tensor:
        rows = [table(ids_BT[:, k : k + 1]).flatten(1) for k, table in enumerate(self.tables)]
        rows.append(self.tables[0](ids_BT[:, -1]))
        return (self.linear(torch.cat(rows, -1)).squeeze(-1).sigmoid() - wanted_B).square().sum()
