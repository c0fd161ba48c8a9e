"""Counts the rows of each table that this rank's batch reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from embrace_fx.passes.partition import extract_ids
from embrace_fx.runtime.kernels import unique_ids
from embrace_fx.runtime.step.phases import reader
from embrace_fx.runtime.tables.model_state import ModelState
from embrace_fx.vocabulary.graph import TrainingGraph, gradients_of
from embrace_fx.vocabulary.plan import Grid
from embrace_fx.vocabulary.random_state import random_state_kept


@dataclass(frozen=True)
class Read:
    """The rows that one batch reads of one table.

    Attributes:
        rows: number of unique rows, always with the padding row, which travels even if the batch does not hold it.
        drawn: (T,) all ids of the batch that get a gradient, with duplicates.
        unique: (rows,) the unique rows.
    """

    rows: int
    drawn: Tensor
    unique: Tensor

    def local_rows(self, rank: int, ranks: int) -> dict[int, int]:
        """Counts, for each grid, how many rows are in this rank's own row of it: rows of the grid -> count."""
        sizes = {each: Grid(each, ranks // each) for each in grid_rows(ranks)}
        return {each: int((self.unique % each == grid.place(rank)[0]).sum()) for each, grid in sizes.items()}


def grid_rows(ranks: int) -> list[int]:
    """Lists the numbers of rows, beyond one, that a grid of this many ranks can have."""
    return [each for each in range(2, ranks + 1) if ranks % each == 0]


def used_parameters(graph: TrainingGraph) -> set[str]:
    """Names the parameters to which the graph gives a gradient."""
    return {*gradients_of(graph.module)}


def reads_of(state: ModelState, graph: TrainingGraph, leaves: Sequence[Any]) -> dict[str, Read]:
    """Counts the rows that a batch reads, by table, by running the graph that computes its ids."""
    tables = [t for t in graph.tables if all(use.ids_from_batch for use in t.uses)]
    if not tables:
        return {}
    run = reader(extract_ids(graph, tables), state)
    parameter = state.any_parameter()
    device = torch.device("cpu") if parameter is None else parameter.device
    with random_state_kept(device), torch.no_grad():  # a model that draws ids must draw the same ones in its step
        ids = iter(run(leaves))
    reads = {}
    for table in tables:
        of_uses = [next(ids) for _ in table.uses]
        unique = unique_ids(of_uses, table.num_rows, table.uses[0].padding_idx)[0]
        drawn = [
            own[own != use.padding_idx] for own, use in zip((i.reshape(-1) for i in of_uses), table.uses, strict=True)
        ]
        reads[table.parameter] = Read(unique.numel(), torch.cat(drawn).to(torch.int64), unique)
    return reads
