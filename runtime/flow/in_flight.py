"""Rows of one table, or of a stack, in flight to a batch; and the gradient of its rows, in flight to an optimizer.

Batch 1 reads rows [2, 5], batch 2 rows [5, 9]. Row 9 is early: it is sent while the backward of batch 1 runs. Row 5 is
late: it is sent after the update by batch 1.

Most optimizers move row 9 in that step too: AdamW decays it. So it is sent as the step will leave it, which is computed
on a copy, with the options of that moment. If another step is taken, or someone writes the table, what was sent is
stale: then it is dropped, and all rows of batch 2 are sent after the update.

A gradient is in flight from its submission to its update:

    sent        its parts leave: prior rows first (row 5, which batch 2 reads), then delayed ones (row 2), in chunks
    delivered   `.grad` of each table is on its way; whoever looks at it waits, and has an ordinary gradient
    taken       an optimizer has stepped: the update waits for the next forward, under the options of that moment
    applied     part by part, as the forward and the backward after it come to need the rows

Shape legend: as in `embrace_fx/vocabulary/ops.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from weakref import ref

import torch
from torch import Tensor
from torch.optim import Optimizer

from embrace_fx.runtime.flow.routing import Routing
from embrace_fx.runtime.launch.launcher import Launcher
from embrace_fx.runtime.launch.ticket import Ticket
from embrace_fx.runtime.tables.held_gradient import GONE, Late, Rows, merged
from embrace_fx.runtime.tables.own_step import hyperparameters, same_options
from embrace_fx.runtime.tables.row_table import RowTable
from embrace_fx.runtime.tables.stacks import StackedTable
from embrace_fx.runtime.tables.update_rule import Options, RowsAlone, UpdateRule
from embrace_fx.vocabulary.operation_id import OperationId

Sent = tuple[Ticket, Routing]
"""Some of a batch's rows in flight, or of their gradients; and which."""

How = tuple[torch.dtype, int, int, float]
"""How gradients are summed up: the table's dtype, this rank's columns, the row without gradient or -1, a factor."""


class RowsInFlight:
    """The rows that have been sent for a batch, until its forward has them.

    Attributes:
        sent: by launch.
        routing: of the batch, once it is known.
        late: of its rows, those that are still to be looked up; all, where none is early.
        stale: the table was written since early rows were sent, or another step was taken than they were sent for.
    """

    def __init__(self, table: RowTable | StackedTable) -> None:
        self._table = table
        self.sent: list[Sent] = []
        self.routing: Routing | None = None
        self.late: Routing | None = None
        self._ids: Tensor | None = None  # of early rows
        self._before: Tensor | None = None  # as the table had them
        self._after: Tensor | None = None  # as they were sent
        self._expected: tuple[Optimizer | None, Options] | None = None  # the step that they were sent for
        self.stale = False

    def begin(self, late: Routing) -> None:
        """Begins a batch, of which these rows are still to be looked up."""
        self.sent, self.routing, self.late = [], late.whole or late, late

    @property
    def usable(self) -> bool:
        """Whether the rows equal those of the table, as far as that can be told without comparing values."""
        return not self.stale and self._expected is None

    def preview(self, ids: Tensor) -> Tensor:
        """Returns early rows, as the next step will leave them."""
        self._ids = ids
        self._before = self._table.look_up(ids, self._table.local.dtype)
        self._after, options = self._table.preview(ids, self._before)
        self._expected = None if options is None else (self._table.members[0].optimizer, options)
        return self._after

    def still_equal(self, *, stepped: bool) -> bool:
        """Compares early rows with the table's: anyone may have written these.

        Args:
            stepped: a step has been taken that is still to be applied.
        """
        if self._ids is None or self._before is None or self._after is None:
            return True
        waits = stepped or self._table.has_resting_rows  # the step they were sent for is still to move the table's
        return torch.equal(self._table.as_they_are(self._ids), self._before if waits else self._after)

    def note_step(self, *, moved_all: bool, of_all: bool = True) -> None:
        """Compares a step that has been taken with the one that early rows were sent for.

        Args:
            moved_all: it has moved rows without a gradient too.
            of_all: it is of all tables of a stack; early rows were sent as if it were.
        """
        expected, self._expected = self._expected, None
        if not self.sent:
            return
        if expected is None:
            self.stale |= moved_all
            return
        optimizer, options = expected
        self.stale |= not of_all or not all(
            table.optimizer is optimizer and same_options(options, hyperparameters(table.param_group()))
            for table in self._table.members
        )

    def end(self) -> None:
        """Forgets the batch: its forward has all of its rows."""
        self.sent, self.routing, self.late = [], None, None
        self._ids = self._before = self._after = None

    def drop(self) -> None:
        """Forgets rows that nobody will read."""
        self.end()
        self.stale, self._expected = False, None


