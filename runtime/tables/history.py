"""The history of a table's rows: which steps without a gradient each of them has still to take.

Contract
    Instead of moving all rows at every step, a row takes the steps it has skipped when it is next read, or when all do:
    before a checkpoint, before parameters or state are handed out, and where a step comes that cannot be skipped.
    One step: `begin`; rows with gradients `apply_deferred`, are stepped, and `took` it; then `note`.
    The tables of a row space step as one by the history of the space, or one of them by its own. The one kind is
    closed before the other begins.

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
"""Of all, as they take what they have skipped."""


@dataclass(frozen=True)
class PredictedUpdate:
    """The next step of some rows that are up to date, should it give them no gradient.

    Attributes:
        options: of the step.
        ids: (K,) which rows; some may be the same.
        rows, state: (K, d), as the step leaves them.
    """

    options: Mapping[str, Any]
    ids: Tensor
    rows: Tensor
    state: Mapping[str, Any]


class History:
    """The steps that rows of one table, or of a row space, have skipped.

    Args:
        unit: whose rows they are.
        members: of a space, the histories of its tables, and the first row of each.

    Attributes:
        open: the steps that some rows have still to take; None: there are none.
    """

    def __init__(self, unit: Unit, members: Mapping[int, History] | None = None) -> None:
        self.open: SkippedSteps | None = None
        self._unit = unit
        self._members = tuple(members.values()) if members else ()
        self._space: History | None = None
        self._with = self, *self._members  # those that are closed together
        self._first = 0  # of its rows in the space
        self._before = 0  # steps until the open ones
        self._predicted: PredictedUpdate | None = None
        self._taken: Tensor | None = None
        for first, each in (members or {}).items():
            each.close()
            each._space, each._with, each._first = self, (self, each), first

    @property
    def rest(self) -> bool:
        """Whether any row may have skipped a step."""
        return any(map(_OPEN, self._with))

    def begin(self, optimizer: Optimizer, options: Mapping[str, Any]) -> None:
        """Begins a step that `form_of` can skip, before its first part."""
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
        """Rows at places (K,), caught up before, have taken the step that is under way."""
        assert self.open is not None
        assert self._taken is not None
        self._taken.index_fill_(0, places, self._before + self.open.count + 1)

    def record_prediction(self, step: PredictedUpdate) -> None:
        """Keeps what the next step makes of rows without gradient, for `note`."""
        self._predicted = step if self.open is not None and not step.rows.is_cuda else None

    def note(self, options: Mapping[str, Any]) -> None:
        """All other rows have had no gradient in this step, before which the table's state is as it is."""
        skipped, predicted, unit, taken = self.open, self._predicted, self._unit, self._taken
        assert skipped is not None
        assert taken is not None
        skipped.note(options, {} if skipped.count else unit.state)
        self._predicted = None
        if predicted is None or not same_options(predicted.options, options):
            return
        places, steps = unit.places(predicted.ids, to_write=True), self._before + skipped.count
        if bool((taken.index_select(0, places) == steps - 1).all()):  # none has had a gradient
            unit.local.index_copy_(0, places, predicted.rows)
            put_rows(unit.state, predicted.state, places, len(taken))
            taken.index_fill_(0, places, steps)

    def shorten(self) -> None:
        """Begins a new history where this one is long."""
        if self.open is not None and self.open.count == MOST_STEPS:
            self.close()

    def apply_deferred(self, places: Tensor) -> None:
        """Lets rows at places (K,) take the steps they have skipped, before they are read."""
        if self.open is not None:
            self.take(places, self._unit.local, self._unit.state)
        elif self._space is not None and self._space.open is not None:
            self._space.apply_deferred(places + self._first if self._first else places)
        elif self._members and self.rest:
            for each, own in self._split(places):
                each.apply_deferred(own)

    def _split(self, places: Tensor) -> Iterator[tuple[History, Tensor]]:
        """Yields the histories of tables, with their own of places (K,) in the space."""
        firsts = torch.tensor([each._first for each in self._members[1:]], device=places.device)
        of = torch.bucketize(places, firsts, right=True)
        for k, each in enumerate(self._members):
            yield each, places[of == k] - each._first

    def take(self, places: Tensor, local: Tensor, state: Mapping[str, Any]) -> None:
        """Lets rows at places (K,) take the open steps that they have skipped; `local` and `state` are the unit's."""
        assert self.open is not None
        assert self._taken is not None
        if self.open.count:
            self.open.take(local, state, places, self._taken)

    def close(self) -> None:
        """Has all rows take what they have skipped; not between `begin` and `note`."""
        for each in self._with:
            if each.open is not None:
                each._close()
            each.open = each._predicted = None

    def _close(self) -> None:
        assert self.open is not None
        assert self._taken is not None
        if self.open.count:
            local, state = self._unit.local, self._unit.state
            for places in torch.arange(len(local), device=local.device).split(ROWS_AT_ONCE):
                self.take(places, local, state)
        self._taken.zero_()


_OPEN = attrgetter("open")
