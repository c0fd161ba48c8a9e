"""One sharded table's communication, or one stack's, when it runs into the next step (EmbRace, ICPP 2022, section 4.2).

    backward t      early rows   rows of batch t+1 that batch t does not read: looked up, sent
                    prior rows   gradients of rows of batch t that batch t+1 reads, on any rank: sent first
                    delayed rows the other gradients of batch t: sent last, in chunks
    forward t+1     prior gradients applied -> late rows, which batch t touched, looked up, sent -> rows put together
    backward t+1    delayed gradients applied, before anything of batch t+2 is looked up

The nodes of a program say which of these is sent, awaited or applied when; here is how.

Contract
    A call of a node takes what its op takes, behind the launch that it is of, and marks for the recorder what the
    calling thread has computed up to there.
    A row is looked up after its last update; each row is updated once per step, with the options of that step.
    Every rank knows which rows every rank reads, so that all cut alike and no sizes are exchanged.

Shape legend: as in `embrace_fx/vocabulary/ops.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from embrace_fx.runtime.flow.in_flight import RowGradient, RowsInFlight, Sent
from embrace_fx.runtime.flow.routing import Routing, Split, membership
from embrace_fx.runtime.launch.launcher import Launcher
from embrace_fx.runtime.launch.ticket import Ticket
from embrace_fx.runtime.ranks.communicator import Communicator, Counts, by_row
from embrace_fx.runtime.ranks.groups import LANE_GROUP
from embrace_fx.runtime.tables.row_table import RowTable
from embrace_fx.runtime.tables.stacks import StackedTable
from embrace_fx.vocabulary.operation_id import EARLY, OperationId, compute_id
from embrace_fx.vocabulary.plan import Grid


class RowExchange:
    """The communication of one table, or of the tables of a stack.

    Args:
        table: the shard.
        delayed_chunks: in how many pieces delayed gradients travel, where rows are cut.
    """

    def __init__(
        self,
        table: RowTable | StackedTable,
        communicator: Communicator,
        launcher: Launcher,
        delayed_chunks: int,
    ) -> None:
        self.table = table
        self._communicator = communicator
        self._grid = table.grid or Grid(1, communicator.world_size)
        self._launcher = launcher
        self._recorder = launcher.recorder
        self.delayed_chunks = delayed_chunks
        local = table.local
        self._columns, self._dtype = local.shape[1], local.dtype  # as they stay
        self.among = membership(table.shape[0], local.device)
        self._gradient: RowGradient | None = None  # of the last backward, until it has been applied
        self.in_flight = RowsInFlight(table)
        self._routing: Routing | None = None  # of the batch whose forward runs or ran last
        self._split: Split | None = None  # of it and the next batch; None: all its rows are treated as prior

    def routing(self, ids: Tensor, counts: Tensor) -> Routing:
        """Returns all rows of a batch: ids of every rank, in rank order, and how many are whose."""
        return Routing(ids, tuple(counts.tolist()), self._grid, self._communicator.rank)

    # -- rows ----------------------------------------------------------------------------------------------------------

    def submit_rows(
        self, launch: OperationId, shard: Tensor, ids: Tensor, counts: Tensor, table: str, dtype: torch.dtype, name: str
    ) -> None:
        """Looks a batch's rows up and sends them: all of them, or late ones if early ones have left.

        Args:
            launch: which part. Early ones are those of the batch that `cut` was given.
            ids, counts: of the batch whose rows they are, unless they are early.
        """
        self._submit_rows(launch, ids, counts, dtype)
        self._recorder.mark(compute_id("update", launch.what) if self._recorder.in_forward else EARLY)

    def _submit_rows(self, launch: OperationId, ids: Tensor, counts: Tensor, dtype: torch.dtype) -> None:
        in_flight = self.in_flight
        if launch.part == "early":
            assert self._split is not None
            in_flight.sent.append(self._send_rows(launch, self._split.early, dtype))
            return
        if in_flight.routing is None or in_flight.routing.ids is not ids:  # no row was early, or for another batch
            self.apply_pending()
            in_flight.begin(self.routing(ids, counts))
        assert in_flight.late is not None
        self._routing, self._split = in_flight.routing, None
        in_flight.sent.append(self._send_rows(launch, in_flight.late, dtype))

    def await_rows(
        self, launch: OperationId, ids: Tensor, counts: Tensor, table: str, dtype: torch.dtype, name: str
    ) -> Tensor:
        """Returns a part of this rank's rows as it arrived, flat; empty where early rows were not sent apart."""
        self._recorder.stand()
        for ticket, _ in self.in_flight.sent:
            if ticket.id == launch:
                return self._launcher.wait(ticket)
        return ids.new_empty((0,), dtype=dtype)

    def join_rows(self, parts: object, ids: Tensor, counts: Tensor, table: str) -> Tensor:
        """All columns of this rank's rows, flat (U * D,)."""
        assert self._routing is not None
        shape = self._routing.counts[self._communicator.rank], self.table.shape[1]
        joined: Tensor | None = None
        for ticket, routing in self.in_flight.sent:
            joined = routing.join(self._launcher.wait(ticket), joined, shape)
        self.in_flight.end()
        assert joined is not None
        self._recorder.mark(compute_id("rows", table))
        self._recorder.begin_segment(compute_id("forward", table))
        return joined.view(-1)

    def _send_rows(self, launch: OperationId, routing: Routing, dtype: torch.dtype) -> Sent:
        ids = self._note(routing)
        return self._launch_rows(launch, self._look_up(launch, ids, dtype), routing.counts_by_row), routing

    def _note(self, routing: Routing) -> Tensor:
        """Returns the rows of the own part that any rank reads, and has the table note among which they are."""
        self.table.note(routing.held_ids, (routing.whole or routing).ids)
        return routing.held_ids

    def _look_up(self, launch: OperationId, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of the part, as they are; early ones as the step to come will leave them."""
        if launch.part != "early":
            return self.table.look_up(ids, dtype)
        return self.in_flight.preview(ids).to(dtype)

    def all_to_all_rows(self, launch: OperationId, columns: Tensor, counts: Tensor, *_: object) -> Ticket:
        """Launches the rows of a batch, of which nothing leaves early or late: columns (M, d)."""
        ticket = self._launch_rows(launch, columns, by_row(counts))
        self._recorder.mark(compute_id("update", launch.what))
        return ticket

    def all_to_all_gradients(
        self, launch: OperationId, flat: Tensor, counts: Tensor, embedding_dim: int, *_: object
    ) -> Ticket:
        """Launches the gradients of a batch's rows, likewise: flat (U * D,) by destination."""
        self._recorder.mark(compute_id("backward", launch.what))
        return self._launch_gradients(launch, flat, by_row(counts), embedding_dim)

    def _launch_rows(self, launch: OperationId, columns: Tensor, counts: Counts) -> Ticket:
        width = self.table.shape[1]
        return self._launcher.submit(
            launch,
            lambda: self._communicator.send_rows(columns, counts, width, LANE_GROUP[launch.lane]),
            (columns.shape[0] - self._kept(counts)) * columns.shape[1] * columns.element_size(),
        )

    def _launch_gradients(self, launch: OperationId, flat: Tensor, counts: Counts, width: int) -> Ticket:
        kept = self._kept(counts) * self._columns
        return self._launcher.submit(
            launch,
            lambda: self._communicator.send_gradients(flat, counts, width, LANE_GROUP[launch.lane]),
            (flat.numel() - kept) * flat.element_size(),
        )

    def _kept(self, counts: Counts) -> int:
        """Counts the rows that this rank reads from its own part."""
        rank = self._communicator.rank
        return counts[rank][self._grid.place(rank)[0]]

    @property
    def splits_ahead(self) -> bool:
        """Whether two batches may be cut on a device, before the host knows the sizes: not where parts are routed."""
        return self._grid.rows == 1

    # -- backward ------------------------------------------------------------------------------------------------------

    def can_split(self, ids: Tensor | None) -> bool:
        """Tells whether the gradient of the batch with these ids will be all that the coming step applies."""
        return (
            self._routing is not None and self._routing.ids is ids and not self.table.has_gradient and not self.waiting
        )

    def cut(self, ids: Tensor, counts: Tensor, split: Split | None = None) -> None:
        """Cuts both batches at the start of a backward, with the next batch's routing.

        Args:
            split: how they are cut, where that has been found already.
        """
        self.apply_pending()
        assert self._routing is not None
        following = self._routing.of_batch(ids, counts)
        split = split or Split.of(self._routing, following, self.among, self.delayed_chunks)
        self._split = split
        self.in_flight.begin(split.late)

    def forget_cut(self) -> None:
        """Treats all gradients of a backward that starts as prior ones, unless `cut` follows."""
        self._split = None

    def submit_gradients(
        self,
        launch: OperationId,
        rows: Tensor,
        ids: Tensor,
        counts: Tensor,
        table: str,
        padding_idx: int,
        scale: float,
        name: str,
    ) -> RowGradient:
        """Sends a part of the gradients (U, D) of this rank's rows of the batch: prior ones first, then delayed.

        Returns: the gradient of this backward, which a step may take once it has been delivered.
        """
        self._recorder.mark(compute_id("backward", launch.what))
        if launch.part == "delayed":
            gradient = self._gradient
            assert gradient is not None
            assert self._split is not None
            self._send_gradient(gradient, launch, rows, self._split.delayed()[launch.number])
            return gradient
        self.apply_pending()
        self.materialise()  # of an earlier backward: the step will want the sum
        routing = self._routing
        if routing is None or routing.ids is not ids:  # not the batch of the last forward
            routing, self._split = self.routing(ids, counts), None
            self.in_flight.stale = True  # they were chosen for not being among that one's rows
        gradient = RowGradient(self.table, self._launcher, (self._dtype, self._columns, padding_idx, scale))
        self._send_gradient(gradient, launch, rows, routing if self._split is None else self._split.prior)
        self._gradient = gradient
        return gradient

    def _send_gradient(self, gradient: RowGradient, launch: OperationId, rows: Tensor, routing: Routing) -> None:
        self._note(routing)
        ticket = self._launch_gradients(launch, routing.split(rows), routing.counts_by_row, rows.shape[1])
        gradient.parts[launch] = ticket, routing

    # -- updates -------------------------------------------------------------------------------------------------------

    @property
    def stepped(self) -> bool:
        """Tells whether a step has taken the gradient, and is still to be applied."""
        return self._gradient is not None and self._gradient.step is not None

    @property
    def is_under_way(self) -> bool:
        """Tells whether an update is still to be applied, or rows have left ahead."""
        return bool(self.in_flight.sent) or self.stepped

    @property
    def waiting(self) -> bool:
        """Tells whether there is a gradient on its way that no step has taken, and that `.grad` still is of."""
        gradient = self._gradient
        if gradient is None or gradient.step is not None:
            return False
        if not gradient.is_unseen:  # dropped, or someone has looked at it
            self._gradient = None
        return self._gradient is not None

    def may_step(self) -> bool:
        """Tells whether a step can take the gradient as it is, on its way, and leave the update to the next forward."""
        return self.waiting and self._gradient is not None and self._gradient.may_wait()

    def step(self) -> RowGradient:
        """Gives the gradient on its way the options of this moment, and returns it: the optimizer has stepped."""
        assert self._gradient is not None
        self.in_flight.note_step(moved_all=self._gradient.begin_step().moves_all)
        return self._gradient

    def update_rows(self, launch: OperationId, shard: Tensor, *_: object) -> Tensor:
        """Calls `update`; the shard orders nodes."""
        self.update(launch)
        if not self._recorder.in_forward:
            self._recorder.mark(EARLY)
        return shard

    def update(self, launch: OperationId) -> None:
        """Applies a part of what a step has taken; with the last part, what the step does to all other rows.

        Of a gradient that no step has taken, what comes before the next lookup is kept for the step.
        """
        gradient = self._gradient
        if gradient is None:
            return
        if gradient.step is None:
            if launch.part != "delayed":
                self.materialise()
        elif gradient.apply(launch):
            self._gradient = None

    def apply_prior(self) -> None:
        """Applies all parts of a taken gradient but delayed ones, where no node of a program has applied them."""
        if not self.waiting and self._gradient is not None:
            with self._launcher.hurrying():  # rows of this forward stand before them
                for launch in list(self._gradient.parts):
                    if launch.part != "delayed":
                        self.update(launch)

    def apply_pending(self) -> None:
        """Applies everything that a step has taken."""
        if self._gradient is not None and self._gradient.step is not None:
            self._gradient.finish()
            self._gradient = None

    def materialise(self) -> None:
        """Waits for a gradient that no step has taken: it was asked for, or is summed up."""
        if self.waiting and self._gradient is not None:
            self._gradient.land()
        self.discard()

    def discard(self) -> None:
        """Forgets a gradient that no step has taken."""
        if not self.stepped:
            self._gradient = None
