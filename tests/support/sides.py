"""A model and its optimizer in a training loop, on both sides: compiled, and plain.

A loop that is written against a `Side` runs on either. The compiled one trains under "2d"; the plain one has torch's
own optimizer, and the gradients that it steps with are averaged over the same ranks.

Shape legend
    B examples; L words; D columns of a table.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR

import embrace_fx
from tests.support.training import SEED

DTYPE = torch.float64
NUM_WORDS, NUM_ITEMS, DIM = 30, 20, 6
Words = tuple[Tensor, Tensor, Tensor]


class Matching(nn.Module):
    """Words and an item match, or not: two tables, one of them padded, and a network between them."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(NUM_WORDS, DIM, padding_idx=0)
        self.first = nn.Linear(DIM, 8)
        self.second = nn.Linear(8, DIM)
        self.items = nn.Embedding(NUM_ITEMS, DIM)

    def forward(self, words_BL: Tensor, items_B: Tensor, scale: Tensor) -> Tensor:
        x_BD = self.second(torch.tanh(self.first(self.words(words_BL).mean(1))))
        return F.softplus(-(x_BD * self.items(items_B)).sum(-1)).mean() * scale


def draw_batch(step: int, rank: int, length: int = 3) -> Words:
    random = torch.Generator().manual_seed(10 * step + rank)
    words = torch.randint(NUM_WORDS, (4, length), generator=random)
    return words, torch.randint(NUM_ITEMS, (4,), generator=random), torch.ones((), dtype=DTYPE)


def draw_batches(rank: int, steps: int = 8, first: int = 0) -> list[Words]:
    return [draw_batch(step, rank) for step in range(first, first + steps)]


class Side:
    """A model and its optimizer in a loop: the plain ones, and what a loop does differently for the compiled one."""

    is_compiled = False

    def __init__(self, make_optimizer: Callable[[nn.Module], Optimizer]) -> None:
        torch.manual_seed(SEED)
        self.plain: Any = Matching().to(DTYPE)
        self.optimizer: Any = make_optimizer(self.plain)
        self.model: Any = self.plain
        self.log: list[float] = []
        self.scheduler = StepLR(self.optimizer, 1000)  # made before compile, as most are

    def lookahead(self, batches: Iterable[Words]) -> Iterator[Words]:
        return iter(batches)

    def no_sync(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def reduce(self) -> None:
        """What a compiled model's backward has done already: gradients become their mean over ranks."""
        for parameter in self.plain.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()

    def clip(self, max_norm: float) -> Tensor:
        self.reduce()
        return nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    def step(self) -> None:
        self.reduce()  # of gradients that are equal on all ranks, nothing but themselves
        self.optimizer.step()

    def update(self, batch: Words) -> None:
        """A step as it stands in every tutorial."""
        self.model(*batch).backward()
        self.step()
        self.optimizer.zero_grad()


class CompiledSide(Side):
    is_compiled = True

    def __init__(self, make_optimizer: Callable[[nn.Module], Optimizer]) -> None:
        super().__init__(make_optimizer)
        self.model = embrace_fx.compile(self.plain, optimizer=self.optimizer, strategy="alltoall")

    def lookahead(self, batches: Iterable[Words]) -> Iterator[Words]:
        found: Iterator[Words] = self.model.lookahead(batches)
        return found

    def no_sync(self) -> AbstractContextManager[None]:
        found: AbstractContextManager[None] = self.model.no_sync()
        return found

    def reduce(self) -> None:
        pass
