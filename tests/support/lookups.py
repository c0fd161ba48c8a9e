"""Workloads whose tables are read by single lookups, and by many."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.models import Batch


class Lookups(nn.Module):
    """A table under a small network; the loss is a sum, so that it has a value on a batch without examples.

    The padding row is not zero, as in a table that was trained without padding: weight decay would move it.
    """

    def __init__(self, dim: int, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding.from_pretrained(torch.randn(30, dim), freeze=False, **options)
        self.mix = nn.Linear(dim, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return (torch.tanh(self.mix(self.table(ids))) - 0.3).square().sum() / 20


@dataclass(frozen=True)
class LookupsWorkload:
    """A table's width and options; batches of ids of one shape, kind and content."""

    dim: int = 10
    padding_idx: int | None = None
    max_norm: float | None = None
    shape: tuple[int, ...] = (4, 5)
    id_dtype: torch.dtype = torch.int64
    only_id: int | None = None
    some_empty: bool = False
    vary: bool = False

    def make(self, dtype: torch.dtype, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        options = {key: getattr(self, key) for key in ("padding_idx", "max_norm")}
        return Lookups(self.dim, **options).to(dtype)

    def batches(self, step: int, rank: int, seed: int) -> Batch:
        random = torch.Generator().manual_seed((seed * 100 + step) * 10 + rank)
        shape = self.shape
        if self.some_empty and (rank == step % 3 or step % 5 == 4):  # on one rank, in some steps on all ranks
            shape = (0, *shape[1:])
        ids = torch.randint(30, shape, generator=random)
        if self.only_id is not None and step % 2:
            ids.fill_(self.only_id)
        return (ids.to(self.id_dtype),)


class ManyUses(nn.Module):
    """One table, read by two layers that share it, by a function, by a bag, and twice with the same ids."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 6)
        self.again = nn.Embedding(30, 6)
        self.again.weight = self.table.weight
        self.mix = nn.Linear(6, 6)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        first = self.table(a) * torch.sigmoid(self.again(a))
        second = self.mix(F.embedding(b, self.table.weight)).mean(1)
        third = F.embedding_bag(b, self.table.weight, mode="sum")
        return (first.mean(1) * second - third).square().mean()


@dataclass(frozen=True)
class ManyUsesWorkload:
    """Two batches of ids, of different lengths."""

    vary: bool = False

    def make(self, dtype: torch.dtype, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return ManyUses().to(dtype)

    def batches(self, step: int, rank: int, seed: int) -> Batch:
        random = torch.Generator().manual_seed((seed * 100 + step) * 10 + rank)
        return torch.randint(30, (3, 4), generator=random), torch.randint(30, (3, 2), generator=random)
