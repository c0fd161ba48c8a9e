"""The tables of a row space as one table: one memory for parameters and state, one gradient, one step.

Contract
    Each table's parameter and state are views of the row space's memory. If a checkpoint or `Module.to` replaces them,
    the next use notices it and copies the new values.
    The gradient and the step counter of a table stay with the table.
    Per-step work on all tables avoids a Python call per table.

Shape legend: V' rows of the space, d columns that this rank owns; K rows with gradient; T tables.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import chain, pairwise, repeat
from operator import attrgetter, is_, itemgetter
from sys import getrefcount
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from embrace_fx.runtime.tables.gradient_storage import GradientStorage
from embrace_fx.runtime.tables.history import History
from embrace_fx.runtime.tables.local_storage import GradientFuture, Rows
from embrace_fx.runtime.tables.optimizer_state import state_of
from embrace_fx.runtime.tables.own_step import is_of_rows
from embrace_fx.runtime.tables.part import Part
from embrace_fx.runtime.tables.row_table import RowTable
from embrace_fx.runtime.tables.unit import Unit
from embrace_fx.runtime.tables.update_rule import Options, SparseUpdate
from embrace_fx.vocabulary.row_space import RowSpace

_PARAMETER, _OPTIMIZER, _GRAD = map(attrgetter, ("parameter", "optimizer", "parameter.grad"))
_LOCAL = attrgetter("parameter.held.local")


class JoinedTable(Unit):
    """The tables of a row space, exchanged and updated as one table.

    Args:
        space: the row space.
        members: its tables, all sharded by columns.
    """

    grid = None

    def __init__(self, space: RowSpace, members: Sequence[RowTable]) -> None:
        self.name = space.name
        self.members = tuple(members)
        self._bounds = space.bounds
        self.shape = torch.Size((space.bounds[-1], members[0].shape[1]))
        self.split = partial(_split, self._bounds)
        """Splits rows (K, d) with sorted ids (K,) of the row space by table. Holds no reference to the tables."""
        self._weights = _Joined(self._bounds)
        self._state = _JoinedState(self.members, self._bounds)
        self._gradient = _JoinedGradient(self.members)
        self.history = self._make_history()

    def _make_history(self) -> History:
        """Returns a history that joins those of the members."""
        return History(self, {first: table.history for first, table in zip(self._bounds, self.members, strict=False)})

    @property
    def local(self) -> Tensor:
        """The members' shards as one tensor (rows, columns)."""
        parts, known = [*map(_LOCAL, self.members)], self._weights
        if known.all is not None and all(map(is_, parts, known.views)):  # ten times a step: without a call
            return known.all
        return known.of(parts, self._move)

    def _move(self, k: int, view: Tensor) -> None:
        """Moves a member's shard into a view."""
        self.members[k].move(view)

    @property
    def joined(self) -> tuple[Tensor, ...]:
        """Returns the tensors, besides the parameters, that own the row space's memory."""
        return () if self._weights.all is None else (self._weights.all,)

    # -- the gradient --------------------------------------------------------------------------------------------------

    def add_gradient(self, ids: Tensor, rows: Tensor, absent: Collection[str] = (), *, unreduced: bool = False) -> None:
        """Adds a coalesced row gradient, ids (K,) and rows (K, d), to the `.grad` of all tables but `absent`."""
        split = self.split
        self.deliver(
            GradientFuture(lambda: [[part] for part in split(ids, rows)]), absent, (ids, rows), unreduced=unreduced
        )

    def deliver(
        self,
        late: GradientFuture[Sequence[Rows]],
        absent: Collection[str] = (),
        rows: Rows | None = None,
        *,
        unreduced: bool = False,
    ) -> None:
        """Sets each table's `.grad` to its pending gradient, or adds the gradient to an existing `.grad`.

        Args:
            absent: names of tables without a gradient.
            rows: ids (K,) and rows (K, d) of all tables, if they have arrived.
            unreduced: whether the gradients are this rank's own sums.
        """
        self._gradient.deliver(late, absent, rows, unreduced)

    def standing(self, late: GradientFuture[Sequence[Rows]]) -> int:
        """Counts the tables whose `.grad` still is this future's gradient and has not been read."""
        return self._gradient.standing(late)

    def gradient(self) -> Rows | None:
        """Returns the row gradient of all tables, or None if any `.grad` was replaced or changed."""
        return self._gradient.rows()

    @property
    def has_gradient(self) -> bool:
        """Returns whether any table's `.grad` is not zero."""
        return set(map(_GRAD, self.members)) != {None} and any(member.held is not None for member in self.members)

    def join(self, parts: Sequence[Rows]) -> Rows:
        """Concatenates the tables' row gradients, with ids of the row space."""
        ids = torch.cat([ids + first for (ids, _), first in zip(parts, self._bounds, strict=False)])
        return ids, torch.cat([rows for _, rows in parts])

    # -- the optimizer -------------------------------------------------------------------------------------------------

    def can_wait(self) -> bool:
        """Returns whether the update can be deferred to the next forward and applied by rows."""
        return self.is_one() and self.members[0].can_wait()

    def is_one(self) -> bool:
        """Returns whether one update can step all members."""
        return self._has_one_group() and self._state.is_alike()

    def _has_one_group(self) -> bool:
        """Returns whether all members are in one parameter group of one optimizer."""
        optimizer = self.members[0].optimizer
        if optimizer is None or not all(map(is_, map(_OPTIMIZER, self.members), repeat(optimizer))):
            return False
        params = self.members[0].param_group()["params"]
        return set(map(id, params)).issuperset(map(id, map(_PARAMETER, self.members)))

    def param_group(self) -> Options:
        """Returns the parameter group of the members."""
        return self.members[0].param_group()

    def steps_by(self, optimizer: Optimizer | None, options: Options) -> bool:
        """Returns whether this optimizer would update all tables now, with these options."""
        members = self.members[:1] if self._has_one_group() else self.members
        return all(member.steps_by(optimizer, options) for member in members)

    @property
    def rule(self) -> type[SparseUpdate]:
        """Update rule of the members."""
        return self.members[0].rule

    def look_up(self, ids: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Looks up rows of a new forward, after it frees gradients that the loop has dropped."""
        self._gradient.give_back()  # a new forward begins: free gradients that the loop has dropped
        return super().look_up(ids, dtype)

    @property
    def state(self) -> dict[str, Any]:
        """Joins the optimizer state of all tables: one tensor per entry with rows, and the first table's counters."""
        return self._state.now()

    lacks_state = False  # steps that create state run table by table

    def keep(self, state: Mapping[str, Any]) -> None:
        """Stores the counters that a step has changed, for each table."""
        self._state.keep({key: value for key, value in state.items() if not is_of_rows(value, self.shape[0])})


def _split(bounds: Sequence[int], ids: Tensor, rows: Tensor) -> list[Rows]:
    """Splits sorted ids and their rows into each member's, numbered from its own first row."""
    cuts = torch.searchsorted(ids, torch.tensor(bounds, device=ids.device)).tolist()
    ends = zip(pairwise(cuts), bounds, strict=False)
    return [(ids[first:last] - first_row, rows[first:last]) for (first, last), first_row in ends]


class _Joined:
    """One tensor, with the tables' tensors as views into it.

    Args:
        bounds: the first row of each table, and the end of the last one.
    """

    def __init__(self, bounds: Sequence[int]) -> None:
        self._bounds = bounds
        self.all: Tensor | None = None
        self.views: list[Tensor] = []

    def of(self, parts: Sequence[Tensor], move: Callable[[int, Tensor], None]) -> Tensor:
        """Returns all rows of `parts` as one tensor (V', d).

        Args:
            move: called with a table's index and the view that replaces its part.
        """
        if self.all is not None and all(map(is_, parts, self.views)):
            return self.all
        found = parts[0].new_empty((self._bounds[-1], *parts[0].shape[1:]))
        views = [found[first:last] for first, last in pairwise(self._bounds)]
        for k, (part, view) in enumerate(zip(parts, views, strict=True)):
            move(k, view.copy_(part))
        self.all, self.views = found, views
        return found


_HELD_LOCAL, _VERSION = attrgetter("held.local"), attrgetter("_version")


class _JoinedState:
    """The optimizer state of the tables of a row space.

    The joined state is cached as long as the memory is the same and no counter was written, so that a lookup needs no
    call per table. The cache holds no reference to parts of the state: such a reference would look like a user's.
    """

    def __init__(self, members: Sequence[RowTable], bounds: Sequence[int]) -> None:
        self._members, self._bounds = members, bounds
        self._of_rows: dict[str, _Joined] = {}
        self._kept: list[dict[str, Any]] = []  # each table's state when it was joined
        self._counters: dict[str, list[Any]] = {}  # key -> one counter per table
        self._versions: dict[str, list[int]] = {}  # key -> version of each counter that is a tensor
        self._joined: dict[str, Any] = {}
        self._is_alike = False

    def is_alike(self) -> bool:
        """Returns whether all tables have the same entries and equal counters."""
        if not self._is_known():
            states = [state_of(member.holder, member.parameter) for member in self._members]
            if not all(_alike(state, states[0]) for state in states):
                return False
            self._join(states)
        return self._is_alike

    def now(self) -> dict[str, Any]:
        """Returns the state of all rows as one tensor (V', d) per entry, and the first table's counters."""
        if not self._is_known():
            self._join([state_of(member.holder, member.parameter) for member in self._members])
        return dict(self._joined)

    def _join(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Joins the members' states: tensors with a value per row become one tensor for all members."""
        joined, rows = dict(states[0]), self._bounds[1]
        for key, value in states[0].items():
            if is_of_rows(value, rows):
                of_key = self._of_rows.setdefault(key, _Joined(self._bounds))
                joined[key] = of_key.of([each[key] for each in states], partial(self._move, key))
        self._joined, self._is_alike = joined, all(_alike(state, states[0]) for state in states)
        state = self._members[0].holder.state
        self._kept = [state.get(member.parameter) or {} for member in self._members]
        self._counters = {key: [each.get(key) for each in self._kept] for key in joined if key not in self._of_rows}
        self._note_versions()

    def _move(self, key: str, k: int, view: Tensor) -> None:
        """Moves a member's optimizer state into a view."""
        self._members[k].keep({key: view})

    def _note_versions(self) -> None:
        """Remembers the versions of the counters, so that a write by others is seen."""
        tensors = {key: values for key, values in self._counters.items() if isinstance(values[0], Tensor)}
        counted = {key: values for key, values in tensors.items() if True not in map(Tensor.is_inference, values)}
        self._versions = {key: [*map(_VERSION, values)] for key, values in counted.items()}

    def _is_known(self) -> bool:
        """Returns whether the memory and counters are the same as when the state was last joined."""
        optimizer = self._members[0].optimizer
        if not self._kept or optimizer is None:
            return False
        by_id = dict(zip(map(id, optimizer.state), optimizer.state.values(), strict=True))  # hashes no parameter
        kept = map(by_id.get, map(id, map(_PARAMETER, self._members)))
        if not all(map(is_, kept, self._kept)) or set(map(len, self._kept)) != {len(self._joined)}:
            return False
        try:
            for key, counters in self._counters.items():
                if not all(map(is_, map(itemgetter(key), self._kept), counters)):
                    return False
            for key, of_rows in self._of_rows.items():
                if not all(map(is_, map(_HELD_LOCAL, map(itemgetter(key), self._kept)), of_rows.views)):
                    return False
        except (KeyError, AttributeError):  # the user's own tensor, or missing
            return False
        now = chain.from_iterable(map(self._counters.__getitem__, self._versions))
        return [*map(_VERSION, now)] == [*chain.from_iterable(self._versions.values())]

    def keep(self, counters: Mapping[str, Any]) -> None:
        """Stores the counters after a step in each table's state."""
        if not counters:
            return
        if self._is_alike and self._is_known() and self._versions.keys() >= counters.keys():
            for key, value in counters.items():
                torch._foreach_copy_(self._counters[key], [value] * len(self._members))
            self._joined |= {key: self._counters[key][0] for key in counters}
            self._note_versions()
            return
        for member in self._members:
            member.keep({k: v.clone() if isinstance(v, Tensor) else v for k, v in counters.items()})


def _alike(state: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Returns whether two tables' states have the same entries and equal counters."""
    counters = [key for key, value in other.items() if not isinstance(value, Tensor) or not value.dim()]
    return state.keys() == other.keys() and [state[key] for key in counters] == [other[key] for key in counters]


class _JoinedGradient:
    """The `.grad` of the tables of a row space, which one backward delivers together."""

    def __init__(self, members: Sequence[RowTable]) -> None:
        self._members = members
        self._parameters: list[nn.Parameter] = []
        self._parts: list[Part] = []
        self._held: list[GradientStorage] = []
        self._late: GradientFuture[Sequence[Rows]] | None = None  # the last delivered
        self._rows: Rows | None = None

    def deliver(
        self, late: GradientFuture[Sequence[Rows]], absent: Collection[str], rows: Rows | None, unreduced: bool
    ) -> None:
        """As `JoinedTable.deliver`."""
        if not absent and self._are_free():
            for k, held in enumerate(self._held):
                held.late, held.unreduced = (late, k), unreduced
            for parameter, part in zip(self._parameters, self._parts, strict=True):
                parameter.grad = part
        else:
            for k, member in enumerate(self._members):
                member.deliver(late, absent, k=k, unreduced=unreduced)
            self._take_slots(late)
        self._late, self._rows = late, rows

    def _take_slots(self, late: GradientFuture[Sequence[Rows]]) -> None:
        """Keeps the gradient objects for reuse by later backwards, if each has only this gradient."""
        parameters = [member.parameter for member in self._members]
        parts: list[Any] = [parameter.grad for parameter in parameters]
        held = [part.held if isinstance(part, Part) else None for part in parts]
        if all(isinstance(each, GradientStorage) and each.waits_for(late) for each in held):
            self._parameters, self._parts, self._held = parameters, parts, held  # type: ignore[assignment]
        else:
            self._parameters, self._parts, self._held = [], [], []

    def _are_free(self) -> bool:
        """Whether the gradients of the last backward have been dropped, and nobody has looked at them or keeps them."""
        if not self._parameters:
            return False
        late, (alone, of_gradient) = self._late, _ALONE
        of_table = zip(self._members, self._parameters, self._parts, self._held, strict=True)
        for member, parameter, part, held in of_table:
            if member.parameter is not parameter or parameter.grad is not None:
                return False
            if held.late is None or held.late[0] is not late or part._use_count() != 1:  # type: ignore[attr-defined]
                return False
            if getrefcount(part) != alone or getrefcount(held) != of_gradient:
                return False
        return True

    def give_back(self) -> None:
        """Frees the memory of dropped gradients."""
        if self._rows is not None and self._are_free():
            self._late, self._rows = GradientFuture(tuple), None
            for k, held in enumerate(self._held):
                held.late = self._late, k

    def standing(self, late: GradientFuture[Sequence[Rows]]) -> int:
        """As `JoinedTable.standing`."""
        if late is not self._late or not self._parts:
            return sum([member.standing(late) for member in self._members])
        of_table = zip(self._members, self._parameters, self._parts, self._held, strict=True)
        for member, parameter, part, held in of_table:
            is_same = member.parameter is parameter and parameter.grad is part
            if not is_same or held.late is None or held.late[0] is not late:
                return sum([member.standing(late) for member in self._members])
        return len(self._members)

    def rows(self) -> Rows | None:
        """As `JoinedTable.gradient`."""
        if self._rows is None or self._late is None or self.standing(self._late) < len(self._members):
            self._rows = None
        return self._rows


def _references() -> tuple[int, int]:
    """Counts the references to a gradient in a list, and to its storage, for comparison in `_are_free`."""
    made: Any = torch.empty(0, device="cpu")
    made.held = object()
    parts, of_parts = [made], [made.held]
    del made
    for _, _, part, held in zip((None,), (None,), parts, of_parts, strict=True):
        return getrefcount(part), getrefcount(held)
    raise AssertionError


_ALONE = _references()
