"""The history of a table: the steps without a gradient that each row has yet to apply.

Contract
    A row applies its deferred steps when it is next read. All rows apply them before a checkpoint, before parameters or
    state are handed out, and before a step that cannot be deferred.
    One step calls `begin`; then, for rows with gradients, `apply_deferred`, the update and `took`; then `note`.
    The tables of a row space share the history of the space. A step of a single table uses its own history. One kind
    of history is closed before the other is opened.

Shape legend: V' x d this rank's part of the table; K rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from embrace_fx.runtime.tables.own_step import put_rows, same_options
from embrace_fx.runtime.tables.skipped_steps import MOST_STEPS, SkippedSteps, skipping

if TYPE_CHECKING:
    from embrace_fx.runtime.tables.unit import Unit

ROWS_AT_ONCE = 1 << 16
"""Rows per block when all rows apply their deferred steps."""


@dataclass(frozen=True)
class PredictedUpdate:
    """The next step of some rows, computed ahead in case the step gives them no gradient.

    Attributes:
        options: the step's param group options.
        ids: row ids (K,), with possible duplicates.
        rows, state: the rows (K, d) and their state after the step.
    """

    options: Mapping[str, Any]
    ids: Tensor
    rows: Tensor
    state: Mapping[str, Any]


class History:
    """The deferred steps of a table, or of the tables of a row space.

    Args:
        unit: the table or row space.
        members: first row of each table of a row space -> the table's history.

    Attributes:
        open: the steps that some rows have not applied, or None if there are none.
    """

    def __init__(self, unit: Unit, members: Mapping[int, History] | None = None) -> None:
        self.open: SkippedSteps | None = None
        self._unit = unit
        self._members = tuple(members.values()) if members else ()
        self._space: History | None = None
        self._with = self, *self._members  # histories that are closed together
        self._first = 0  # the table's first row in the row space
        self._before = 0  # the number of steps before the open ones
        self._predicted: PredictedUpdate | None = None
        self._taken: Tensor | None = None
        for first, each in (members or {}).items():
            each.close()
            each._space, each._with, each._first = self, (self, each), first

    @property
    def rest(self) -> bool:
        """Returns whether any row may have deferred steps."""
        return any(map(_OPEN, self._with))

    def begin(self, optimizer: Optimizer, options: Mapping[str, Any]) -> None:
        """Begins a step that can be deferred, before any of its rows are updated."""
        local, known = self._unit.local, self.open
        found = skipping(type(optimizer), options, local.dtype)
        assert found is not None
        form, _ = found
        if known is None or not (isinstance(known, form) and known.fits(options)):
            self.close()
            self.open = form(local.device)
        if self._taken is None:
            self._taken = torch.zeros(len(local), dtype=torch.int32, device=local.device)

    def took(self, places: Tensor) -> None:
        """Records that the rows at places (K,) have applied the current step."""
        assert self.open is not None
        assert self._taken is not None
        self._taken.index_fill_(0, places, self._before + self.open.count + 1)

    def record_prediction(self, step: PredictedUpdate) -> None:
        """Stores a predicted update for `note`."""
        self._predicted = step if self.open is not None and not step.rows.is_cuda else None

    def note(self, options: Mapping[str, Any]) -> None:
        """Records the current step as deferred for all other rows. The state is still as before the step."""
        skipped, predicted, unit, taken = self.open, self._predicted, self._unit, self._taken
        assert skipped is not None
        assert taken is not None
        skipped.note(options, {} if skipped.count else unit.state)
        self._predicted = None
        if predicted is None or not same_options(predicted.options, options):
            return
        places, steps = unit.places(predicted.ids, to_write=True), self._before + skipped.count
        if bool((taken.index_select(0, places) == steps - 1).all()):  # no predicted row had a gradient
            unit.local.index_copy_(0, places, predicted.rows)
            put_rows(unit.state, predicted.state, places, len(taken))
            taken.index_fill_(0, places, steps)

    def shorten(self) -> None:
        """Closes the history once it has `MOST_STEPS` steps."""
        if self.open is not None and self.open.count == MOST_STEPS:
            self.close()

    def apply_deferred(self, places: Tensor) -> None:
        """Applies the deferred steps of the rows at places (K,), before they are read."""
        if self.open is not None:
            self.take(places, self._unit.local, self._unit.state)
        elif self._space is not None and self._space.open is not None:
            self._space.apply_deferred(places + self._first if self._first else places)
        elif self._members and self.rest:
            for each, own in self._split(places):
                each.apply_deferred(own)

    def _split(self, places: Tensor) -> Iterator[tuple[History, Tensor]]:
        """Yields each table's history with its share of places (K,) in the row space."""
        firsts = torch.tensor([each._first for each in self._members[1:]], device=places.device)
        of = torch.bucketize(places, firsts, right=True)
        for k, each in enumerate(self._members):
            yield each, places[of == k] - each._first

    def take(self, places: Tensor, local: Tensor, state: Mapping[str, Any]) -> None:
        """Applies the open steps to rows at places (K,) of the unit's `local` and `state`."""
        assert self.open is not None
        assert self._taken is not None
        if self.open.count:
            self.open.take(local, state, places, self._taken)

    def close(self) -> None:
        """Applies all deferred steps to all rows. Do not call between `begin` and `note`."""
        for each in self._with:
            if each.open is not None:
                each._close()
            each.open = each._predicted = None

    def _close(self) -> None:
        """Applies the open skipped steps to all rows that have not taken them."""
        assert self.open is not None
        assert self._taken is not None
        if self.open.count:
            local, state = self._unit.local, self._unit.state
            for places in torch.arange(len(local), device=local.device).split(ROWS_AT_ONCE):
                self.take(places, local, state)
        self._taken.zero_()


_OPEN = attrgetter("open")
