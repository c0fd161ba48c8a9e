"""One backward's row gradient of a table, or of a stack, from its submission to its update.

    sent        its parts leave: prior rows first, then delayed ones, in chunks
    delivered   `.grad` of each table is on its way; whoever looks at it waits, and has an ordinary gradient
    taken       an optimizer has stepped: the update waits for the next forward, under the options of that moment
    applied     part by part, as the forward and the backward after it come to need the rows

Shape legend: as in `embrace_fx/vocabulary/ops.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from weakref import ref

import torch

from embrace_fx.runtime.flow.routing import Routing
from embrace_fx.runtime.launch.launcher import Launcher
from embrace_fx.runtime.launch.ticket import Ticket
from embrace_fx.runtime.tables.held_gradient import GONE, Late, Rows, merged
from embrace_fx.runtime.tables.row_table import RowTable
from embrace_fx.runtime.tables.stacks import StackedTable
from embrace_fx.runtime.tables.update_rule import RowsAlone, UpdateRule
from embrace_fx.vocabulary.operation_id import OperationId

Sent = tuple[Ticket, Routing]
"""Some of a batch's rows on their way, or of their gradients; and which."""

How = tuple[torch.dtype, int, int, float]
"""How gradients are summed up: the table's dtype, this rank's columns, the row without gradient or -1, a factor."""


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
