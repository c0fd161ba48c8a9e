"""ResNet-50 and -101 (He et al. 2016, table 1), written out: bottleneck blocks, stride in the 3 x 3 convolution.

A small table of types of images is added to each image's features, so that there is a table to shard.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES, KINDS = 1000, 64
WIDENED = 4
"""Channels that a bottleneck block yields, over those that it computes with."""


class Bottleneck(nn.Module):
    """Convolutions of 1 x 1, 3 x 3 and 1 x 1, each followed by batch norm, with a residual connection."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = WIDENED * width
        self.reduce, self.norm1 = nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv, self.norm2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.widen, self.norm3 = nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)
        self.shortcut = (
            nn.Identity()
            if stride == 1 and channels == out
            else nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.reduce(x)))
        y = F.relu(self.norm2(self.conv(y)))
        return F.relu(self.norm3(self.widen(y)) + self.shortcut(x))


class Residual(nn.Module):
    """A network that takes images, kinds and labels, and returns a loss."""

    def __init__(self, blocks: tuple[int, ...]) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        found: list[nn.Module] = []
        channels = 64
        for stage, count in enumerate(blocks):
            width = 64 << stage
            for number in range(count):
                found.append(Bottleneck(channels, width, 2 if stage and not number else 1))
                channels = WIDENED * width
        self.layers = nn.ModuleList(found)
        self.kinds = nn.Embedding(KINDS, channels)
        self.classify = nn.Linear(channels, CLASSES)

    def forward(self, images: Tensor, kinds: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(images)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.classify(x.mean((2, 3)) + self.kinds(kinds)), labels)


@dataclass(frozen=True)
class ResidualWorkload:
    """The number of blocks in each stage, and the sizes of a batch."""

    blocks: tuple[int, ...]
    batch_size: int
    pixels: int

    def make(self) -> Residual:
        return Residual(self.blocks)

    def batch(self, step: int, rank: int, seed: int) -> tuple[Tensor, ...]:
        random = torch.Generator().manual_seed(1_000_003 * seed + 1_009 * step + rank)
        images = torch.randn(self.batch_size, 3, self.pixels, self.pixels, generator=random)
        kinds = torch.randint(KINDS, (self.batch_size,), generator=random)
        return images, kinds, torch.randint(CLASSES, (self.batch_size,), generator=random)
