"""One table's communication where it lies on a grid of ranks: the parts of `RowExchange`, each routed by itself.

Contract
    That of `RowExchange`. Parts are cut by the ids of all ranks, in the same way on all of them; of a part, a rank
    looks up, receives and updates what its own row of the grid has.
    On a device the host waits for the sizes of each part.

Shape legend: as in `embrace_fx/vocabulary/ops.py`; V' x d the rank's part of the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from embrace_fx.runtime.flow.routing import Routing, Selection
from embrace_fx.runtime.flow.row_exchange import RowExchange
from embrace_fx.runtime.flow.under_way import Arriving, Part, Rows
from embrace_fx.runtime.kernels.grid import join_grid_into, route_grid, split_selected_grid
from embrace_fx.runtime.launch.launcher import Ticket
from embrace_fx.runtime.ranks.groups import LANE_GROUP
from embrace_fx.vocabulary.operation_id import OperationId
from embrace_fx.vocabulary.plan import Grid

Counts = Sequence[Sequence[int]]
"""Rows of a part, by the rank that reads them, by the row of the grid that has them."""


@dataclass
class _GridRows(Rows):
    """Rows whose positions are grouped by the grid's rows, which have so many of them."""

    by_row: Sequence[int] = ()


@dataclass(frozen=True)
class _Route:
    """A part as `route_grid` tells it.

    Attributes:
        ids: (M,) rows of the own part of the table.
        positions: (U,) of this rank's rows among those of the batch, grouped by the grid's rows.
    """

    ids: Tensor
    counts: Counts
    positions: Tensor


class GridExchange(RowExchange):
    """The communication of one table on a grid."""

    splits_ahead = False

    def rows(self) -> Tensor:
        assert self._routing is not None
        shape = self._routing.counts[self._communicator.rank], self.table.shape[1]
        joined: Tensor | None = None
        for part in self._arriving.rows:
            assert isinstance(part, _GridRows)
            assert part.positions is not None
            flat = self._wait(part.ticket)
            joined = flat.new_empty(shape) if joined is None else joined
            join_grid_into(joined, part.positions, flat, part.by_row, self._grid.columns)
        self._arriving = Arriving()
        self.early.arrived()
        assert joined is not None
        return joined.view(-1)

    def _send_rows(
        self, launch: OperationId, routing: Routing, selection: Selection | None, dtype: torch.dtype
    ) -> Rows:
        route = self._route(routing, selection)
        ticket = self.send_rows(launch, self._look_up(launch, route.ids, dtype), route.counts)
        return _GridRows(route.positions, ticket, route.counts[self._communicator.rank])

    def _send_gradient(self, launch: OperationId, rows: Tensor, routing: Routing, selection: Selection | None) -> Part:
        route = self._route(routing, selection)
        own = route.counts[self._communicator.rank]
        flat = split_selected_grid(rows, route.positions, own, self._grid.columns)
        return Part(route.ids, self.send_gradients(launch, flat, route.counts, rows.shape[1]), None)

    def send_rows(self, launch: OperationId, columns: Tensor, counts: Counts) -> Ticket:  # type: ignore[override]
        """Launches the AlltoAll of looked-up columns (M, d)."""
        width = self.table.shape[1]
        row = self._grid.place(self._communicator.rank)[0]
        away = columns.shape[0] - counts[self._communicator.rank][row]
        return self._launcher.submit(
            launch,
            lambda: self._communicator.send_grid_rows(columns, counts, width, LANE_GROUP[launch.lane]),
            away * columns.shape[1] * columns.element_size(),
        )

    def send_gradients(  # type: ignore[override]
        self, launch: OperationId, flat: Tensor, counts: Counts, width: int
    ) -> Ticket:
        """Launches the AlltoAll of gradients, flat (U * D,) by destination, `width` = D."""
        row = self._grid.place(self._communicator.rank)[0]
        own = counts[self._communicator.rank][row] * self.table.local.shape[1]
        return self._launcher.submit(
            launch,
            lambda: self._communicator.send_grid_gradients(flat, counts, width, LANE_GROUP[launch.lane]),
            (flat.numel() - own) * flat.element_size(),
        )

    @property
    def _grid(self) -> Grid:
        grid = self.table.grid
        assert grid is not None
        return grid

    def _route(self, routing: Routing, selection: Selection | None) -> _Route:
        """Which of a part's rows are here, and whose this rank reads."""
        rank, grid = self._communicator.rank, self._grid
        ids, counts = routing.ids, routing.counts
        if selection is not None:
            ids, counts = ids.index_select(0, selection.positions), selection.counts
        own_ids, by_row, order = route_grid(ids, torch.tensor(counts), rank, grid.rows, grid.columns)
        positions = order if selection is None else selection.own(routing, rank).index_select(0, order)
        return _Route(own_ids, by_row.tolist(), positions)
