"""Launches in flight of one table: the rows of a batch, and the gradients of steps, part by part.

Shape legend: as in `embrace_fx/vocabulary/ops.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from weakref import WeakMethod, ref

from torch import Tensor

from embrace_fx.runtime.flow.bucket_updates import GONE
from embrace_fx.runtime.flow.grid_parts import GridPart
from embrace_fx.runtime.flow.routing import Routing, Selection
from embrace_fx.runtime.launch.recorder import Recorder
from embrace_fx.runtime.launch.ticket import Ticket
from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.runtime.tables.held_gradient import Rows as RowsOfTable
from embrace_fx.runtime.tables.row_table import RowTable
from embrace_fx.runtime.tables.stacks import StackedTable
from embrace_fx.runtime.tables.update_rule import UpdateRule

Wait = Callable[[Ticket], Tensor]
"""Waits for a ticket (and takes the time of it)."""

Arrive = Callable[["StepGradient", Sequence["GradientPart"]], list[RowsOfTable]]
"""The rows of parts of a gradient, once they are here."""


def waiting(communicator: Communicator, recorder: Recorder) -> Wait:
    """Makes the function that waits for a ticket's value, and records a wait that takes time."""

    def wait(ticket: Ticket) -> Tensor:
        if ticket.done:
            return ticket.wait()
        with communicator.watching(str(ticket.id)), recorder.waiting(ticket.id):
            return ticket.wait()

    return wait


@dataclass
class GradientPart:
    """Gradients of some rows, from all ranks, on their way to this rank's columns."""

    ids: Tensor
    ticket: Ticket
    selection: Selection | None  # None: all of the routing's


@dataclass
class StepGradient:
    """One step's row gradient.

    Attributes:
        parts: prior first, then delayed ones.
        step: the step that has taken it; None before one.
    """

    padding_idx: int
    scale: float
    parts: list[GradientPart]
    step: UpdateRule | None = None


class LateRows:
    """One step's row gradient, for `.grad` of its tables: waited for when someone looks at it."""

    def __init__(self, table: RowTable | StackedTable, arrive: Arrive, gradient: StepGradient) -> None:
        # What `.grad` keeps, nothing would ever free, for C++ owns it: the method and the table are the exchange's.
        self._table, self._arrive = ref(table), WeakMethod(arrive)
        self._parts = list(gradient.parts)  # a step takes them out of the gradient
        self.gradient = gradient
        self._of_tables: list[list[RowsOfTable]] | None = None

    def rows(self, k: int) -> list[RowsOfTable]:
        """The rows of the k-th table."""
        if self._of_tables is None:
            table, arrive = self._table(), self._arrive()
            if table is None or arrive is None:
                raise RuntimeError(GONE)
            split = [table.split(*rows) for rows in arrive(self.gradient, self._parts)]
            self._of_tables = [list(rows) for rows in zip(*split, strict=True)]
        return self._of_tables[k]


@dataclass
class Rows:
    """A part of a batch's rows on their way to this rank: which of its rows, and their columns from all ranks."""

    part: GridPart
    ticket: Ticket


@dataclass
class Arriving:
    """The rows of a batch on their way."""

    rows: list[Rows] = field(default_factory=list)
    routing: Routing | None = None
    late: Selection | None = None  # of the batch to come: what is still to be looked up; None: all of it


def waits_for(table: RowTable, gradient: StepGradient) -> bool:
    """Tells whether what a table's `.grad` is, nobody having looked at it, is a gradient on its way."""
    held = table.held
    return held is not None and held.is_late and held.source is gradient
