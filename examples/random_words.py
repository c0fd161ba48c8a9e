"""What `accelerate_loop.py` and `lightning_loop.py` train: a small classifier of random words."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

NUM_WORDS, LENGTH = 500, 8


class Sentences(Dataset[tuple[Tensor, Tensor]]):
    """Random words, and whether most of them are from the first half of the vocabulary."""

    def __init__(self, size: int, seed: int, dtype: torch.dtype = torch.float32) -> None:
        self.words = torch.randint(NUM_WORDS, (size, LENGTH), generator=torch.Generator().manual_seed(seed))
        self.dtype = dtype

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        words = self.words[index]
        return words, (words < NUM_WORDS // 2).to(self.dtype).mean().round()


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(NUM_WORDS, 16)
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, words_BL: Tensor) -> Tensor:
        scores: Tensor = self.layers(self.words(words_BL).mean(1)).squeeze(-1)
        return scores
