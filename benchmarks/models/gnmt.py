"""GNMT-8: four LSTM layers encode, the first in both directions, four decode, with attention after the first.

Wu et al. 2016, Google's Neural Machine Translation System, section 3, in the eight-layer form that the MLPerf training
benchmark runs: additive attention whose context enters every later layer, residuals from the third layer on, a
classifier of its own. No dropout, so that all systems compute the same loss.

Shape legend
    B sentences; S source positions; T target positions; D width of everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models import text
from benchmarks.models.base import Batch, Lookups, TableModel

INIT_RANGE = 0.1


class AdditiveAttention(nn.Module):
    """softmax over s of v . tanh(Q query_t + K keys_s); Bahdanau et al. 2015, appendix A.1.2."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.of_query = nn.Linear(width, width, bias=False)
        self.of_key = nn.Linear(width, width, bias=False)
        self.score = nn.Linear(width, 1, bias=False)

    def forward(self, query_BTD: Tensor, keys_BSD: Tensor) -> Tensor:
        sum_BTSD = self.of_query(query_BTD).unsqueeze(2) + self.of_key(keys_BSD).unsqueeze(1)
        weights_BTS = self.score(torch.tanh(sum_BTSD)).squeeze(-1).softmax(-1)
        context_BTD: Tensor = weights_BTS @ keys_BSD
        return context_BTD


class Gnmt(TableModel):
    """Tables of source and target words, encoder, decoder, classifier."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleDict(
            {"source": nn.Embedding(vocabulary, width), "target": nn.Embedding(vocabulary, width)}
        )
        self.encode_both_ways = nn.LSTM(width, width, bidirectional=True, batch_first=True)
        self.encode = nn.ModuleList(nn.LSTM(i, width, batch_first=True) for i in (2 * width, width, width))
        self.attend_from = nn.LSTM(width, width, batch_first=True)
        self.attention = AdditiveAttention(width)
        self.decode = nn.ModuleList(nn.LSTM(2 * width, width, batch_first=True) for _ in range(3))
        self.classify = nn.Linear(width, vocabulary)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -INIT_RANGE, INIT_RANGE)

    def lookups(self, *batch: Tensor) -> Lookups:
        source_BS, target_BT = batch
        return {"source": ("source", source_BS), "target": ("target", target_BT[:, :-1])}

    def loss(self, rows: Mapping[str, Tensor], *batch: Tensor) -> Tensor:
        keys_BSD = self.encoded(rows["source"])
        x_BTD, _ = self.attend_from(rows["target"])
        context_BTD = self.attention(x_BTD, keys_BSD)
        for layer, lstm in enumerate(self.decode):
            y_BTD, _ = lstm(torch.cat([x_BTD, context_BTD], -1))
            x_BTD = y_BTD if layer == 0 else x_BTD + y_BTD
        return F.cross_entropy(self.classify(x_BTD).flatten(0, 1), batch[1][:, 1:].flatten())

    def encoded(self, source_BSD: Tensor) -> Tensor:
        x: Tensor
        x, _ = self.encode_both_ways(source_BSD)
        for layer, lstm in enumerate(self.encode):
            y_BSD, _ = lstm(x)
            x = y_BSD if layer == 0 else x + y_BSD
        return x


@dataclass(frozen=True)
class GnmtWorkload:
    """Sizes: V and D, and of a batch: sentences and words of each."""

    vocabulary: int
    width: int
    batch_size: int
    length: int

    def make(self) -> Gnmt:
        return Gnmt(self.vocabulary, self.width)

    def batch(self, step: int, rank: int, seed: int) -> Batch:
        return text.sentence_pairs(self.batch_size, self.length, self.vocabulary, text.generator(step, rank, seed))
