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
    """A model that takes a batch and returns a scalar loss. Its `tables` are `nn.Embedding`s, everything else is dense.

    Attributes:
        tables: the model's large tables by name; small ones (positions) are parameters of the dense part.
    """

    tables: nn.ModuleDict

    def embeddings(self) -> dict[str, nn.Embedding]:
        """Returns `tables` with their type."""
        return {name: table for name, table in self.tables.items() if isinstance(table, nn.Embedding)}

    @abstractmethod
    def lookups(self, *batch: Tensor) -> Lookups:
        """Returns the tables and ids that a batch looks up."""

    @abstractmethod
    def loss(self, rows: Mapping[str, Tensor], *batch: Tensor) -> Tensor:
        """Returns the mean loss, given the rows of every lookup, with the shape of the ids and one more dimension D."""

    def forward(self, *batch: Tensor) -> Tensor:
        rows = {name: self.tables[table](ids) for name, (table, ids) in self.lookups(*batch).items()}
        return self.loss(rows, *batch)


class Workload(Protocol):
    """A model of one size, with its data: a frozen dataclass of its sizes."""

    def make(self) -> TableModel:
        """Creates the model on the default device. Its parameters are drawn from torch's default generator."""

    def batch(self, step: int, rank: int, seed: int) -> Batch:
        """Returns one rank's batch. It depends only on the arguments."""


@dataclass(frozen=True)
class MoreRows:
    """A workload whose tables have `factor` times as many rows. Batches read the same rows as before."""

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
    """The bytes of a model's parameters."""

    total_bytes: int
    table_bytes: int

    @property
    def table_share(self) -> float:
        return self.table_bytes / self.total_bytes


def on_meta(workload: Workload) -> TableModel:
    """Returns the model on the meta device: shapes and names, without memory."""
    with torch.device("meta"):
        return workload.make()


def sizes(model: TableModel) -> Sizes:
    """Counts every parameter once, and tables separately. The model may be on the meta device."""
    total, tables = (
        sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
        for module in (model, model.tables)
    )
    return Sizes(total, tables)
