"""BERT for question answering: Devlin et al. 2019, section 3 (base) and 4.2 (SQuAD: start and end of the answer).

Of its three tables that of words is large; segments and positions are parameters of the dense part. No dropout, so
that all systems compute the same loss.

Shape legend
    B examples; L positions; D width of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models import text
from benchmarks.models.base import Batch, Lookups, TableModel

SEGMENTS = 2
INIT_STD = 0.02
LAYER_NORM_EPS = 1e-12


class Bert(TableModel):
    """Words, segments and positions -> encoder layers -> two scores for each position."""

    def __init__(self, vocabulary: int, width: int, heads: int, layers: int, positions: int) -> None:
        super().__init__()
        self.tables = nn.ModuleDict({"words": nn.Embedding(vocabulary, width)})
        self.positions_LD = nn.Parameter(torch.empty(positions, width))
        self.segments_2D = nn.Parameter(torch.empty(SEGMENTS, width))
        self.norm = nn.LayerNorm(width, eps=LAYER_NORM_EPS)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, 0.0, "gelu", layer_norm_eps=LAYER_NORM_EPS, batch_first=True
            )
            for _ in range(layers)
        )
        self.answer = nn.Linear(width, 2)
        for parameter in (self.embeddings()["words"].weight, self.positions_LD, self.segments_2D):
            nn.init.normal_(parameter, std=INIT_STD)

    def lookups(self, *batch: Tensor) -> Lookups:
        return {"words": ("words", batch[0])}

    def loss(self, rows: Mapping[str, Tensor], *batch: Tensor) -> Tensor:
        words_BL, in_passage_BL, start_B, end_B = batch
        of_segment_BLD = torch.where(in_passage_BL.unsqueeze(-1), self.segments_2D[1], self.segments_2D[0])
        x_BLD = self.norm(rows["words"] + self.positions_LD[: words_BL.shape[1]] + of_segment_BLD)
        for layer in self.layers:
            x_BLD = layer(x_BLD)
        start_BL, end_BL = self.answer(x_BLD).unbind(-1)
        return (F.cross_entropy(start_BL, start_B) + F.cross_entropy(end_BL, end_B)) / 2


@dataclass(frozen=True)
class BertWorkload:
    """Sizes: V, D, heads, layers, positions it can hold, and of a batch."""

    vocabulary: int
    width: int
    heads: int
    layers: int
    positions: int
    batch_size: int
    length: int

    def make(self) -> Bert:
        return Bert(self.vocabulary, self.width, self.heads, self.layers, self.positions)

    def batch(self, step: int, rank: int, seed: int) -> Batch:
        """Returns text whose first sixth is the question. The answer is a span of the rest."""
        random = text.generator(step, rank, seed)
        words_BL = text.windows(self.batch_size, self.length, self.vocabulary, random)
        question = max(1, self.length // 6)
        in_passage_BL = (torch.arange(self.length) >= question).expand(self.batch_size, -1).contiguous()
        span_B2 = torch.randint(question, self.length, (self.batch_size, 2), generator=random).sort(-1).values
        return words_BL, in_passage_BL, span_B2[:, 0].contiguous(), span_B2[:, 1].contiguous()
