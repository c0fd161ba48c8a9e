"""A word-level LSTM language model with two embedding tables, trained with a sampled softmax."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LanguageModel(nn.Module):
    """Input table -> LSTM -> output table. The tables are not tied, and each step reads a few rows of either.

    The softmax is over the target and K sampled words in place of the vocabulary. Frequent words are sampled more
    often than rare ones, which the correction by -log q(word) makes up for (Jean et al. 2015, On Using Very Large
    Target Vocabulary for Neural Machine Translation, section 3).
    """

    def __init__(self, vocabulary_size: int, width: int) -> None:
        super().__init__()
        self.input = nn.Embedding(vocabulary_size, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.output = nn.Embedding(vocabulary_size, width)
        nn.init.normal_(self.output.weight, std=width**-0.5)

    def forward(self, inputs: Tensor, targets: Tensor, negatives: Tensor) -> Tensor:
        """The mean loss over inputs (B, L) and targets (B, L), with negatives (K,) shared by the whole batch."""
        hidden, _ = self.lstm(self.input(inputs))
        of_target = (hidden * self.output(targets)).sum(-1, keepdim=True) - self.log_q(targets).unsqueeze(-1)
        of_negatives = hidden @ self.output(negatives).t() - self.log_q(negatives)
        drawn_by_accident = targets.unsqueeze(-1) == negatives
        logits = torch.cat([of_target, of_negatives.masked_fill(drawn_by_accident, -1e9)], dim=-1)
        return F.cross_entropy(logits.flatten(0, 1), targets.new_zeros(targets.numel()))

    def log_q(self, words: Tensor) -> Tensor:
        """Log probability that one draw from the log-uniform distribution gives each of `words`."""
        scale = math.log(math.log(self.output.num_embeddings + 1))
        return torch.log1p(1 / (words + 1)).log() - scale
