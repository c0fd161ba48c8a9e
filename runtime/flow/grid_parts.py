"""Parts of a batch's rows on the grid of ranks that a table lies on: who has them, and how they travel.

Contract
    Columns alone are a grid of one row. Parts are cut by the ids of all ranks, in the same way on all of them; of a
    part, a rank looks up, receives and updates what its own row of the grid has.
    On a device with several rows in the grid, the host waits for the sizes of each part.

Shape legend: as in `embrace_fx/vocabulary/ops.py`; U' rows that this rank reads of the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from embrace_fx.runtime.flow.routing import Routing, Selection
from embrace_fx.runtime.kernels import (
    coalesce,
    join_columns,
    join_columns_into,
    split_columns,
    split_selected_columns,
)
from embrace_fx.runtime.kernels.grid import join_grid_into, route_grid, split_selected_grid
from embrace_fx.vocabulary.plan import Grid


@dataclass(frozen=True)
class GridPart:
    """Rows of a batch, all or some, on a grid.

    Attributes:
        ids: (M,) rows of the own part of the table that any rank reads, in rank order of the readers.
        counts: how many rows a rank reads of each row of the grid, by rank.
        own: likewise, of this rank.
        positions: (U,) of this rank's rows among those of its batch, grouped by the grid's rows; None: all of them, on
            a grid of one row.
        columns: of the grid.
        selection: which of the batch's rows these are; None: all.
    """

    ids: Tensor
    counts: Sequence[Sequence[int]]
    own: Sequence[int]
    positions: Tensor | None
    columns: int
    selection: Selection | None

    @staticmethod
    def of(routing: Routing, selection: Selection | None, grid: Grid, rank: int) -> GridPart:
        """All of a batch's rows, or those selected."""
        ids, sizes, positions = routing.ids, routing.counts, None
        if selection is not None:
            ids, sizes = ids.index_select(0, selection.positions), selection.counts
            positions = selection.own(routing, rank)
        if grid.rows == 1:
            return GridPart(ids, [(size,) for size in sizes], (sizes[rank],), positions, grid.columns, selection)
        own_ids, by_row, order = route_grid(ids, torch.tensor(sizes, device="cpu"), rank, grid.rows, grid.columns)
        positions = order if positions is None else positions.index_select(0, order)
        counts = by_row.tolist()
        return GridPart(own_ids, counts, counts[rank], positions, grid.columns, selection)

    def join(self, flat: Tensor, out: Tensor | None, shape: tuple[int, int]) -> Tensor:
        """The rows that have arrived, in their places among those of the batch.

        Args:
            out: (U', D) those of parts before; None: there are none.
            shape: U', D.
        """
        if self.positions is None:
            return join_columns(flat, shape[1], self.columns)
        out = flat.new_empty(shape) if out is None else out
        if len(self.own) == 1:
            join_columns_into(out, self.positions, flat, self.columns)
        else:
            join_grid_into(out, self.positions, flat, self.own, self.columns)
        return out

    def split(self, rows: Tensor) -> Tensor:
        """The part of rows (U', D) as it is sent: flat (U * D,), blocks by the rank that each goes to."""
        if self.positions is None:
            return split_columns(rows, self.columns)
        if len(self.own) == 1:
            return split_selected_columns(rows, self.positions, self.columns)
        return split_selected_grid(rows, self.positions, self.own, self.columns)

    def summed(
        self, flat: Tensor, dtype: torch.dtype, columns: int, padding_idx: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        """The gradients (M, d) of all ranks that have arrived, flat, as one for each row: ids (K,), rows (K, d)."""
        how = (self.ids, flat.to(dtype), columns, padding_idx, scale)
        if self.selection is not None:
            return self.selection.coalesce(*how)
        ids, rows = coalesce(*how)
        return ids, rows
