"""The unit of row exchanges and optimizer steps: a table, or the tables of a row space.

Shape legend: V' x d this rank's part; K rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from embrace_fx.runtime.kernels import lookup
from embrace_fx.runtime.tables.history import History
from embrace_fx.runtime.tables.update_rule import DeferredUpdate, Options, SparseUpdate, predict_update
from embrace_fx.vocabulary.exactness import ELEMENT_WISE

if TYPE_CHECKING:
    from embrace_fx.runtime.tables.row_table import RowTable


class Unit(ABC):
    """A table, or the tables of a row space.

    Attributes:
        members: the tables.
        shape: of the whole unit, (V, D).
        history: the deferred steps of its rows.
    """

    members: Sequence[RowTable]
    shape: torch.Size
    history: History

    @property
    @abstractmethod
    def local(self) -> Tensor:
        """Returns this rank's part (V', d), or its rows that are in memory."""

    @property
    @abstractmethod
    def state(self) -> Mapping[str, Any]:
        """Returns the optimizer state of the rows in `local` as plain tensors. `keep` stores changed values."""

    @property
    @abstractmethod
    def lacks_state(self) -> bool:
        """Returns whether the next step creates state, which must be created for all rows together."""

    @abstractmethod
    def keep(self, state: Mapping[str, Any]) -> None:
        """Stores state values that a step has changed."""

    def keep_first(self, state: Mapping[str, Any], places: Tensor) -> None:
        """Stores the state that the first step has created for the rows at places (K,)."""
        kept, rows = self.state, len(self.local)
        made = {key: value.new_zeros((rows, *value.shape[1:])) for key, value in state.items() if key not in kept}
        for key, value in state.items():
            (made if key in made else kept)[key].index_copy_(0, places, value)
        self.keep(made)

    @abstractmethod
    def is_one(self) -> bool:
        """Returns whether one update equals the optimizer's update of each table."""

    @property
    def holder(self) -> Optimizer:
        """Returns the optimizer that updates the unit."""
        optimizer = self.members[0].optimizer
        assert optimizer is not None
        return optimizer

    @abstractmethod
    def param_group(self) -> Options:
        """Returns the current options of the param group."""

    @property
    @abstractmethod
    def rule(self) -> type[SparseUpdate]:
        """Returns the update rule of the next step, with the current options."""

    def places(self, ids: Tensor, *, to_write: bool = False) -> Tensor:
        """Returns the indices of rows in `local` and in the state, valid until the next call."""
        return ids

    def note(self, ids: Tensor, among: Tensor) -> None:
        """Records that device ids (K,) are among the ids `among`, if the host must know the looked-up rows."""
        return  # tables in memory need no record

    def look_up(self, ids: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Returns rows (K, d), after their deferred steps."""
        places = self.places(ids, to_write=(rests := self.history.rest))
        if rests:
            self.history.apply_deferred(places)
        return lookup(self.local, places, dtype)

    def peek(self, ids: Tensor) -> Tensor:
        """Returns rows (K, d) without applying their deferred steps."""
        return self.local.index_select(0, self.places(ids))

    @property
    def has_resting_rows(self) -> bool:
        """Returns whether any row may have deferred steps."""
        return self.history.rest

    def flush(self) -> None:
        """Applies all deferred steps. Do not call between `begin_step` and `finish`."""
        if self.history.rest:
            self.history.close()

    def begin_step(self) -> SparseUpdate:
        """Begins a step with the current options; requires `is_one`."""
        rule = self.rule
        if rule is not DeferredUpdate:
            self.flush()
        return rule(self)

    def preview(self, ids: Tensor, rows: Tensor) -> tuple[Tensor, Options | None]:
        """Predicts rows (K, d) after the next step, if that gives them no gradient. Returns them and the step's
        options.

        Returns the rows unchanged and None if the step does not change them or cannot be predicted.
        """
        # A trial step of any other class might have side effects.
        if type(self.members[0].optimizer) not in ELEMENT_WISE or not self.is_one() or not self.rule.moves_all:
            return rows, None
        step = predict_update(self, ids, rows)
        self.history.record_prediction(step)
        return step.rows, step.options
