"""The big LSTM language model: an input table, LSTMs with a projection, a softmax table of which words are sampled.

Jozefowicz et al. 2016, Exploring the Limits of Language Modeling, section 3.1 (LSTM-2048-512, two layers); vocabulary
of the One Billion Word benchmark; importance-sampled softmax of Jean et al. 2015, section 3.

Shape legend
    B examples; L positions; D columns of the tables, the projection's size; S sampled words.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models import text
from benchmarks.models.base import Batch, Lookups, TableModel


class LanguageModel(TableModel):
    """Input table -> layers of LSTM with projection -> softmax over the target and the sampled words."""

    def __init__(self, vocabulary: int, width: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.tables = nn.ModuleDict(
            {"input": nn.Embedding(vocabulary, width), "softmax": nn.Embedding(vocabulary, width)}
        )
        self.lstm = nn.LSTM(width, hidden, layers, proj_size=width, batch_first=True)
        self.log_scale = math.log(math.log(vocabulary + 1))
        nn.init.normal_(self.embeddings()["softmax"].weight, std=width**-0.5)

    def lookups(self, *batch: Tensor) -> Lookups:
        inputs_BL, targets_BL, sampled_S = batch
        return {
            "input": ("input", inputs_BL),
            "target": ("softmax", targets_BL),
            "sampled": ("softmax", sampled_S),
        }

    def loss(self, rows: Mapping[str, Tensor], *batch: Tensor) -> Tensor:
        return self.of_words(batch, self.lstm(rows["input"])[0], rows["target"], rows["sampled"])

    def of_words(self, batch: Batch, hidden_BLD: Tensor, target_BLD: Tensor, sampled_SD: Tensor) -> Tensor:
        """The softmax over the target and the sampled words, whose rows are given."""
        _, targets_BL, sampled_S = batch
        of_target_BL = (hidden_BLD * target_BLD).sum(-1) - self.log_q(targets_BL)
        of_sampled_BLS = hidden_BLD @ sampled_SD.t() - self.log_q(sampled_S)
        accidental_BLS = targets_BL.unsqueeze(-1) == sampled_S
        logits = torch.cat([of_target_BL.unsqueeze(-1), of_sampled_BLS.masked_fill(accidental_BLS, -1e9)], -1)
        return F.cross_entropy(logits.flatten(0, 1), targets_BL.new_zeros(targets_BL.numel()))

    def log_q(self, words: Tensor) -> Tensor:
        """Log probability that one draw of `text.log_uniform` gives each word."""
        return torch.log1p(1 / (words + 1)).log() - self.log_scale


@dataclass(frozen=True)
class LanguageModelWorkload:
    """Sizes: V, D, H of a layer, and of a batch."""

    vocabulary: int
    width: int
    hidden: int
    layers: int
    batch_size: int
    length: int
    sampled: int

    def make(self) -> LanguageModel:
        return LanguageModel(self.vocabulary, self.width, self.hidden, self.layers)

    def batch(self, step: int, rank: int, seed: int) -> Batch:
        random = text.generator(step, rank, seed)
        piece = text.windows(self.batch_size, self.length + 1, self.vocabulary, random)
        sampled = text.log_uniform(self.sampled, self.vocabulary, random)
        return piece[:, :-1].contiguous(), piece[:, 1:].contiguous(), sampled
