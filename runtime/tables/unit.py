"""What is exchanged and stepped as one: a table, or the tables of a row space.

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
        members: the tables that step as one.
        shape: of the whole, (V, D).
        history: which steps its rows have still to take.
    """

    members: Sequence[RowTable]
    shape: torch.Size
    history: History

    @property
    @abstractmethod
    def local(self) -> Tensor:
        """This rank's part, (V', d), or those of its rows that are in memory."""

    @property
    @abstractmethod
    def state(self) -> Mapping[str, Any]:
        """The optimizer's state of the rows in `local`, as plain tensors; `keep` keeps others."""

    @property
    @abstractmethod
    def lacks_state(self) -> bool:
        """Whether its next step makes state, which has to be made for all rows at once."""

    @abstractmethod
    def keep(self, state: Mapping[str, Any]) -> None:
        """Keeps what a step has made of state."""

    def keep_first(self, state: Mapping[str, Any], places: Tensor) -> None:
        """Keeps the state that the first step has made of rows at places (K,)."""
        kept, rows = self.state, len(self.local)
        made = {key: value.new_zeros((rows, *value.shape[1:])) for key, value in state.items() if key not in kept}
        for key, value in state.items():
            (made if key in made else kept)[key].index_copy_(0, places, value)
        self.keep(made)

    @abstractmethod
    def is_one(self) -> bool:
        """Whether one update is what the optimizer does to each table."""

    @property
    def holder(self) -> Optimizer:
        """The optimizer that steps it."""
        optimizer = self.members[0].optimizer
        assert optimizer is not None
        return optimizer

    @abstractmethod
    def param_group(self) -> Options:
        """The options of this moment."""

    @property
    @abstractmethod
    def rule(self) -> type[SparseUpdate]:
        """The rule of its next step, under the options of this moment."""

    def places(self, ids: Tensor, *, to_write: bool = False) -> Tensor:
        """Where rows are in `local` and in the state of rows, until the next call: there themselves."""
        return ids

    def note(self, ids: Tensor, among: Tensor) -> None:
        """Notes that ids (K,) of a device are among others, for a host that has to know which rows are looked up."""
        return  # none has to

    def look_up(self, ids: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Rows (K, d), once they have taken skipped steps."""
        places = self.places(ids, to_write=(rests := self.history.rest))
        if rests:
            self.history.apply_deferred(places)
        return lookup(self.local, places, dtype)

    def peek(self, ids: Tensor) -> Tensor:
        """Rows (K, d), with what they have skipped still to come."""
        return self.local.index_select(0, self.places(ids))

    @property
    def has_resting_rows(self) -> bool:
        """Whether any row may have skipped a step."""
        return self.history.rest

    def flush(self) -> None:
        """Has all rows take the steps they have skipped; not between `begin_step` and `finish`."""
        if self.history.rest:
            self.history.close()

    def begin_step(self) -> SparseUpdate:
        """Begins a step under the options of this moment, of tables that are one (`is_one`)."""
        rule = self.rule
        if rule is not DeferredUpdate:
            self.flush()
        return rule(self)

    def preview(self, ids: Tensor, rows: Tensor) -> tuple[Tensor, Options | None]:
        """Rows (K, d) that are up to date, as the next step will leave them if it gives them no gradient; and that
        step's options, where it moves them and can be told."""
        # Of another class's step a trial could leave something behind.
        if type(self.members[0].optimizer) not in ELEMENT_WISE or not self.is_one() or not self.rule.moves_all:
            return rows, None
        step = predict_update(self, ids, rows)
        self.history.record_prediction(step)
        return step.rows, step.options
