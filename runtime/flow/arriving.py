"""The rows of one table on their way to a batch, and whether those that left before the last step may be read."""

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


class Arriving:
    """The rows of a batch on their way. Early ones, which the batch before does not read, are kept as they left.

    A row without gradient moves all the same under most optimizers. Where it does, it leaves as the step to come, with
    the options of this moment, will make it: that step is supposed, and the rows are stale until it has come.

    Attributes:
        rows: what has been sent.
        routing: of the batch, once it is known.
        late: those of its rows that are still to be looked up, or all of them.
        stale: the table was written, or another step came than was supposed.
    """

    def __init__(self, table: RowTable | StackedTable) -> None:
        self._table = table
        self.rows: list[Sent] = []
        self.routing: Routing | None = None
        self.late: Routing | None = None
        self._ids: Tensor | None = None
        self._before: Tensor | None = None  # as the table had them
        self._left: Tensor | None = None  # as they left
        self._supposed: tuple[Optimizer | None, Options] | None = None  # whose step they have left with
        self.stale = False

    def begin(self, late: Routing) -> None:
        """Begins a batch, of which these rows are still to be looked up."""
        self.rows, self.routing, self.late = [], late.whole or late, late

    @property
    def usable(self) -> bool:
        """Whether the rows equal those of the table, as far as that can be told without comparing values."""
        return not self.stale and self._supposed is None

    def look_up(self, ids: Tensor) -> Tensor:
        """Returns the rows as the step to come will leave them."""
        self._ids = ids
        self._before = self._table.look_up(ids, self._table.local.dtype)
        self._left, options = self._table.preview(ids, self._before)
        self._supposed = None if options is None else (self._table.members[0].optimizer, options)
        return self._left

    def hold(self, *, stepped: bool) -> bool:
        """Tells whether rows that were sent still equal the table's, by comparing values: anyone may have written them.

        Args:
            stepped: a step has been taken that is still to be applied.
        """
        if self._ids is None or self._before is None or self._left is None:
            return True
        rested = stepped or self._table.has_resting_rows  # the step they have left with is still to move them
        expected = self._before if rested else self._left
        return torch.equal(self._table.as_they_are(self._ids), expected)

    def stepped(self, *, moved_all: bool, of_all: bool = True) -> None:
        """Notes a step that has been taken.

        Args:
            moved_all: it has moved all rows, not just those with gradients of their own.
            of_all: it is of all tables of a stack; the others' rows have left as moved, too.
        """
        supposed, self._supposed = self._supposed, None
        if self.rows:
            if supposed is None:
                self.stale |= moved_all
            else:  # the rows have left as moved
                optimizer, options = supposed
                self.stale |= not of_all or not all(
                    table.optimizer is optimizer and same_options(options, hyperparameters(table.param_group()))
                    for table in self._table.members
                )

    def arrived(self) -> None:
        """Notes that all of them have been put together."""
        self.rows, self.routing, self.late = [], None, None
        self._ids = self._before = self._left = None

    def forget(self) -> None:
        """Forgets what has left: nobody reads it."""
        self.arrived()
        self.stale, self._supposed = False, None
