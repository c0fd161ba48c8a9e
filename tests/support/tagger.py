"""A model of one table, and its batches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS, WIDTH = 24, 6


class Tagger(nn.Module):
    """A table, followed by layers."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(ROWS, WIDTH)
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, ids_BL: Tensor, tags_B: Tensor) -> Tensor:
        return F.cross_entropy(self.out(torch.tanh(self.emb(ids_BL).mean(1))), tags_B)


def batch_of(step: int, rank: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(ROWS, (4, 3), generator=draw), torch.randint(3, (4,), generator=draw)
