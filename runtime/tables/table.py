"""Tables: the rows of one or more parameters, which are exchanged, looked up and updated as one matrix.

Contract
    A table by itself is a joined table of one: its only member is itself (`member.py`).
    The gradient and the step counter of a member stay with the member.
    Per-step work on all members avoids a Python call per member.

Shape legend: V rows, D columns; V' x d this rank's part; K rows; T members.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import pairwise, repeat
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from embrace_fx.runtime.kernels import lookup
from embrace_fx.runtime.tables.gradient_storage import TableGradient
from embrace_fx.runtime.tables.history import History
from embrace_fx.runtime.tables.local_storage import GradientFuture, Rows
from embrace_fx.runtime.tables.own_step import first_state, hyperparameters, read_state_rows, state_names, step_tensor
from embrace_fx.runtime.tables.row_store import RowStore
from embrace_fx.runtime.tables.update_rule import (
    DeferredUpdate,
    Options,
    SparseUpdate,
    can_step_rows,
)
from embrace_fx.vocabulary.exactness import ELEMENT_WISE
from embrace_fx.vocabulary.joined_table import JoinedTable
from embrace_fx.vocabulary.plan import Grid

if TYPE_CHECKING:
    from embrace_fx.runtime.tables.member import Member

_PARAMETER, _OPTIMIZER, _GRAD = map(attrgetter, ("parameter", "optimizer", "parameter.grad"))


class Table:
    """The rows of one or more parameters (its members), which are exchanged, looked up and updated as one matrix.

    Args:
        members: for each parameter, the table that stores only it, in the order of rows.
        bounds: the first row of each member, and the number of rows.

    Attributes:
        history: the deferred optimizer steps of the rows.
        gradient: the `.grad` of all member parameters.
    """

    shape: torch.Size
    history: History

    def __init__(self, name: str, members: Sequence[Member], bounds: Sequence[int], store: RowStore) -> None:
        self.name, self.members, self.store, self._bounds = name, tuple(members), store, bounds
        self.shape = torch.Size((bounds[-1], members[0].shape[1]))
        self.history, self.places, self.record = store.history, store.places, store.record
        self.split = partial(_split_by_member, tuple(bounds))
        """Splits rows (K, d) with sorted ids (K,) by member. Holds no reference to the members."""
        self.gradient = TableGradient(self.members)

    @classmethod
    def from_members(cls, space: JoinedTable, members: Sequence[Member]) -> Table:
        """Joins several tables that are sharded by columns into one."""
        return cls(space.name, members, space.bounds, members[0].store.join(members, space.bounds))

    @property
    def local(self) -> Tensor:
        """This rank's shard (V', d). For a table larger than memory, only the rows that are in memory."""
        return self.store.local

    @property
    def grid(self) -> Grid | None:
        """The grid on which the table is sharded, or None if it is sharded by columns."""
        return self.members[0].layout.grid

    # -- the gradient --------------------------------------------------------------------------------------------------

    def add_gradient(
        self, ids: Tensor, rows: Tensor, without_gradient: Collection[str] = (), *, unreduced: bool = False
    ) -> None:
        """Adds a gradient with unique ids (K,) and rows (K, d) to the `.grad` of all members, except
        `without_gradient`.

        Args:
            unreduced: whether the gradient is only this rank's, not yet reduced over ranks.
        """
        split = self.split
        late = GradientFuture(lambda: [[part] for part in split(ids, rows)])
        self.gradient.deliver(late, without_gradient, (ids, rows), unreduced=unreduced)

    @property
    def has_gradient(self) -> bool:
        """Whether the `.grad` of any member parameter is neither None nor zero."""
        return set(map(_GRAD, self.members)) != {None} and any(member.held is not None for member in self.members)

    def join_gradients(self, parts: Sequence[Rows]) -> Rows:
        """Concatenates gradients (ids (K,), rows (K, d)), one per member, with ids as row numbers of this table."""
        ids = torch.cat([ids + first for (ids, _), first in zip(parts, self._bounds, strict=False)])
        return ids, torch.cat([rows for _, rows in parts])

    # -- rows ----------------------------------------------------------------------------------------------------------

    def look_up(self, ids: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Returns the rows `ids` (K, d), as `dtype` if given, after applying the optimizer steps that they have
        deferred.
        """
        if self.gradient.holds and self.members[0].parameter.grad is None:
            self.gradient.free_dropped()
        store, history = self.store, self.history
        places = store.look_up(ids, to_write=(has_deferred := history.has_deferred))
        if has_deferred:
            history.apply_deferred(places)
        return lookup(store.local, places, dtype)

    def peek(self, ids: Tensor) -> Tensor:
        """Returns the rows `ids` (K, d) without applying the optimizer steps that they have deferred."""
        return self.store.local.index_select(0, self.places(ids))

    def flush(self) -> None:
        """Applies to all rows the optimizer steps that they have deferred. Do not call it during a step."""
        if self.history.has_deferred:
            self.history.close()

    # -- the optimizer -------------------------------------------------------------------------------------------------

    @property
    def optimizer_of_members(self) -> Optimizer:
        """The optimizer that updates all parameters in this table."""
        optimizer = self.members[0].optimizer
        assert optimizer is not None
        return optimizer

    def param_group(self) -> Options:
        """Returns the optimizer's param group of the parameters in this table."""
        return self.members[0].param_group()

    @property
    def state(self) -> Mapping[str, Any]:
        """The optimizer state of the rows in `local`."""
        return self.store.state

    @property
    def rule(self) -> type[SparseUpdate]:
        """The class that applies the next optimizer step."""
        return self.members[0].rule

    def can_defer(self) -> bool:
        """Returns whether an update can wait for the next forward, which applies it only to the rows that it reads."""
        return self.can_update_jointly() and can_step_rows(self.param_group())

    def can_update_jointly(self) -> bool:
        """Returns whether one update of all rows gives the same result as separate updates of the parameters."""
        return self._has_one_group() and self.store.has_uniform_state()

    def _has_one_group(self) -> bool:
        """Returns whether all parameters in this table belong to one param group of one optimizer."""
        optimizer = self.members[0].optimizer
        if optimizer is None or not all(map(is_, map(_OPTIMIZER, self.members), repeat(optimizer))):
            return False
        params = self.members[0].param_group().get("params", ())
        return set(map(id, params)).issuperset(map(id, map(_PARAMETER, self.members)))

    def steps_by(self, optimizer: Optimizer | None, options: Options) -> bool:
        """Returns whether this optimizer updates all parameters in this table, currently with these options."""
        members = self.members[:1] if self._has_one_group() else self.members
        return all(member.steps_by(optimizer, options) for member in members)

    def begin_step(self) -> SparseUpdate:
        """Begins an optimizer step on all rows, if `can_update_jointly()`. Returns the object that applies it."""
        rule = self.rule
        if rule is not DeferredUpdate:
            self.flush()
        optimizer, options = self.optimizer_of_members, self.param_group()
        if can_step_rows(options):  # otherwise a step of the whole table creates missing state
            known = {key for key, value in self.store.entries.items() if value is not None}
            # Leave out the learning rate, because each rate of a schedule would get its own cache entry.
            any_lr = {**options, "lr": 0.0}
            if not known.issuperset(state_names(type(optimizer), any_lr)):
                for member in self.members:
                    member.store.add_missing_state(first_state(optimizer, options, member.local))
        return rule(self)

    def predict_rows(self, ids: Tensor, rows: Tensor) -> tuple[Tensor, Options | None]:
        """Predicts the rows `ids` (K,) after an optimizer step without gradients, from their values `rows` (K, d).
        Returns (predicted rows, options of the step), or (`rows`, None) if the step cannot be predicted or does not
        change them.
        """
        # Run a trial step only for classes of optimizers whose step is known to have no side effects.
        if (
            type(self.members[0].optimizer) not in ELEMENT_WISE
            or not self.rule.moves_all
            or not self.can_update_jointly()
        ):
            return rows, None
        rows, options = rows.clone(), hyperparameters(self.param_group())
        state = read_state_rows(self.store.state, self.places(ids), len(self.store.local))
        step_tensor(self.optimizer_of_members, options, rows, torch.zeros_like(rows), state)
        return rows, options


def _split_by_member(bounds: Sequence[int], ids: Tensor, rows: Tensor) -> list[Rows]:
    """Splits a gradient of a joined table, with sorted ids (K,) and rows (K, d), by member. Returns the ids in each
    member, and their rows.
    """
    if len(bounds) == 2:
        return [(ids, rows)]
    cuts = torch.searchsorted(ids, torch.tensor(bounds, device=ids.device)).tolist()
    ends = zip(pairwise(cuts), bounds, strict=False)
    return [(ids[first:last] - first_row, rows[first:last]) for (first, last), first_row in ends]
