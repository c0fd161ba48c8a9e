"""A model of two tables and its batches, which scenarios and many tests train.

Shape legend
    B examples; L words; D columns of a table.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DTYPE = torch.float64
NUM_WORDS, NUM_ITEMS, DIM = 30, 20, 6
Words = tuple[Tensor, Tensor, Tensor]


class Matching(nn.Module):
    """Predicts whether words match an item: two tables, one of them with a padding row, and a network."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(NUM_WORDS, DIM, padding_idx=0)
        self.first = nn.Linear(DIM, 8)
        self.second = nn.Linear(8, DIM)
        self.items = nn.Embedding(NUM_ITEMS, DIM)

    def forward(self, words_BL: Tensor, items_B: Tensor, scale: Tensor) -> Tensor:
        x_BD = self.second(torch.tanh(self.first(self.words(words_BL).mean(1))))
        return F.softplus(-(x_BD * self.items(items_B)).sum(-1)).mean() * scale


class Predicting(Matching):
    """Predicts the item too, by an output layer that reads the table of items."""

    def forward(self, words_BL: Tensor, items_B: Tensor, scale: Tensor) -> Tensor:
        x_BD = self.second(torch.tanh(self.first(self.words(words_BL).mean(1))))
        matches = F.softplus(-(x_BD * self.items(items_B)).sum(-1)).mean()
        return (matches + F.cross_entropy(F.linear(x_BD, self.items.weight), items_B)) * scale


def draw_batch(step: int, rank: int, length: int = 3) -> Words:
    random = torch.Generator().manual_seed(10 * step + rank)
    words = torch.randint(NUM_WORDS, (4, length), generator=random)
    return words, torch.randint(NUM_ITEMS, (4,), generator=random), torch.ones((), dtype=DTYPE)


def draw_batches(rank: int, steps: int = 8, first: int = 0) -> list[Words]:
    return [draw_batch(step, rank) for step in range(first, first + steps)]
