"""The rows of a table's part that rest: which steps each of them has taken, while the optimizer goes on.

Contract
    Instead of moving all rows at every step, a row takes the steps it has skipped when it is next read, or when all do:
    before a checkpoint, before parameters or state are handed out, and where a step comes that cannot be skipped.
    One step: `begin`, rows with gradients `catch_up`, are stepped, and `took` it; then `note`.

Shape legend: V' x d this rank's part of the table; K rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from embrace_fx.runtime.tables.own_step import put_rows, same_options
from embrace_fx.runtime.tables.skipped_steps import MOST_STEPS, SkippedSteps, skipping

ROWS_AT_ONCE = 1 << 16
"""Of all, as they take what they have skipped."""


class PartAndState(Protocol):
    """A table's part and its optimizer's state, each put together when it is asked for."""

    @property
    def local(self) -> Tensor:
        """This rank's part, (V', d)."""

    @property
    def state(self) -> Mapping[str, Any]:
        """What the optimizer keeps of it."""


@dataclass(frozen=True)
class SupposedStep:
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


class RestingRows:
    """The resting rows of one table, or of a row space: which have skipped steps, and how many."""

    def __init__(self) -> None:
        self.skipped: SkippedSteps | None = None
        self._taken: Tensor | None = None  # (V',) how many steps of the history each row has taken
        self._supposed: SupposedStep | None = None

    @property
    def rest(self) -> bool:
        """Whether any row may have skipped a step."""
        return self.skipped is not None and self.skipped.count > 0

    def begin(self, optimizer: Any, options: Mapping[str, Any], table: PartAndState) -> None:
        """Begins a step that `form_of` can skip, before its first part."""
        local = table.local
        found = skipping(type(optimizer), options, local.dtype)
        assert found is not None
        form, _ = found
        if self.skipped is not None and not (isinstance(self.skipped, form) and self.skipped.fits(options)):
            self.settle(local, table.state)
        if self.skipped is None:
            self.skipped = form(local.device)
            if self._taken is None:
                self._taken = torch.zeros(local.shape[0], dtype=torch.int32, device=local.device)

    def took(self, ids: Tensor) -> None:
        """Rows `ids` (K,), caught up before, have taken the step that is under way."""
        assert self.skipped is not None
        assert self._taken is not None
        self._taken.index_fill_(0, ids, self.skipped.count + 1)

    def suppose(self, step: SupposedStep) -> None:
        """Keeps what the next step makes of rows without gradient, for `note`. Whoever writes them has all settled."""
        self._supposed = step if self.rest and not step.rows.is_cuda else None

    def note(self, options: Mapping[str, Any], table: PartAndState) -> None:
        """All other rows have had no gradient in this step, before which a table's state is as it is."""
        skipped, taken, supposed = self.skipped, self._taken, self._supposed
        assert skipped is not None
        skipped.note(options, {} if skipped.count else table.state)
        self._supposed = None
        if supposed is None or taken is None or not same_options(supposed.options, options):
            return
        if bool((taken.index_select(0, supposed.ids) == skipped.count - 1).all()):  # none has had a gradient
            table.local.index_copy_(0, supposed.ids, supposed.rows)
            put_rows(table.state, supposed.state, supposed.ids, len(taken))
            taken.index_fill_(0, supposed.ids, skipped.count)

    def shorten(self, table: PartAndState) -> None:
        """Begins a new history where this one is long."""
        if self.skipped is not None and self.skipped.count == MOST_STEPS:
            self.settle(table.local, table.state)

    def catch_up(self, local: Tensor, state: Mapping[str, Any], ids: Tensor, first: int = 0) -> bool:
        """Lets rows take the steps they have skipped, and returns whether any row may have been written.

        Args:
            local, state: of all rows, or of one of several tables, whose first row is `first`; `ids` are rows of these.
        """
        if not self.rest:
            return False
        assert self.skipped is not None
        assert self._taken is not None
        self.skipped.take(local, state, ids, self._taken[first : first + len(local)])
        return True

    def settle(self, local: Tensor, state: Mapping[str, Any]) -> None:
        """Has all rows take what they have skipped, and begins a new history."""
        if self.rest:
            for ids in torch.arange(local.shape[0], device=local.device).split(ROWS_AT_ONCE):
                self.catch_up(local, state, ids)
        if self._taken is not None:
            self._taken.zero_()
        self.skipped = self._supposed = None
