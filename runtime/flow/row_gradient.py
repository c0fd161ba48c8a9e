"""The gradient of a table's rows, from the backward that computes it to the update that applies it.

    sent        its parts leave: prior rows first (row 5, which batch 2 reads), then delayed ones (row 2), in chunks
    delivered   `.grad` of each table is on its way; a look at it waits, and finds an ordinary gradient
    taken       an optimizer has stepped: the update waits for the next forward, under the options of that moment
    applied     part by part, as the forward and the backward after it come to need the rows

Batch 1 reads rows [2, 5], batch 2 rows [5, 9]: `row_exchange.py` has the whole way.

Contract
    Each row is updated once per step, with the options of that step.

Shape legend: as in `embrace_fx/vocabulary/ops.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor

from embrace_fx.runtime.flow.routing import Routing
from embrace_fx.runtime.kernels import coalesce, split_columns, split_selected_columns, sum_known_ids
from embrace_fx.runtime.kernels.grid import split_selected_grid
from embrace_fx.runtime.kernels.membership import rows_on_device
from embrace_fx.runtime.launch.launch_queue import Ticket
from embrace_fx.runtime.launch.launcher import Launcher
from embrace_fx.runtime.ranks.communicator import Communicator, Counts, InFlight, counts_as_lists
from embrace_fx.runtime.ranks.groups import LANE_GROUP
from embrace_fx.runtime.tables.gradient_storage import sum_rows
from embrace_fx.runtime.tables.local_storage import GONE, GradientFuture, Rows
from embrace_fx.runtime.tables.table import Table
from embrace_fx.runtime.tables.update_rule import SparseUpdate
from embrace_fx.vocabulary.operation_id import EARLY, OperationId, compute_id
from embrace_fx.vocabulary.plan import Grid


class SentRows(NamedTuple):
    """An exchange in flight of rows of a table, or of their gradients, and which of the rows each rank reads."""

    ticket: Ticket
    routing: Routing


class SumOptions(NamedTuple):
    """Options for summing the gradients that ranks send for the rows of one table.

    Attributes:
        columns: the number of columns in this rank's shard (d).
        padding_rows: ids of rows that get no gradient.
        scale: the factor by which sums are multiplied.
    """

    dtype: torch.dtype
    columns: int
    padding_rows: tuple[int, ...]
    scale: float


class RowGradient:
    """The gradient of one table's rows, from the backward that computes it to the update that applies it.

    Attributes:
        batch: which rows each rank reads for the last batch. None once the gradient of another batch has been sent.
        prior: the rows of `batch` whose gradients are sent first, or None if all gradients are sent together.
        parts: launch id -> a part of the gradient that was sent and has not been applied, in launch order.
        step: the optimizer step that will apply the gradient, or None.
    """

    def __init__(self, table: Table, communicator: Communicator, launcher: Launcher, grid: Grid):
        self._table, self._communicator, self._grid = table, communicator, grid
        self._launcher, self._recorder = launcher, launcher.recorder
        self._row, _ = grid.place(communicator.rank)
        local = table.local
        self._columns, self._dtype = local.shape[1], local.dtype  # cached, because they do not change
        self.batch: Routing | None = None
        self.prior: Routing | None = None
        self.parts: dict[OperationId, SentRows] = {}
        self.step: SparseUpdate | None = None
        self._late: GradientFuture[Sequence[Rows]] | None = None  # the future to which `.grad` refers after `deliver`

    # -- from its backward ---------------------------------------------------------------------------------------------

    def submit_gradients(
        self,
        launch: OperationId,
        rows: Tensor,
        ids: Tensor,
        counts: Tensor,
        table: str,
        padding_rows: Sequence[int],
        scale: float,
        name: str,
    ) -> RowGradient:
        """Sends gradients of the rows that this rank has read to the ranks that have these rows in their shards.

        Args:
            launch: the id of the exchange, which tells which part of the gradient to send.
            rows: the gradients (U, D) of all rows that this rank has read.
            ids, counts: the rows that all ranks have read, in rank order, and how many of them each rank has read.
            padding_rows, scale: as in `SumOptions`.

        Returns:
            This object, which represents the gradient among the backward's outputs.
        """
        self._recorder.mark(compute_id("backward", launch.what))
        if launch.part == "delayed":
            assert self.prior is not None
            self._submit_rows(launch, rows, self.prior.rest()[launch.number])
            return self
        self.apply()
        self.wait()  # wait for an earlier backward's gradient, because the optimizer step uses the sum
        batch = self.batch
        if batch is None or batch.ids is not ids:  # the gradient is not of the last forward's batch
            batch = Routing(ids, tuple(counts.tolist()), self._grid, self._communicator.rank)
            self.batch = self.prior = None
        self._sums = SumOptions(self._dtype, self._columns, tuple(padding_rows), scale)
        self._submit_rows(launch, rows, batch if self.prior is None else self.prior)
        return self

    def _submit_rows(self, launch: OperationId, rows: Tensor, routing: Routing) -> None:
        """Packs the gradients in `rows` that `routing` selects, and submits their exchange."""
        self._table.record(routing.held_ids, routing.all_ids)
        flat, send = _pack_columns(routing, rows), self._communicator.send_gradients
        self.parts[launch] = SentRows(self.submit(launch, send, flat, routing.counts_by_row), routing)

    def all_to_all_gradients(self, launch: OperationId, flat: Tensor, counts: Tensor, *_: object) -> Ticket:
        """Submits the exchange of all row gradients (U * D,), in blocks by receiving rank."""
        self._recorder.mark(compute_id("backward", launch.what))
        return self.submit(launch, self._communicator.send_gradients, flat, counts_as_lists(counts))

    def submit(self, launch: OperationId, send: Callable[..., InFlight], values: Tensor, counts: Counts) -> Ticket:
        """Submits an AlltoAll of looked-up rows or of packed row gradients. Returns the ticket to wait for.

        Args:
            send: the method of the communicator that launches the exchange.
            values: the rows (M, d) of this rank's shard, or the gradients (U * D,).
            counts: for each rank, how many rows it reads from each row of the grid of ranks.
        """
        kept, width = counts[self._communicator.rank][self._row] * self._columns, self._table.shape[1]
        return self._launcher.submit(
            launch,
            lambda: send(values, counts, width, LANE_GROUP[launch.lane]),
            (values.numel() - kept) * values.element_size(),
        )

    def deliver(self, absent: Collection[str], *, unreduced: bool) -> None:
        """Sets the `.grad` of the table's parameters, except those named in `absent`, to this gradient, or adds it to a
        gradient that is already there. `unreduced` is whether it is only this rank's own, as under `no_sync`.
        """
        found, by, split = ref(self._table), ref(self._launcher), self._table.split  # `.grad` must not keep the model
        parts, sums = tuple(self.parts.values()), self._sums  # copy the parts, because a step removes some of them

        def wait() -> list[Sequence[Rows]]:
            """Waits for all parts of the gradient, and returns them split by parameter."""
            table, launcher = found(), by()
            if table is not None and launcher is not None:
                with launcher.flushing():  # rows of the next forward may come before these in the launch order
                    arrived = _wait_for_parts(parts, table, launcher, sums)
            elif all(ticket.queue.draining for ticket, _ in parts):  # launches of an earlier plan have all completed
                arrived = [sum_received(routing, ticket.wait(), sums) for ticket, routing in parts]
            else:
                raise RuntimeError(GONE)
            return [list(rows) for rows in zip(*(split(*rows) for rows in arrived), strict=True)]

        self._late = GradientFuture(wait)
        self._table.gradient.deliver(self._late, absent, unreduced=unreduced)

    # -- until a step has taken it -------------------------------------------------------------------------------------

    @property
    def waiting(self) -> bool:
        """Whether the gradient is in flight, no optimizer step has used it yet, and a `.grad` still refers to it."""
        if self.step is not None or self._late is None:
            return False
        if not self._table.gradient.count_in_flight(self._late):  # the gradient was dropped or has been read
            self._clear()
        return self._late is not None

    def may_defer(self) -> bool:
        """Returns whether the gradient is in flight and an optimizer step can leave its update to the next forward."""
        if not self.waiting or self._late is None:
            return False
        return self._table.gradient.count_in_flight(self._late) == len(self._table.members) and self._table.can_defer()

    def begin_step(self) -> SparseUpdate:
        """Records that the optimizer has stepped. Returns the update, which the next forward applies."""
        self.step = self._table.begin_step()
        return self.step

    def wait(self) -> None:
        """Waits for the gradient if a `.grad` still refers to it, and ends the exchange."""
        if self.waiting and self._late is not None:
            for table in self._table.members:
                if table.waits_for(self._late):
                    table.open_gradient().wait()
        self.drop()

    def drop(self) -> None:
        """Drops the gradient in flight, unless an optimizer step still has to apply it."""
        if self.step is None:
            self._clear()

    def _clear(self) -> None:
        """Drops the parts of the gradient that were sent, and the optimizer step that would apply them."""
        self.parts, self.step, self._late = {}, None, None

    # -- the update ----------------------------------------------------------------------------------------------------

    def with_rows(self) -> tuple[SparseUpdate, Rows]:
        """Waits for all parts of the gradient. Returns the optimizer step that applies them, and their ids and rows."""
        assert self.step is not None
        rows, self.parts = self._wait_for_rest(), {}
        return self.step, sum_rows(rows)

    def update_rows(self, launch: OperationId, shard: Tensor, *_: object) -> Tensor:
        """Applies the part that `launch` has sent. Returns `shard`, for nodes that must run after the update."""
        self.apply(launch)
        if self._recorder.segment is None:
            self._recorder.mark(EARLY)
        return shard

    def apply(self, launch: OperationId | None = None) -> None:
        """Applies the part of the gradient that `launch` has sent, or all remaining parts if `launch` is None, with the
        options of the optimizer step that has used the gradient. With the last delayed part, also steps all rows
        without a gradient.

        If no optimizer step has used the gradient yet, applies nothing. If, in this case, the part is not a delayed
        one, waits for the gradient, which stays in `.grad`.
        """
        if self.step is None:
            if launch is not None and launch.part != "delayed":
                self.wait()
            return
        if launch is None:
            self.step.finish(self._wait_for_rest())
            self._clear()
            return
        landed = not self.parts
        own = [self.parts.pop(launch)] if launch in self.parts else None
        arrived = [] if own is None else _wait_for_parts(own, self._table, self._launcher, self._sums)
        if landed or (launch.part == "delayed" and not self.parts):
            self.step.finish(arrived)
            self._clear()
            return
        for ids, rows in arrived:
            # Step padding rows now, without a gradient. The next batch may read them before `finish` would step them.
            if launch.part == "prior" and self.step.moves_all and (paddings := self._sums.padding_rows):
                ids = torch.cat([ids, rows_on_device(paddings, ids.device)])
                rows = F.pad(rows, (0, 0, 0, len(paddings)))
            self.step.apply(ids, rows)

    def _wait_for_rest(self) -> list[Rows]:
        """Waits for the parts that have not been applied yet. Returns the ids and gradient rows of each part."""
        with self._launcher.flushing():  # rows of the next forward may come before these in the launch order
            return _wait_for_parts(self.parts.values(), self._table, self._launcher, self._sums)


def _pack_columns(routing: Routing, rows: Tensor) -> Tensor:
    """Packs the gradients (U', D) of the rows in `routing` to (U * D,), in blocks by receiving rank."""
    positions, columns = routing.own_positions, routing.grid.columns
    if positions is None:
        return split_columns(rows, columns)
    if routing.grid.rows == 1:
        return split_selected_columns(rows, positions, columns)
    return split_selected_grid(rows, positions, routing.counts_by_row[routing.rank], columns)


def sum_received(routing: Routing, flat: Tensor, sums: SumOptions) -> tuple[Tensor, Tensor]:
    """Sums the gradients (M * d,) that ranks have sent for each row. Returns ids (K,) and sums (K, d)."""
    flat = flat.to(sums.dtype)
    if routing.sums is None:
        ids, rows = coalesce(routing.held_ids, flat, sums.columns, sums.padding_rows, sums.scale)
    else:
        ids, rows = sum_known_ids(flat, routing.sums, sums.columns, sums.scale)
    return ids, rows


def _wait_for_parts(parts: Iterable[SentRows], table: Table, launcher: Launcher, sums: SumOptions) -> list[Rows]:
    """Waits for parts of a table's gradient. Returns the ids and summed gradient rows of each part."""
    found = []
    for ticket, routing in parts:
        ids, rows = sum_received(routing, launcher.wait(ticket), sums)
        table.record(ids, routing.held_ids)
        found.append((ids, rows))
    return found
