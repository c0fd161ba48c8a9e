"""A small model and its batches, for tests of what users do wrong or otherwise than most."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_WORDS, DIM, NUM_CLASSES = 20, 6, 3
LATE_LENGTH, UNTRACEABLE_LENGTH = 5, 7
"""Batches of these lengths take another path through `Words`."""

Batch = tuple[Tensor, Tensor, Tensor]


class Words(nn.Module):
    """A bag of words. Two lengths of its input cannot be trained on after other lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(NUM_WORDS, DIM)
        self.linear = nn.Linear(DIM, NUM_CLASSES)
        self.late = nn.Linear(DIM, DIM)

    def forward(self, ids_BL: Tensor, labels_B: Tensor, scale: Tensor) -> Tensor:
        x_BD = self.table(ids_BL).mean(1)
        if ids_BL.shape[1] == LATE_LENGTH:
            x_BD = self.late(x_BD)
        if ids_BL.shape[1] == UNTRACEABLE_LENGTH and scale.item() > 0:
            x_BD = -x_BD
        return F.cross_entropy(self.linear(x_BD), labels_B) * scale


class Sentences(Words):
    """A different model with the same parameters."""


def words_model(kind: type[nn.Module] = Words) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


def words_batch(step: int, rank: int, length: int = 3) -> Batch:
    random = torch.Generator().manual_seed(100 * step + rank)
    ids = torch.randint(NUM_WORDS, (4, length), generator=random)
    return ids, torch.randint(NUM_CLASSES, (4,), generator=random), torch.ones((), dtype=torch.float64)
