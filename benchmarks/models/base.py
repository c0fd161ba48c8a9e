"""What all models of the lab are: plain PyTorch, tables in one place, read at the head of the forward.

A user of a library with collections of tables (TorchRec) writes a model in two parts, the lookup of all ids at once and
what follows. The models here are written so, which lets every system train the same modules.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, ...]

Lookups = Mapping[str, tuple[str, Tensor]]
"""Name of a lookup -> (name of the table it reads, ids of any shape)."""


class TableModel(nn.Module, ABC):
    """A batch goes in, a scalar loss comes out; `tables` are `nn.Embedding`s, everything else is dense.

    Attributes:
        tables: the model's large tables by name; small ones (positions) are parameters of the dense part.
    """

    tables: nn.ModuleDict

    def embeddings(self) -> dict[str, nn.Embedding]:
        """`tables`, typed."""
        return {name: table for name, table in self.tables.items() if isinstance(table, nn.Embedding)}

    @abstractmethod
    def lookups(self, *batch: Tensor) -> Lookups:
        """What the batch reads."""

    @abstractmethod
    def loss(self, rows: Mapping[str, Tensor], *batch: Tensor) -> Tensor:
        """The mean loss, given the rows of every lookup: its ids' shape and D more."""

    def forward(self, *batch: Tensor) -> Tensor:
        rows = {name: self.tables[table](ids) for name, (table, ids) in self.lookups(*batch).items()}
        return self.loss(rows, *batch)


class Workload(Protocol):
    """A model at one size, with its data: a frozen dataclass of its sizes."""

    def make(self) -> TableModel:
        """The model, on the default device; its parameters are drawn from torch's default generator."""

    def batch(self, step: int, rank: int, seed: int) -> Batch:
        """One rank's batch: the same for the same arguments, whatever was drawn before."""


@dataclass(frozen=True)
class MoreRows:
    """A workload whose tables have `factor` times the rows, of which it reads those that it read before."""

    workload: Workload
    factor: int

    def make(self) -> TableModel:
        model = self.workload.make()
        for name, table in model.embeddings().items():
            larger = nn.Embedding(table.num_embeddings * self.factor, table.embedding_dim)
            with torch.no_grad():
                larger.weight[: table.num_embeddings] = table.weight
            model.tables[name] = larger
        return model

    def batch(self, step: int, rank: int, seed: int) -> Batch:
        return self.workload.batch(step, rank, seed)


@dataclass(frozen=True)
class Sizes:
    """Bytes of a model's parameters."""

    total_bytes: int
    table_bytes: int

    @property
    def table_share(self) -> float:
        return self.table_bytes / self.total_bytes


def on_meta(workload: Workload) -> TableModel:
    """The model without memory: shapes and names."""
    with torch.device("meta"):
        return workload.make()


def sizes(model: TableModel) -> Sizes:
    """Counts every parameter once, tables apart; the meta device will do."""
    total, tables = (
        sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
        for module in (model, model.tables)
    )
    return Sizes(total, tables)
