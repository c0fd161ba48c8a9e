"""Models whose output layer reads a whole table, and their batches.

Labels differ in number between ranks and steps; every third batch of the last rank has none that is scored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.models import Batch

IGNORED = -100


class HeadModel(nn.Module):
    """Looks words up, computes a little, and predicts words.

    Args:
        tied: whether the output layer has the table of the lookups.
        cap: of the logits, by tanh; 0 for none.
        shifts: whether logits are cut before the loss, as of models that predict the next word.
        reduction: of the loss; without one, the mean of squares of losses.
    """

    smoothing = 0.0

    def __init__(self, num_words: int, width: int, *, tied: bool, bias: bool, cap: float, shifts: bool, reduction: str):
        super().__init__()
        self.words = nn.Embedding(num_words, width)
        self.body = nn.Linear(width, width)
        self.head = nn.Linear(width, num_words, bias=bias)
        if tied:
            self.head.weight = self.words.weight
        self.cap, self.shifts, self.reduction = cap, shifts, reduction

    def logits(self, words_BT: Tensor) -> Tensor:
        found: Tensor = self.head(torch.tanh(self.body(self.words(words_BT))))
        return self.cap * torch.tanh(found / self.cap) if self.cap else found

    def weight_of_words(self) -> Tensor | None:
        return None

    def forward(self, words_BT: Tensor, labels_BT: Tensor) -> Tensor:
        logits_BTV = self.logits(words_BT)
        if self.shifts:
            logits_BTV, labels_BT = logits_BTV[:, :-1], labels_BT[:, 1:]
        flat = logits_BTV.reshape(-1, logits_BTV.shape[-1]), labels_BT.reshape(-1)
        how: Any = {"weight": self.weight_of_words(), "label_smoothing": self.smoothing}
        loss = F.cross_entropy(*flat, ignore_index=IGNORED, reduction=self.reduction, **how)
        return loss.square().mean() if self.reduction == "none" else loss


class Smooths(HeadModel):
    """Uses label smoothing."""

    smoothing = 0.1


class Weighs(HeadModel):
    """Uses class weights in the loss."""

    def weight_of_words(self) -> Tensor:
        like = self.words.weight
        return torch.linspace(0.5, 1.5, len(like), dtype=like.dtype)


class Predicts(HeadModel):
    """Returns logits, from which the training loop computes the loss."""

    def forward(self, words_BT: Tensor, labels_BT: Tensor) -> Tensor:
        return self.logits(words_BT)


class PredictsBoth(HeadModel):
    """Returns the loss and the logits."""

    def forward(self, words_BT: Tensor, labels_BT: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        logits = self.logits(words_BT)
        return F.cross_entropy(logits.flatten(0, 1), labels_BT.flatten(), ignore_index=IGNORED), logits


@dataclass(frozen=True)
class HeadWorkload:
    """A `HeadModel` and its batches.

    Attributes:
        length: of the shorter batches.
        ignored: rate of labels that are not scored.
        ranks: the rank behind the last.
    """

    kind: Callable[..., nn.Module] = HeadModel
    tied: bool = True
    bias: bool = False
    cap: float = 0.0
    shifts: bool = False
    reduction: str = "sum"
    num_words: int = 41
    width: int = 6
    length: int = 4
    ignored: float = 0.3
    ranks: int = 2
    vary: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def table(self) -> str:
        """The table that the output layer reads."""
        return "words.weight" if self.tied else "head.weight"

    def make(self, dtype: torch.dtype, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        how = {"tied": self.tied, "bias": self.bias, "cap": self.cap, "shifts": self.shifts}
        return self.kind(self.num_words, self.width, **how, reduction=self.reduction, **self.options).to(dtype)

    def batches(self, step: int, rank: int, seed: int) -> Batch:
        generator = torch.Generator().manual_seed(1000 * seed + 100 * step + rank)
        words = torch.randint(self.num_words, (2, self.length + (step + rank) % 2), generator=generator)
        labels = torch.randint(self.num_words, words.shape, generator=generator)
        none_scored = rank == self.ranks - 1 and step % 3 == 2
        ignored = torch.rand(words.shape, generator=generator) < (1.0 if none_scored else self.ignored)
        return words, labels.masked_fill(ignored, IGNORED)
