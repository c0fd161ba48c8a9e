"""Exchanges the rows of a table between ranks, also early for the next batch (EmbRace, ICPP 2022, section 4.2).

    backward t      early rows   rows of batch t+1 that batch t does not read: looked up, sent
                    prior rows   gradients of rows of batch t that batch t+1 reads, on any rank: sent first
                    delayed rows the other gradients of batch t: sent last, in chunks
    forward t+1     prior gradients applied -> late rows, which batch t touched, looked up, sent -> rows put together
    backward t+1    delayed gradients applied, before anything of batch t+2 is looked up

The nodes of a program say which of these is sent, awaited or applied when; here is how rows travel, and in
`row_gradient.py` how gradients do.

Batch 1 reads rows [2, 5], batch 2 rows [5, 9]. Row 9 is early: it is sent while the backward of batch 1 runs. Row 5 is
late: it is sent after the update by batch 1. Most optimizers move row 9 in that step too: AdamW decays it. So it is
sent as the step will leave it, which is computed on a copy, with the options of that moment. If another step is taken,
or someone writes the table, what was sent is stale: then it is dropped, and all rows of batch 2 are sent after the
update.

Contract
    A call of a node takes what its op takes, behind the launch that it is of, and marks for the recorder what the
    calling thread has computed up to there.
    A row is looked up after its last update.
    Every rank knows which rows every rank reads, so that all cut alike and no sizes are exchanged.

Shape legend: as in `embrace_fx/vocabulary/ops.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from embrace_fx.runtime.flow.routing import Routing, cut_batches, membership
from embrace_fx.runtime.flow.row_gradient import RowGradient, SentRows
from embrace_fx.runtime.kernels import join_columns, join_columns_into
from embrace_fx.runtime.kernels.grid import join_grid_into
from embrace_fx.runtime.launch.launch_queue import Ticket
from embrace_fx.runtime.launch.launcher import Launcher
from embrace_fx.runtime.ranks.communicator import Communicator, counts_as_lists
from embrace_fx.runtime.tables.table import Table
from embrace_fx.runtime.tables.update_rule import Options
from embrace_fx.vocabulary.operation_id import EARLY, OperationId, compute_id
from embrace_fx.vocabulary.plan import Grid


class RowExchange:
    """Exchanges the rows of one table between ranks. Some rows of the next batch (early rows) may be sent before its
    step.

    Args:
        delayed_chunks: the number of pieces in which delayed gradients are sent. These are gradients of rows that the
            next batch does not read.
        overlaps: whether rows may be sent in the step before their batch's own, and gradients in the step after it.

    Attributes:
        sent: exchanges of rows in flight for a batch whose forward has not waited for them yet.
    """

    def __init__(
        self, table: Table, communicator: Communicator, launcher: Launcher, delayed_chunks: int, *, overlaps: bool
    ) -> None:
        self.table, self.delayed_chunks, self.overlaps = table, delayed_chunks, overlaps
        self._communicator, self._launcher, self._recorder = communicator, launcher, launcher.recorder
        self._grid = table.grid or Grid(1, communicator.world_size)
        self.isin = membership(table.shape[0], table.local.device)
        self.gradient = RowGradient(table, communicator, launcher, self._grid)
        self.sent: list[SentRows] = []
        self._early: Routing | None = None  # early rows of the next batch, once both batches' rows are split
        # Rows that were sent early: (ids, rows in the table, rows as sent).
        self._preview: tuple[Tensor, Tensor, Tensor] | None = None
        self._expected: tuple[Optimizer | None, Options] | None = None  # the optimizer step that rows sent early assume
        self._stale = False  # whether the table was written or a different step was taken after sending

    def routing(self, ids: Tensor, counts: Tensor) -> Routing:
        """Returns which rows of the table each rank reads, from the ids of all ranks in order, and their counts."""
        if (early := self._early) is not None and early.whole is not None and early.whole.ids is ids:
            return early.whole
        return Routing(ids, tuple(counts.tolist()), self._grid, self._communicator.rank)

    # -- functions that nodes call -------------------------------------------------------------------------------------

    def submit_rows(
        self, launch: OperationId, shard: Tensor, ids: Tensor, counts: Tensor, table: str, dtype: torch.dtype, name: str
    ) -> None:
        """Looks up rows of the table for all ranks, and submits their exchange.

        Args:
            launch: the id of the exchange, which tells which rows to send. Its part "early" means the rows of the next
                batch that the last `cut_batches` has found. Other launches send those rows of this batch that were not
                sent early.
            ids, counts: as for `routing`; unused for early rows.
            dtype: the dtype in which the rows are sent.
        """
        is_early = launch.part == "early"
        routing = self._early if is_early else self._begin_batch(ids, counts)
        assert routing is not None
        held = routing.held_ids
        self.table.record(held, routing.all_ids)
        rows = self._predict_rows(held).to(dtype) if is_early else self.table.look_up(held, dtype)
        ticket = self.gradient.submit(launch, self._communicator.send_rows, rows, routing.counts_by_row)
        self.sent.append(SentRows(ticket, routing))
        self._recorder.mark(compute_id("update", launch.what) if self._recorder.segment is not None else EARLY)

    def _begin_batch(self, ids: Tensor, counts: Tensor) -> Routing:
        """Begins the forward of a batch, given as for `routing`. Returns which of its rows have not been sent yet."""
        early, gradient, batch = self._early, self.gradient, self.routing(ids, counts)
        if early is not None and early.whole is batch:
            (left,) = early.rest()
        else:  # no row was sent early, or the early rows were for another batch
            gradient.apply()
            self.sent, left = [], batch
        gradient.batch, gradient.prior = batch, None
        return left

    def await_rows(
        self, launch: OperationId, ids: Tensor, counts: Tensor, table: str, dtype: torch.dtype, name: str
    ) -> Tensor:
        """Waits for the exchange `launch`. Returns the received rows, flat; none if it was not submitted."""
        self._recorder.pause_segment()
        for ticket, _ in self.sent:
            if ticket.id == launch:
                return self._launcher.wait(ticket)
        return ids.new_empty((0,), dtype=dtype)

    def join_rows(self, parts: object, ids: Tensor, counts: Tensor, table: str) -> Tensor:
        """Joins the parts of this rank's rows, which this object has received, to all columns, flat (U * D,)."""
        batch = self.gradient.batch
        assert batch is not None
        shape = batch.counts[self._communicator.rank], self.table.shape[1]
        joined: Tensor | None = None
        for ticket, routing in self.sent:
            arrived = ticket.value if ticket.done else self._launcher.wait(ticket)
            joined = _write_received(routing, arrived, joined, shape)
        self._end_batch()
        assert joined is not None
        self._recorder.mark(compute_id("rows", table))
        self._recorder.begin_segment(compute_id("forward", table))
        return joined.view(-1)

    def _end_batch(self) -> None:
        """Drops the rows in flight, and the record of which rows were sent early."""
        self.sent, self._early, self._preview = [], None, None

    def all_to_all_rows(self, launch: OperationId, columns: Tensor, counts: Tensor, *_: object) -> Ticket:
        """Submits one exchange of all rows of a batch, of which this rank has the `columns` (M, d)."""
        ticket = self.gradient.submit(launch, self._communicator.send_rows, columns, counts_as_lists(counts))
        self._recorder.mark(compute_id("update", launch.what))
        return ticket

    # -- two batches ---------------------------------------------------------------------------------------------------

    def can_split(self, ids: Tensor | None) -> bool:
        """Returns whether the gradients of the batch whose ranks read `ids` may be sent in parts. The last forward must
        have run this batch, and the next optimizer step must use no other gradient of the table.
        """
        batch = self.gradient.batch
        return batch is not None and batch.ids is ids and not self.table.has_gradient

    def cut_batches(self, ids: Tensor, counts: Tensor, found: tuple[Routing, Routing] | None = None) -> None:
        """Divides the rows of this batch and of the next one, at the start of a backward, by whether both batches read
        them.

        Args:
            ids, counts: the next batch, as for `routing`.
            found: the result of the function `cut_batches`, if it is known.
        """
        gradient = self.gradient
        gradient.apply()
        assert gradient.batch is not None
        if found is None:
            found = cut_batches(gradient.batch, self.routing(ids, counts), self.isin, self.delayed_chunks)
        gradient.prior, self._early = found
        self.sent = []

    # -- early rows ----------------------------------------------------------------------------------------------------

    def _predict_rows(self, ids: Tensor) -> Tensor:
        """Predicts the values that the rows `ids` of this rank's shard will have after the next optimizer step."""
        before = self.table.look_up(ids, self.table.local.dtype)
        after, options = self.table.predict_rows(ids, before)
        self._preview = ids, before, after
        self._expected = None if options is None else (self.table.members[0].optimizer, options)
        return after

    def is_usable(self, *, compare: bool) -> bool:
        """Returns whether rows that were sent early are still valid, also if they `compare` with the table's."""
        # Early rows are those that the current batch does not read, so they cannot be used without a current batch.
        if self._stale or self._expected is not None or (self.sent and self.gradient.batch is None):
            return False
        if not compare or self._preview is None:
            return True
        ids, before, after = self._preview
        # True if the optimizer step that early rows anticipate has not been applied to the table yet.
        waits = self.gradient.step is not None or self.table.history.has_deferred
        return torch.equal(self.table.peek(ids), before if waits else after)

    def record_step(self, *, moved_all: bool, of_all: bool = True, rewritten: bool = False) -> None:
        """Records an optimizer step. Marks rows that were sent early as stale if the step was not the predicted one.

        Args:
            moved_all: whether the step also changed rows without a gradient.
            of_all: whether the step updated all tables of a joined table.
            rewritten: whether the training loop may have given a gradient to rows that the batch did not read.
        """
        expected, self._expected = self._expected, None
        if self.sent:
            other = moved_all if expected is None else not (of_all and self.table.steps_by(*expected))
            self._stale |= rewritten or other

    def drop(self) -> None:
        """Drops rows that were sent early, because no forward will read them."""
        self._end_batch()
        self._stale, self._expected = False, None


def _write_received(routing: Routing, flat: Tensor, out: Tensor | None, shape: tuple[int, int]) -> Tensor:
    """Writes received rows to their positions among all rows (U', D) of this rank's batch, and returns all of these.

    Args:
        flat: the received rows, in blocks by sending rank. Each block has the columns of that rank's shard.
        out: the tensor with the rows received so far, or None to allocate it in `shape`.
    """
    positions, columns = routing.own_positions, routing.grid.columns
    if positions is None:
        return join_columns(flat, shape[1], columns)
    out = flat.new_empty(shape) if out is None else out
    if routing.grid.rows == 1:
        join_columns_into(out, positions, flat, columns)
    else:
        join_grid_into(out, positions, flat, routing.counts_by_row[routing.rank], columns)
    return out
