"""A recommender: dense features and many tables, all pairs of their vectors, a probability of a click.

DLRM, Naumov et al. 2019, Deep Learning Recommendation Model for Personalization and Recommendation Systems, section 2,
with the 26 categories of the Criteo Kaggle data and the layers of its open-source benchmark.

Shape legend
    B examples; D width of a vector; F vectors: one per category and one of the dense features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models import text
from benchmarks.models.base import Batch, Lookups, TableModel

DENSE_FEATURES = 13
CRITEO_ROWS = (
    1460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5683, 8_351_593, 3194, 27, 14_992, 5_461_306,
    10, 5652, 2173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572,
)  # fmt: skip
"""Different values of each category of the Criteo Kaggle data."""


class Recommender(TableModel):
    """Dense features through the bottom layers, a row of each table, products of all pairs, the top layers."""

    def __init__(self, rows: tuple[int, ...], width: int, bottom: tuple[int, ...], top: tuple[int, ...]) -> None:
        super().__init__()
        self.categories = tuple(f"category{i}" for i in range(len(rows)))
        self.tables = nn.ModuleDict(
            {name: nn.Embedding(count, width) for name, count in zip(self.categories, rows, strict=True)}
        )
        for table, count in zip(self.embeddings().values(), rows, strict=True):
            nn.init.uniform_(table.weight, -(count**-0.5), count**-0.5)
        vectors = len(rows) + 1
        self.bottom = perceptron(DENSE_FEATURES, *bottom, width)
        self.top = perceptron(width + vectors * (vectors - 1) // 2, *top)
        self.click = nn.Linear(top[-1], 1)

    def lookups(self, *batch: Tensor) -> Lookups:
        return {name: (name, ids_B) for name, ids_B in zip(self.categories, batch[1].unbind(1), strict=True)}

    def loss(self, rows: Mapping[str, Tensor], *batch: Tensor) -> Tensor:
        x = self.interact(self.bottom(batch[0]), list(rows.values()))
        return F.binary_cross_entropy_with_logits(self.click(self.top(x)).squeeze(-1), batch[2])

    def interact(self, dense_BD: Tensor, rows_BD: list[Tensor]) -> Tensor:
        """The dense features' vector, and the products of all pairs of vectors."""
        vectors_BFD = torch.stack([dense_BD, *rows_BD], 1)
        products_BFF = vectors_BFD @ vectors_BFD.transpose(1, 2)
        one, other = torch.tril_indices(products_BFF.shape[1], products_BFF.shape[2], offset=-1, device=dense_BD.device)
        return torch.cat([dense_BD, products_BFF[:, one, other]], -1)


def perceptron(*widths: int) -> nn.Sequential:
    layers = [(nn.Linear(before, after), nn.ReLU()) for before, after in pairwise(widths)]
    return nn.Sequential(*(module for layer in layers for module in layer))


@dataclass(frozen=True)
class RecommenderWorkload:
    """Sizes: of the tables, of the layers, and of a batch."""

    rows: tuple[int, ...]
    width: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]
    batch_size: int

    def make(self) -> Recommender:
        return Recommender(self.rows, self.width, self.bottom, self.top)

    def batch(self, step: int, rank: int, seed: int) -> Batch:
        """Each category is a word of a piece of text, its number modulo the table's rows."""
        random = text.generator(step, rank, seed)
        words = text.windows(self.batch_size, len(self.rows), 1 << 31, random)
        dense = torch.randn(self.batch_size, DENSE_FEATURES, generator=random)
        clicks = (torch.rand(self.batch_size, generator=random) < 0.25).float()
        return dense, words % torch.tensor(self.rows), clicks