class RowGradient:
    """One backward's row gradient.

    Args:
        table: whose it is.

    Attributes:
        parts: those that no step has applied, by their launches, in the order in which they left.
        step: the step that has taken it; None before one.
    """

    def __init__(self, table: RowTable | StackedTable, launcher: Launcher, how: How) -> None:
        self._table, self._launcher, self._how = table, launcher, how
        self.parts: dict[OperationId, Sent] = {}
        self.step: UpdateRule | None = None
        self._late: Late[Sequence[Rows]] | None = None

    def deliver(self, absent: Collection[str] = ()) -> None:
        """Makes it what `.grad` of the tables is, or adds it to what that was.

        Args:
            absent: names of tables that this backward gives no gradient, of those of a stack.
        """
        late = self._late = Late(self._landing())
        for k, table in enumerate(self._table.members):
            if table.name in absent:
                continue
            held = table.open_gradient()
            if held.is_zero:
                held.will_be(late, k)
            else:
                for rows in late.now()[k]:
                    held.add_rows(*rows)

    def _landing(self) -> Callable[[], list[Sequence[Rows]]]:
        """Makes what waits for the rows of each table; it refers to the model weakly."""
        found, by = ref(self._table), ref(self._launcher)
        parts, how = tuple(self.parts.values()), self._how  # a step takes parts out

        def land() -> list[Sequence[Rows]]:
            table, launcher = found(), by()
            if table is None or launcher is None:
                raise RuntimeError(GONE)
            split = [table.split(*rows) for rows in _in_a_hurry(parts, table, launcher, how)]
            return [list(rows) for rows in zip(*split, strict=True)]

        return land

    def _stands_at(self, table: RowTable) -> bool:
        """Tells whether a table's `.grad` is this one, nobody having looked at it."""
        held = table.held
        return held is not None and self._late is not None and held.waits_for(self._late)

    @property
    def is_unseen(self) -> bool:
        """Tells whether it is what `.grad` of any of the tables is, nobody having looked at it."""
        return any(map(self._stands_at, self._table.members))

    def land(self) -> None:
        """Makes `.grad` of the tables ordinary gradients."""
        for table in self._table.members:
            if self._stands_at(table):
                table.open_gradient().land()

    def may_wait(self) -> bool:
        """Tells whether a step can take it as it is, on its way, and leave the update to the next forward."""
        return all(map(self._stands_at, self._table.members)) and self._table.can_wait()

    def begin_step(self) -> UpdateRule:
        """Keeps the options of this moment for its update: the optimizer has stepped."""
        self.step = self._table.begin_step()
        return self.step

    def with_rows(self) -> list[tuple[RowsAlone, Rows]]:
        """Waits for all of it, and leaves it to the steps that have taken it, which are returned with it."""
        assert self.step is not None
        rows, self.parts = self._rest(), {}
        return self.step.alone(merged(rows))

    def apply(self, launch: OperationId) -> bool:
        """Applies a part; with the last delayed one, what the step does to all other rows. Tells whether that is so."""
        assert self.step is not None
        landed = not self.parts
        arrived = (
            _arrived([self.parts.pop(launch)], self._table, self._launcher, self._how) if launch in self.parts else []
        )
        if landed or (launch.part == "delayed" and not self.parts):
            self.step.finish(arrived)
            return True
        for rows in arrived:
            self.step.apply(*rows)
        return False

    def finish(self) -> None:
        """Applies everything that is still to be applied."""
        assert self.step is not None
        self.step.finish(self._rest())
        self.parts = {}

    def _rest(self) -> list[Rows]:
        return _in_a_hurry(self.parts.values(), self._table, self._launcher, self._how)


def _arrived(parts: Iterable[Sent], table: RowTable | StackedTable, launcher: Launcher, how: How) -> list[Rows]:
    """Returns the rows of parts, once they are here."""
    found = []
    for ticket, routing in parts:
        ids, rows = routing.summed(launcher.wait(ticket), *how)
        table.note(ids, routing.held_ids)
        found.append((ids, rows))
    return found


def _in_a_hurry(parts: Iterable[Sent], table: RowTable | StackedTable, launcher: Launcher, how: How) -> list[Rows]:
    with launcher.hurrying():  # rows of a forward to come may stand before them
        return _arrived(parts, table, launcher, how)
