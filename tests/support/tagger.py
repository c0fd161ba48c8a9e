"""Models of one table, and batches."""

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


class Scorer(nn.Module):
    """A table and a layer, `words` and `out`: a mean of squared scores."""

    def __init__(self, rows: int = ROWS, width: int = WIDTH, scores: int = 1) -> None:
        super().__init__()
        self.words = nn.Embedding(rows, width)
        self.out = nn.Linear(width, scores)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.words(ids)).square().mean()


def batch_of(step: int, rank: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(ROWS, (4, 3), generator=draw), torch.randint(3, (4,), generator=draw)
