"""Tables: rows of one or more parameters that are exchanged, looked up and updated as one matrix.

Contract
    A table by itself is a row space of one: its only member is itself (`member.py`).
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
    steps_rows,
)
from embrace_fx.vocabulary.exactness import ELEMENT_WISE
from embrace_fx.vocabulary.plan import Grid
from embrace_fx.vocabulary.row_space import RowSpace

if TYPE_CHECKING:
    from embrace_fx.runtime.tables.member import Member

_PARAMETER, _OPTIMIZER, _GRAD = map(attrgetter, ("parameter", "optimizer", "parameter.grad"))


class Table:
    """The rows of one or more parameters (its members), which are exchanged, looked up and updated as one matrix.

    Args:
        name: of the table, or of the row space.
        members: the tables of one parameter each, in the order of their rows.
        bounds: the first row of each member, and the number of rows.
        store: where the rows are.

    Attributes:
        shape: (V, D).
        history: the deferred steps of the rows.
        gradient: the `.grad` of all members.
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
    def from_space(cls, space: RowSpace, members: Sequence[Member]) -> Table:
        """Makes one table of the members of a row space, which are all sharded by columns."""
        return cls(space.name, members, space.bounds, members[0].store.join(members, space.bounds))

    @property
    def local(self) -> Tensor:
        """Returns this rank's part (V', d), or its rows that are in memory."""
        return self.store.local

    @property
    def grid(self) -> Grid | None:
        """Returns the table's grid, or None if it is sharded by columns."""
        return self.members[0].layout.grid

    # -- the gradient --------------------------------------------------------------------------------------------------

    def add_gradient(self, ids: Tensor, rows: Tensor, absent: Collection[str] = (), *, unreduced: bool = False) -> None:
        """Adds a coalesced row gradient, ids (K,) and rows (K, d), to the `.grad` of all members except `absent`."""
        split = self.split
        late = GradientFuture(lambda: [[part] for part in split(ids, rows)])
        self.gradient.deliver(late, absent, (ids, rows), unreduced=unreduced)

    @property
    def has_gradient(self) -> bool:
        """Returns whether any member's `.grad` is not zero."""
        return set(map(_GRAD, self.members)) != {None} and any(member.held is not None for member in self.members)

    def join_gradients(self, parts: Sequence[Rows]) -> Rows:
        """Concatenates the members' row gradients. Ids become row numbers of the table."""
        ids = torch.cat([ids + first for (ids, _), first in zip(parts, self._bounds, strict=False)])
        return ids, torch.cat([rows for _, rows in parts])

    # -- rows ----------------------------------------------------------------------------------------------------------

    def look_up(self, ids: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Returns rows (K, d) for a forward, after applying their deferred steps."""
        if self.gradient.holds and self.members[0].parameter.grad is None:
            self.gradient.free_dropped()
        store, history = self.store, self.history
        places = store.look_up(ids, to_write=(has_deferred := history.has_deferred))
        if has_deferred:
            history.apply_deferred(places)
        return lookup(store.local, places, dtype)

    def peek(self, ids: Tensor) -> Tensor:
        """Returns rows (K, d) without applying their deferred steps."""
        return self.store.local.index_select(0, self.places(ids))

    def flush(self) -> None:
        """Applies all deferred steps. Do not call between `begin_step` and `finish`."""
        if self.history.has_deferred:
            self.history.close()

    # -- the optimizer -------------------------------------------------------------------------------------------------

    @property
    def optimizer_of_members(self) -> Optimizer:
        """Returns the optimizer that updates the members."""
        optimizer = self.members[0].optimizer
        assert optimizer is not None
        return optimizer

    def param_group(self) -> Options:
        """Returns the param group of the members."""
        return self.members[0].param_group()

    @property
    def state(self) -> Mapping[str, Any]:
        """Returns the optimizer state of the rows in `local`."""
        return self.store.state

    @property
    def rule(self) -> type[SparseUpdate]:
        """Returns the update rule of the next step, with the current options."""
        return self.members[0].rule

    def can_defer(self) -> bool:
        """Returns whether the update can be left to the next forward and applied by rows."""
        return self.is_one() and steps_rows(self.param_group())

    def is_one(self) -> bool:
        """Returns whether one update of all rows equals the optimizer's separate updates of the members."""
        return self._has_one_group() and self.store.is_alike()

    def _has_one_group(self) -> bool:
        """Returns whether all members belong to one param group of one optimizer."""
        optimizer = self.members[0].optimizer
        if optimizer is None or not all(map(is_, map(_OPTIMIZER, self.members), repeat(optimizer))):
            return False
        params = self.members[0].param_group().get("params", ())
        return set(map(id, params)).issuperset(map(id, map(_PARAMETER, self.members)))

    def steps_by(self, optimizer: Optimizer | None, options: Options) -> bool:
        """Returns whether a step of this optimizer now, with these options, would update all members."""
        members = self.members[:1] if self._has_one_group() else self.members
        return all(member.steps_by(optimizer, options) for member in members)

    def begin_step(self) -> SparseUpdate:
        """Begins a step with the optimizer's present options. Call it only if `is_one`."""
        rule = self.rule
        if rule is not DeferredUpdate:
            self.flush()
        optimizer, options = self.optimizer_of_members, self.param_group()
        if steps_rows(options):  # else the whole table makes the step, which creates state
            known = {key for key, value in self.store.entries.items() if value is not None}
            any_lr = {**options, "lr": 0.0}  # a schedule's rates would each be another key of the cache
            if not known.issuperset(state_names(type(optimizer), any_lr)):
                for member in self.members:
                    member.store.add_missing_state(first_state(optimizer, options, member.local))
        return rule(self)

    def predict_rows(self, ids: Tensor, rows: Tensor) -> tuple[Tensor, Options | None]:
        """Returns rows (K, d) as the next step leaves them if they get no gradient, and the options of that step.

        Returns the rows unchanged and None if the step does not change them or cannot be predicted.
        """
        # A trial step of any other class might have side effects.
        if type(self.members[0].optimizer) not in ELEMENT_WISE or not self.is_one() or not self.rule.moves_all:
            return rows, None
        rows, options = rows.clone(), hyperparameters(self.param_group())
        state = read_state_rows(self.store.state, self.places(ids), len(self.store.local))
        step_tensor(self.optimizer_of_members, options, rows, torch.zeros_like(rows), state)
        return rows, options


def _split_by_member(bounds: Sequence[int], ids: Tensor, rows: Tensor) -> list[Rows]:
    """Splits sorted ids and their rows into each member's, numbered from its own first row."""
    if len(bounds) == 2:
        return [(ids, rows)]
    cuts = torch.searchsorted(ids, torch.tensor(bounds, device=ids.device)).tolist()
    ends = zip(pairwise(cuts), bounds, strict=False)
    return [(ids[first:last] - first_row, rows[first:last]) for (first, last), first_row in ends]
