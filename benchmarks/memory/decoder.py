"""GPT-2 (Radford et al. 2019): a decoder of pre-norm blocks over words and positions, its softmax tied to the words."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models import text


class DecoderBlock(nn.Module):
    """Causal attention and a feed-forward part, each after a norm and with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BLD: Tensor) -> Tensor:
        parts = self.query_key_value(self.norm1(x_BLD)).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        read = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x_BLD = x_BLD + self.project(read.transpose(1, 2).flatten(-2))
        y: Tensor = x_BLD + self.down(F.gelu(self.up(self.norm2(x_BLD)), approximate="tanh"))
        return y


class Decoder(nn.Module):
    """A language model that takes words and returns the mean loss of predicting the next word."""

    def __init__(self, vocabulary: int, width: int, heads: int, layers: int, length: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.zeros(length, width))
        self.layers = nn.ModuleList(DecoderBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, words_BL: Tensor) -> Tensor:
        x_BLD = self.words(words_BL) + self.positions[: words_BL.shape[1]]
        for layer in self.layers:
            x_BLD = layer(x_BLD)
        scores_BLV = self.norm(x_BLD)[:, :-1] @ self.words.weight.t()
        return F.cross_entropy(scores_BLV.flatten(0, 1), words_BL[:, 1:].flatten())


@dataclass(frozen=True)
class DecoderWorkload:
    """The sizes of a `Decoder` (V, D, heads, layers) and of its batches."""

    vocabulary: int
    width: int
    heads: int
    layers: int
    batch_size: int
    length: int

    def make(self) -> Decoder:
        return Decoder(self.vocabulary, self.width, self.heads, self.layers, self.length)

    def batch(self, step: int, rank: int, seed: int) -> tuple[Tensor, ...]:
        random = text.generator(step, rank, seed)
        return (text.windows(self.batch_size, self.length, self.vocabulary, random),)
