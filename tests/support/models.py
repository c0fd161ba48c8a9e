"""Small real models for the whole suite, in plain torch.nn: a batch goes in, a scalar loss comes out.

Each model has a workload: a frozen dataclass of its sizes (picklable, so it can travel to the ranks) that makes the
model and its batches. A batch is a pure function of (step, rank, seed): the ranks and the reference draw the same one.
With `vary`, batch size and length change from step to step and from rank to rank. Ids repeat as words do (Zipf), so
that ranks share rows within a step, a step shares rows with the next, and some rows are never read.

Shape legend
    B examples; L positions; D columns of a table; H hidden units; S negative samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, ...]

PADDING = 0


class Workload(Protocol):
    """A model together with its data."""

    @property
    def vary(self) -> bool:
        """Whether batch size and length differ between steps and ranks."""

    def make(self, dtype: torch.dtype, seed: int) -> nn.Module:
        """The model, its parameters drawn with `seed`."""

    def batches(self, step: int, rank: int, seed: int) -> Batch:
        """The arguments of the model's call on `rank` at `step`."""


class TwoTableLM(nn.Module):
    """Language model with two tables: the input's, and the untied output's under a sampled softmax."""

    def __init__(self, num_words: int, embedding_dim: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_words, embedding_dim)
        self.rnn = nn.LSTM(embedding_dim, hidden, batch_first=True)
        self.output = nn.Embedding(num_words, hidden)

    def forward(self, inputs_BL: Tensor, targets_BL: Tensor, negatives_S: Tensor) -> Tensor:
        hidden_BLH, _ = self.rnn(self.embedding(inputs_BL))
        positive_BL = (hidden_BLH * self.output(targets_BL)).sum(-1)
        negative_BLS = hidden_BLH @ self.output(negatives_S).t()
        logits = torch.cat([positive_BL.unsqueeze(-1), negative_BLS], -1).flatten(0, 1)
        return F.cross_entropy(logits, logits.new_zeros(logits.shape[0], dtype=torch.int64))


