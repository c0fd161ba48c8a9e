"""The Transformer, encoder and decoder: Vaswani et al. 2017, Attention Is All You Need, section 3, "big" in table 3.

Tables of source and target words and a projection of its own before the softmax, none of them tied. No dropout, so that
all systems compute the same loss.

Shape legend
    B sentences; S source positions; T target positions; D width of the model.
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


class Transformer(TableModel):
    """Tables of source and target words -> encoder and decoder -> projection to the vocabulary."""

    positions_LD: Tensor

    def __init__(self, vocabulary: int, width: int, heads: int, feed_forward: int, layers: int, length: int) -> None:
        super().__init__()
        self.tables = nn.ModuleDict(
            {"source": nn.Embedding(vocabulary, width), "target": nn.Embedding(vocabulary, width)}
        )
        shape = {"dropout": 0.0, "batch_first": True}
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, feed_forward, **shape)  # type: ignore[arg-type]
            for _ in range(layers)
        )
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(width, heads, feed_forward, **shape)  # type: ignore[arg-type]
            for _ in range(layers)
        )
        self.project = nn.Linear(width, vocabulary, bias=False)
        self.scale = math.sqrt(width)
        self.register_buffer("positions_LD", sinusoids(length, width), persistent=False)
        for table in self.embeddings().values():
            nn.init.normal_(table.weight, std=width**-0.5)

    def lookups(self, *batch: Tensor) -> Lookups:
        source_BS, target_BT = batch
        return {"source": ("source", source_BS), "target": ("target", target_BT[:, :-1])}

    def loss(self, rows: Mapping[str, Tensor], *batch: Tensor) -> Tensor:
        source_BSD, target_BTD = (rows[side] * self.scale for side in ("source", "target"))
        memory_BSD = source_BSD + self.positions_LD[: source_BSD.shape[1]]
        for encoder in self.encoder:
            memory_BSD = encoder(memory_BSD)
        length = target_BTD.shape[1]
        later_TT = torch.ones(length, length, dtype=torch.bool, device=target_BTD.device).triu(1)
        x_BTD = target_BTD + self.positions_LD[:length]
        for decoder in self.decoder:
            x_BTD = decoder(x_BTD, memory_BSD, tgt_mask=later_TT)
        return F.cross_entropy(self.project(x_BTD).flatten(0, 1), batch[1][:, 1:].flatten())


def sinusoids(length: int, width: int) -> Tensor:
    """Section 3.5: sin in the first half of the columns, cos in the second, which is the same up to their order."""
    angles = torch.arange(length).unsqueeze(1) / 10_000 ** (torch.arange(0, width, 2) / width)
    return torch.cat([angles.sin(), angles.cos()], -1)


@dataclass(frozen=True)
class TransformerWorkload:
    """Sizes: of table 3 of the paper, and of a batch: sentences and words of each."""

    vocabulary: int
    width: int
    heads: int
    feed_forward: int
    layers: int
    batch_size: int
    length: int

    def make(self) -> Transformer:
        return Transformer(self.vocabulary, self.width, self.heads, self.feed_forward, self.layers, self.length)

    def batch(self, step: int, rank: int, seed: int) -> Batch:
        return text.sentence_pairs(self.batch_size, self.length, self.vocabulary, text.generator(step, rank, seed))
