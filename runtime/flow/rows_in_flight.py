"""Rows of one table, or of a stack, that have been sent for a batch.

Batch 1 reads rows [2, 5], batch 2 rows [5, 9]. Row 9 is early: it is sent while the backward of batch 1 runs. Row 5 is
late: it is sent after the update by batch 1.

Most optimizers move row 9 in that step too: AdamW decays it. So it is sent as the step will leave it, which is computed
on a copy, with the options of that moment. If another step is taken, or someone writes the table, what was sent is
stale: then it is dropped, and all rows of batch 2 are sent after the update.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from embrace_fx.runtime.flow.routing import Routing
from embrace_fx.runtime.flow.row_gradient import Sent
from embrace_fx.runtime.tables.own_step import hyperparameters, same_options
from embrace_fx.runtime.tables.row_table import RowTable
from embrace_fx.runtime.tables.stacks import StackedTable
from embrace_fx.runtime.tables.update_rule import Options


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
