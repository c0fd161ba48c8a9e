"""Launches in flight of one table: the rows of a batch, and the gradients of steps, part by part.

Shape legend: as in `embrace_fx/vocabulary/ops.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakMethod, ref

from torch import Tensor

from embrace_fx.runtime.flow.bucket_updates import GONE
from embrace_fx.runtime.flow.grid_parts import GridPart
from embrace_fx.runtime.flow.routing import Selection
from embrace_fx.runtime.launch.recorder import Recorder
from embrace_fx.runtime.launch.ticket import Ticket
from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.runtime.tables.held_gradient import Rows
from embrace_fx.runtime.tables.row_table import RowTable
from embrace_fx.runtime.tables.stacks import StackedTable
from embrace_fx.runtime.tables.update_rule import UpdateRule

Wait = Callable[[Ticket], Tensor]
"""Waits for a ticket (and takes the time of it)."""


def waiting(communicator: Communicator, recorder: Recorder) -> Wait:
    """Makes the function that waits for a ticket's value, and records a wait that takes time."""

    def wait(ticket: Ticket) -> Tensor:
        if ticket.done:
            return ticket.wait()
        with communicator.watching(ticket.id), recorder.waiting(ticket.id):
            return ticket.wait()

    return wait


@dataclass(frozen=True)
class UnderWay:
    """Some of a batch's rows, or of their gradients, on their way.

    Attributes:
        part: which rows: to this rank, their columns from all ranks; or from all ranks, to this one's columns.
        selection: how gradients of some of a routing's rows are summed; None: of all of them.
    """

    part: GridPart
    ticket: Ticket
    selection: Selection | None = None


Arrive = Callable[["StepGradient", Sequence[UnderWay]], list[Rows]]
"""The rows of parts of a gradient, once they are here."""


class StepGradient:
    """One step's row gradient.

    Attributes:
        parts: prior first, then delayed ones.
        step: the step that has taken it; None before one.
    """

    def __init__(self, padding_idx: int, scale: float, first: UnderWay) -> None:
        self.padding_idx, self.scale = padding_idx, scale
        self.parts = [first]
        self.step: UpdateRule | None = None
        self._of_tables: list[list[Rows]] | None = None

    def late(self, table: RowTable | StackedTable, arrive: Arrive) -> Callable[[int], list[Rows]]:
        """Makes what waits for the rows of the k-th table when someone looks at its `.grad`."""
        # What `.grad` keeps, nothing would ever free, for C++ owns it: the method and the table are the exchange's.
        found, method = ref(table), WeakMethod(arrive)
        parts = list(self.parts)  # a step takes them out

        def rows(k: int) -> list[Rows]:
            if self._of_tables is None:
                table, arrive = found(), method()
                if table is None or arrive is None:
                    raise RuntimeError(GONE)
                split = [table.split(*rows) for rows in arrive(self, parts)]
                self._of_tables = [list(rows) for rows in zip(*split, strict=True)]
            return self._of_tables[k]

        return rows


def waits_for(table: RowTable, gradient: StepGradient) -> bool:
    """Tells whether what a table's `.grad` is, nobody having looked at it, is a gradient on its way."""
    held = table.held
    return held is not None and held.is_late and held.source is gradient
