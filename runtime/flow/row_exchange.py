"""One sharded table's communication, or one stack's, when it runs into the next step (EmbRace, ICPP 2022, section 4.2).

    backward t      early rows   rows of batch t+1 that batch t does not read: looked up, sent
                    prior rows   gradients of rows of batch t that batch t+1 reads, on any rank: sent first
                    delayed rows the other gradients of batch t: sent last, in chunks
    forward t+1     prior gradients applied -> late rows, which batch t touched, looked up, sent -> rows put together
    backward t+1    delayed gradients applied, before anything of batch t+2 is looked up

The nodes of a program say which of these is sent, awaited or applied when; here is how.

Contract
    A row is looked up after its last update; each row is updated once per step, with the options of that step.
    Every rank knows which rows every rank reads, so that all cut alike and no sizes are exchanged.

Shape legend: as in `embrace_fx/vocabulary/ops.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

import torch
from torch import Tensor

from embrace_fx.runtime.flow.arriving import Arriving
from embrace_fx.runtime.flow.grid_parts import GridPart
from embrace_fx.runtime.flow.routing import Routing, RowSplitter, Selection, Split
from embrace_fx.runtime.flow.under_way import StepGradient, UnderWay, Wait, waits_for
from embrace_fx.runtime.kernels import coalesce
from embrace_fx.runtime.launch.launcher import Launcher
from embrace_fx.runtime.launch.ticket import Ticket
from embrace_fx.runtime.ranks.communicator import Communicator, Counts
from embrace_fx.runtime.ranks.groups import LANE_GROUP
from embrace_fx.runtime.tables.held_gradient import Rows, merged
from embrace_fx.runtime.tables.row_table import RowTable
from embrace_fx.runtime.tables.stacks import StackedTable
from embrace_fx.runtime.tables.update_rule import UpdateRule
from embrace_fx.vocabulary.operation_id import OperationId
from embrace_fx.vocabulary.plan import Grid


class RowExchange:
    """The communication of one table, or of the tables of a stack.

    Args:
        table: the shard.
        delayed_chunks: in how many pieces delayed gradients travel, where they are told apart.
        wait: waits for a ticket (and takes the time of it).
    """

    def __init__(
        self,
        table: RowTable | StackedTable,
        communicator: Communicator,
        launcher: Launcher,
        delayed_chunks: int,
        wait: Wait,
    ) -> None:
        self.table = table
        self._communicator = communicator
        self._grid = table.grid or Grid(1, communicator.world_size)
        self._launcher = launcher
        self.delayed_chunks = delayed_chunks
        self._wait = wait
        local = table.local
        self._columns, self._dtype = local.shape[1], local.dtype  # as they stay
        self.splitter = RowSplitter(table.shape[0], local.device)
        self._gradients: list[StepGradient] = []
        self.arriving = Arriving(table)
        self._routing: Routing | None = None  # of the batch whose forward runs or ran last
        self._split: Split | None = None  # of it and the next batch; None: all its rows are treated as prior
        self._delayed: list[Selection] | None = None  # the pieces of its delayed rows, once they have been found

    # -- rows ----------------------------------------------------------------------------------------------------------

    def submit_rows(self, launch: OperationId, ids: Tensor, counts: Tensor, dtype: torch.dtype) -> None:
        """Looks a batch's rows up and sends them: all of them, or late ones if early ones have left.

        Args:
            launch: which part. Early ones are those of the batch that `cut` was told of.
            ids, counts: of the batch whose rows they are, unless they are early.
        """
        arriving = self.arriving
        if launch.part == "early":
            split = self._split
            assert split is not None
            arriving.rows.append(self._send_rows(launch, split.following, split.early, dtype))
            return
        if arriving.routing is None or arriving.routing.ids is not ids:  # nothing has left early, or for another batch
            self.apply_delayed()
            arriving.begin(Routing.of(ids, counts))
        assert arriving.routing is not None
        self._routing, self._split = arriving.routing, None
        arriving.rows.append(self._send_rows(launch, arriving.routing, arriving.late, dtype))

    def await_rows(self, launch: OperationId, like: Tensor, dtype: torch.dtype) -> Tensor:
        """A part of this rank's rows as it arrived, flat; empty where early rows were not sent apart.

        Args:
            like: a tensor of the table's device.
        """
        for part in self.arriving.rows:
            if part.ticket.id == launch:
                return self._wait(part.ticket)
        return like.new_empty((0,), dtype=dtype)

    def rows(self) -> Tensor:
        """All columns of this rank's rows, flat (U * D,)."""
        assert self._routing is not None
        shape = self._routing.counts[self._communicator.rank], self.table.shape[1]
        joined: Tensor | None = None
        for each in self.arriving.rows:
            joined = each.part.join(self._wait(each.ticket), joined, shape)
        self.arriving.arrived()
        assert joined is not None
        return joined.view(-1)

    def _send_rows(
        self, launch: OperationId, routing: Routing, selection: Selection | None, dtype: torch.dtype
    ) -> UnderWay:
        part = GridPart.of(routing, selection, self._grid, self._communicator.rank)
        return UnderWay(part, self.send_rows(launch, self._look_up(launch, part.ids, dtype), part.counts))

    def _look_up(self, launch: OperationId, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of the part, as they are; early ones as the step to come will leave them."""
        if launch.part != "early":
            return self.table.look_up(ids, dtype)
        return self.arriving.look_up(ids).to(dtype)

    def settle_rows(self) -> None:
        """Has all rows of the table take the steps they have skipped."""
        self.table.settle()

    def send_rows(self, launch: OperationId, columns: Tensor, counts: Counts) -> Ticket:
        """Launches the AlltoAll of looked-up columns (M, d)."""
        width = self.table.shape[1]
        return self._launcher.submit(
            launch,
            lambda: self._communicator.send_rows(columns, counts, width, LANE_GROUP[launch.lane]),
            (columns.shape[0] - self._kept(counts)) * columns.shape[1] * columns.element_size(),
        )

    def send_gradients(self, launch: OperationId, flat: Tensor, counts: Counts, width: int) -> Ticket:
        """Launches the AlltoAll of gradients, flat (U * D,) by destination, `width` = D."""
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
        self.apply_delayed()
        assert self._routing is not None
        split = split or self.splitter.split(self._routing, Routing.of(ids, counts), self.delayed_chunks)
        self._split, self._delayed = split, None
        self.arriving.begin(split.following, split.late)

    def forget_cut(self) -> None:
        """Treats all gradients of a backward that starts as prior ones, unless `cut` follows."""
        self._split = None

    def submit_gradient(
        self, launch: OperationId, rows: Tensor, ids: Tensor, counts: Tensor, padding_idx: int, scale: float
    ) -> None:
        """Sends a part of the gradients (U, D) of this rank's rows of the batch: prior ones first, then delayed."""
        if launch.part == "delayed":
            routing = self._routing
            assert routing is not None
            assert self._split is not None
            self._delayed = self._delayed or self._split.delayed()
            part = self._send_gradient(launch, rows, routing, self._delayed[launch.number])
            self._gradients[-1].parts.append(part)
            return
        self.apply_delayed()
        self.materialise()  # of an earlier backward: the step will want the sum
        routing = self._routing
        if routing is None or routing.ids is not ids:  # not the batch of the last forward
            routing, self._split = Routing.of(ids, counts), None
            self.arriving.stale = True  # they were chosen for not being among that one's rows
        selection = None if self._split is None else self._split.prior
        first = self._send_gradient(launch, rows, routing, selection)
        self._gradients.append(StepGradient(padding_idx, scale, first))

    def _send_gradient(
        self, launch: OperationId, rows: Tensor, routing: Routing, selection: Selection | None
    ) -> UnderWay:
        part = GridPart.of(routing, selection, self._grid, self._communicator.rank)
        ticket = self.send_gradients(launch, part.split(rows), part.counts, rows.shape[1])
        return UnderWay(part, ticket, selection)

    # -- updates -------------------------------------------------------------------------------------------------------

    @property
    def stepped(self) -> bool:
        """Tells whether there is a gradient that a step has taken."""
        return any(gradient.step is not None for gradient in self._gradients)

    @property
    def is_under_way(self) -> bool:
        """Tells whether an update is still to be applied, or rows have left ahead."""
        return bool(self.arriving.rows) or self.stepped

    @property
    def waiting(self) -> bool:
        """Tells whether there is a gradient on its way that no step has taken, and that `.grad` still is of."""
        if not self._gradients or self._gradients[-1].step is not None:
            return False
        latest = self._gradients[-1]
        if any(waits_for(table, latest) for table in self.table.members):
            return True
        self._gradients.remove(latest)  # dropped, or someone has looked at it
        return False

    def deliver(self, absent: Collection[str] = ()) -> None:
        """Makes a backward's gradient what `.grad` of the tables is, or adds it to what it was.

        Args:
            absent: names of tables that this backward gives no gradient, of those of a stack.
        """
        latest = self._gradients[-1]
        late = latest.late(self.table, self.arrive)
        for k, table in enumerate(self.table.members):
            if table.name in absent:
                continue
            held = table.open_gradient()
            if held.is_zero:
                held.will_be(partial(late, k), latest)
            else:
                for rows in late(k):
                    held.add_rows(*rows)

    def may_step(self) -> bool:
        """Tells whether a step can take the gradient as it is, on its way, and leave the update to the next forward."""
        return (
            self.waiting
            and all(waits_for(table, self._gradients[-1]) for table in self.table.members)
            and self.table.can_wait()
        )

    def begin_step(self) -> None:
        """Applies what the last step has left: an optimizer is about to step."""
        self.apply_delayed()

    def step(self) -> UpdateRule:
        """Gives the gradient on its way the options of this moment: the optimizer has stepped."""
        step = self._gradients[-1].step = self.table.begin_step()
        self.stepped_at_once(moved_all=step.moves_all)
        return step

    def land(self) -> Rows:
        """Waits for all of the gradient that a step has taken; the step alone has it from here on."""
        gradient = self._gradients[-1]
        parts, gradient.parts = gradient.parts, []
        return merged(self.arrive(gradient, parts))

    def stepped_at_once(self, *, moved_all: bool) -> None:
        """Notes a step that has been taken; `moved_all`: of all rows, not just of those with a gradient."""
        self.arriving.stepped(moved_all=moved_all)

    def update(self, launch: OperationId) -> None:
        """Applies a part of what a step has taken; with the last part, what the step does to all other rows.

        Of a gradient that no step has taken, what comes before the next lookup is kept for the step.
        """
        for gradient in list(self._gradients):
            if gradient.step is None:
                if launch.part != "delayed":
                    self.materialise()
                return
            landed = not gradient.parts
            mine = [part for part in gradient.parts if part.ticket.id == launch]
            gradient.parts = [part for part in gradient.parts if part.ticket.id != launch]
            arrived = [self._arrive(gradient, part) for part in mine]
            if landed or (launch.part == "delayed" and not gradient.parts):
                gradient.step.finish(arrived)
                self._gradients.remove(gradient)
            else:
                for rows in arrived:
                    gradient.step.apply(*rows)

    def apply_prior(self) -> None:
        """Applies all parts of taken gradients but delayed ones, where no node of a program has applied them."""
        if not self.waiting:
            with self._launcher.hurrying():  # rows of this forward stand before them
                for part in [part for gradient in self._gradients for part in gradient.parts]:
                    if part.ticket.id.part != "delayed":
                        self.update(part.ticket.id)

    def apply_delayed(self) -> None:
        """Applies everything a step has taken."""
        stepped = [gradient for gradient in self._gradients if gradient.step is not None]
        for gradient in stepped:
            assert gradient.step is not None
            gradient.step.finish(self.arrive(gradient, gradient.parts))
        self._gradients = [gradient for gradient in self._gradients if gradient.step is None]

    def materialise(self) -> None:
        """Waits for a gradient that no step has taken: it was asked for, or is summed up."""
        if self.waiting:
            for table in self.table.members:
                if waits_for(table, self._gradients[-1]):
                    table.open_gradient().land()
        self.discard()

    def discard(self) -> None:
        """Forgets a gradient that no step has taken."""
        self._gradients = [gradient for gradient in self._gradients if gradient.step is not None]

    def forget_rows(self) -> None:
        """Forgets what was looked up early: parameters may have been written since."""
        self.arriving.forget()

    def arrive(self, gradient: StepGradient, parts: Sequence[UnderWay]) -> list[Rows]:
        """The rows of parts of a gradient, once they are here."""
        with self._launcher.hurrying():  # rows of a forward to come may stand before them
            return [self._arrive(gradient, part) for part in parts]

    def _arrive(self, gradient: StepGradient, part: UnderWay) -> Rows:
        flat = self._wait(part.ticket).to(self._dtype)
        how = (part.part.ids, flat, self._columns, gradient.padding_idx, gradient.scale)
        if part.selection is not None:
            return part.selection.coalesce(*how)
        ids, rows = coalesce(*how)
        return ids, rows