@dataclass(frozen=True)
class TwoTableLMWorkload:
    num_words: int = 60
    embedding_dim: int = 10
    hidden: int = 8
    batch_size: int = 4
    length: int = 7
    negatives: int = 9
    vary: bool = False

    def make(self, dtype: torch.dtype, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return TwoTableLM(self.num_words, self.embedding_dim, self.hidden).to(dtype)

    def batches(self, step: int, rank: int, seed: int) -> Batch:
        random = _generator(step, rank, seed)
        size = _size(self.batch_size, self.vary, random)
        length = _size(self.length, self.vary, random)
        text = _zipf((size, length + 1), self.num_words, random)
        negatives = _zipf((self.negatives,), self.num_words, random)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous(), negatives


class TransformerEncoder(nn.Module):
    """Text classifier: token and position tables, encoder layers blind to padding, the mean of the real positions."""

    def __init__(self, num_words: int, dim: int, heads: int, layers: int, max_length: int, num_classes: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(num_words, dim, padding_idx=PADDING)
        self.positions = nn.Embedding(max_length, dim)
        self.layers = nn.ModuleList(  # without ReLU, because at its kink rounding would decide the gradient
            nn.TransformerEncoderLayer(dim, heads, 2 * dim, dropout=0.0, activation="gelu", batch_first=True)
            for _ in range(layers)
        )
        self.classify = nn.Linear(dim, num_classes)

    def forward(self, tokens_BL: Tensor, labels_B: Tensor) -> Tensor:
        padding_BL = tokens_BL == PADDING
        positions_L = torch.arange(tokens_BL.shape[1], device=tokens_BL.device)
        x_BLD = self.tokens(tokens_BL) + self.positions(positions_L)
        for layer in self.layers:
            x_BLD = layer(x_BLD, src_key_padding_mask=padding_BL)
        kept_BL1 = (~padding_BL).unsqueeze(-1).to(x_BLD.dtype)
        mean_BD = (x_BLD * kept_BL1).sum(1) / kept_BL1.sum(1)
        return F.cross_entropy(self.classify(mean_BD), labels_B)


@dataclass(frozen=True)
class TransformerEncoderWorkload:
    num_words: int = 50
    dim: int = 12
    heads: int = 2
    layers: int = 1
    max_length: int = 16
    num_classes: int = 5
    batch_size: int = 4
    length: int = 8
    vary: bool = False

    def make(self, dtype: torch.dtype, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = TransformerEncoder(self.num_words, self.dim, self.heads, self.layers, self.max_length, self.num_classes)
        return model.to(dtype)

    def batches(self, step: int, rank: int, seed: int) -> Batch:
        random = _generator(step, rank, seed)
        size = _size(self.batch_size, self.vary, random)
        tokens = _padded(size, _size(self.length, self.vary, random), self.num_words, random)
        return tokens, torch.randint(self.num_classes, (size,), generator=random)


class TiedLM(nn.Module):
    """Language model whose output projection is its embedding: the table's gradient is dense."""

    def __init__(self, num_words: int, dim: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_words, dim)
        self.rnn = nn.GRU(dim, dim, batch_first=True)
        self.project = nn.Linear(dim, num_words)
        self.project.weight = self.embedding.weight

    def forward(self, inputs_BL: Tensor, targets_BL: Tensor) -> Tensor:
        hidden_BLD, _ = self.rnn(self.embedding(inputs_BL))
        return F.cross_entropy(self.project(hidden_BLD).flatten(0, 1), targets_BL.flatten(), ignore_index=PADDING)


@dataclass(frozen=True)
class TiedLMWorkload:
    num_words: int = 40
    dim: int = 10
    batch_size: int = 3
    length: int = 6
    vary: bool = False

    def make(self, dtype: torch.dtype, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return TiedLM(self.num_words, self.dim).to(dtype)

    def batches(self, step: int, rank: int, seed: int) -> Batch:
        random = _generator(step, rank, seed)
        size = _size(self.batch_size, self.vary, random)
        text = _padded(size, _size(self.length, self.vary, random) + 1, self.num_words, random)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()


class BagRecommender(nn.Module):
    """Click prediction from three bags of ids and dense features.

    `history` is a 2-D bag (mean, padded), `tags` an offsets bag (sum), `genres` an offsets bag (mean); offsets bags
    may be empty.
    """

    def __init__(self, num_items: int, num_tags: int, num_genres: int, dim: int, features: int, hidden: int) -> None:
        super().__init__()
        self.history = nn.EmbeddingBag(num_items, dim, mode="mean", padding_idx=PADDING)
        self.tags = nn.EmbeddingBag(num_tags, dim, mode="sum")
        self.genres = nn.EmbeddingBag(num_genres, dim, mode="mean")
        self.mlp = nn.Sequential(nn.Linear(3 * dim + features, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(
        self,
        history_BL: Tensor,
        tags: Tensor,
        tag_offsets_B: Tensor,
        genres: Tensor,
        genre_offsets_B: Tensor,
        features_BF: Tensor,
        clicked_B: Tensor,
    ) -> Tensor:
        history_BD = self.history(history_BL)
        bags = [history_BD, self.tags(tags, tag_offsets_B), self.genres(genres, genre_offsets_B)]
        logits_B = self.mlp(torch.cat([*bags, features_BF.to(history_BD.dtype)], -1)).squeeze(-1)
        return F.binary_cross_entropy_with_logits(logits_B, clicked_B.to(logits_B.dtype))


@dataclass(frozen=True)
class BagRecommenderWorkload:
    num_items: int = 70
    num_tags: int = 40
    num_genres: int = 15
    dim: int = 10
    features: int = 3
    hidden: int = 8
    batch_size: int = 5
    length: int = 6
    vary: bool = False

    def make(self, dtype: torch.dtype, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = BagRecommender(self.num_items, self.num_tags, self.num_genres, self.dim, self.features, self.hidden)
        return model.to(dtype)

    def batches(self, step: int, rank: int, seed: int) -> Batch:
        random = _generator(step, rank, seed)
        size = _size(self.batch_size, self.vary, random)
        history = _padded(size, _size(self.length, self.vary, random), self.num_items, random)
        tags, tag_offsets = _bags(size, 3 * size, self.num_tags, random)
        genres, genre_offsets = _bags(size, 2 * size, self.num_genres, random)
        features = torch.randn((size, self.features), generator=random)
        clicked = torch.randint(2, (size,), generator=random)
        return history, tags, tag_offsets, genres, genre_offsets, features, clicked


MODELS: tuple[tuple[str, Workload], ...] = (
    ("two_table_lm", TwoTableLMWorkload()),
    ("transformer_encoder", TransformerEncoderWorkload()),
    ("tied_lm", TiedLMWorkload()),
    ("bag_recommender", BagRecommenderWorkload()),
)
"""Every model of the suite by name; `dataclasses.replace(workload, vary=True)` gives the varying twin."""


def _generator(step: int, rank: int, seed: int) -> torch.Generator:
    return torch.Generator().manual_seed((seed * 10_000 + step) * 100 + rank)


def _size(nominal: int, vary: bool, random: torch.Generator) -> int:
    """`nominal`, or with `vary` a size between half of it (2 at least) and one and a half times as much."""
    if not vary:
        return nominal
    return int(torch.randint(max(2, nominal // 2), nominal + nominal // 2 + 1, (), generator=random))


def _zipf(shape: tuple[int, ...], num_ids: int, random: torch.Generator) -> Tensor:
    """Ids from 1 on, id i with a probability in proportion to 1 / i."""
    count = torch.Size(shape).numel()
    weights = 1.0 / torch.arange(1, num_ids, dtype=torch.float64)
    return torch.multinomial(weights, count, replacement=True, generator=random).view(shape) + 1


def _padded(size: int, length: int, num_ids: int, random: torch.Generator) -> Tensor:
    """Ids (size, length); each row keeps its first 2 .. length, the rest is padding, and the first row keeps all."""
    ids = _zipf((size, length), num_ids, random)
    kept = torch.randint(2, length + 1, (size, 1), generator=random)
    kept[0] = length
    return ids.masked_fill(torch.arange(length) >= kept, PADDING)


def _bags(size: int, total: int, num_ids: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """`total` ids cut at random into `size` bags, empty ones among them: ids (total,) and offsets (size,)."""
    cuts = torch.randint(total + 1, (size - 1,), generator=random).sort().values
    return _zipf((total,), num_ids, random), torch.cat([cuts.new_zeros(1), cuts])
