"""Tables of a row space as one table: their parts and their optimizer's state in one memory, one gradient, one step.

Contract
    Each table's parameter and state stay the tensors they are to everyone else: views of the space's rows. Whoever puts
    others in their place (a checkpoint, `Module.to`) is noticed at the next use, and their values are taken over.
    What concerns one table alone, its waiting gradient and its number of steps, stays with the table.

Shape legend: V' rows of the space, d columns that this rank owns; K rows with gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from embrace_fx.runtime.kernels import lookup
from embrace_fx.runtime.tables.held import Late, Rows
from embrace_fx.runtime.tables.own_step import is_of_rows
from embrace_fx.runtime.tables.part_state import state_of
from embrace_fx.runtime.tables.resting import RestingRows
from embrace_fx.runtime.tables.row_table import RowTable, deliver
from embrace_fx.runtime.tables.update_rule import OfMembers, Options, Replay, UpdateRule, suppose
from embrace_fx.vocabulary.exactness import ELEMENT_WISE
from embrace_fx.vocabulary.row_space import RowSpace


class StackedTable:
    """The tables of a row space, to their exchange and their updates one table.

    Args:
        space: what it is of.
        members: its tables, each by columns.
    """

    grid = None

    def __init__(self, space: RowSpace, members: Sequence[RowTable]) -> None:
        self.name = space.name
        self.members = tuple(members)
        self._bounds = space.bounds
        self.shape = torch.Size((space.bounds[-1], members[0].shape[1]))
        self._gradient: tuple[Late[Sequence[Rows]], Rows] | None = None
        self.split = partial(_split, self._bounds)
        """Returns each table's own of rows (K, d) of the space, whose ids (K,) are sorted; keeps no table."""
        self._weights = _Joined(self._bounds)
        self._states: dict[str, _Joined] = {}
        self._resting: RestingRows | None = None  # of all tables, where they rest together

    @property
    def local(self) -> Tensor:
        """This rank's part, (V', d)."""
        # Of each, the same parameter to everyone who holds it.
        return self._weights.of([each.local for each in self.members], lambda k, view: self.members[k].move(view))

    @property
    def joined(self) -> tuple[Tensor, ...]:
        """Tensors besides the parameters that hold the space's memory."""
        return () if self._weights.all is None else (self._weights.all,)

    def note(self, ids: Tensor, among: Tensor) -> None:
        """As of a table: none of a space needs its host."""

    # -- the gradient --------------------------------------------------------------------------------------------------

    def add_gradient(self, ids: Tensor, rows: Tensor, absent: Collection[str] = ()) -> None:
        """Adds a coalesced row gradient, ids (K,), rows (K, d), to the `.grad` of its tables, but of those `absent`."""
        split = self.split
        late: Late[Sequence[Rows]] = Late(lambda: [[part] for part in split(ids, rows)])
        self._gradient = late, (ids, rows)
        deliver(self.members, late, absent)

    def gradient(self) -> Rows | None:
        """Returns the row gradient of all tables, as it was added; None: `.grad` of any of them is another by now."""
        if (found := self._gradient) is None:
            return None
        late, rows = found
        if all((held := member.held) is not None and held.waits_for(late) for member in self.members):
            return rows
        self._gradient = None
        return None

    def join(self, parts: Sequence[Rows]) -> Rows:
        """Puts rows of the tables, in their order, together as rows of the space."""
        return self.shifted([ids for ids, _ in parts]), torch.cat([rows for _, rows in parts])

    def shifted(self, ids: Sequence[Tensor | None]) -> Tensor:
        """Rows of the space that are rows `ids` (K,) of its tables, in their order; None: there are none."""
        found = [each + first for each, first in zip(ids, self._bounds, strict=False) if each is not None]
        return torch.cat(found) if found else torch.empty(0, dtype=torch.int64, device=self.local.device)

    @property
    def holder(self) -> Optimizer:
        """The optimizer that steps it."""
        return self.members[0].holder

    def can_wait(self) -> bool:
        """Whether a step can be left to the next forward, and be taken rows by rows."""
        return self._is_one() and self.members[0].can_wait()

    def _is_one(self) -> bool:
        """Whether one update of the space is what the optimizer does to each table: options and state are alike."""
        first, *others = self.members
        if first.optimizer is None:
            return False
        group, state = first.param_group(), state_of(first.optimizer, first.parameter)
        for member in others:
            if member.optimizer is not first.optimizer or member.param_group() is not group:
                return False
            if not _alike(state_of(first.optimizer, member.parameter), state):
                return False
        return True

    def param_group(self) -> Options:
        """The options of this moment."""
        return self.members[0].param_group()

    def begin_step(self) -> UpdateRule:
        """Begins a step of every table, under the options of this moment, of tables that are one (`can_wait`)."""
        first, *others = self.members
        rule = first.rule
        if Replay in {rule, *(each.rule for each in others if each.row_updates != first.row_updates)} != {Replay}:
            return OfMembers(self.split, [member.begin_step() for member in self.members])  # some rest, and some do not
        if rule is Replay:
            return Replay(self, self._rest_together())
        self.settle()
        return rule(self)

    def _rest_together(self) -> RestingRows:
        """One history for all tables: what they have in common of steps is noted, and rows are moved, once."""
        if (known := self._together) is not None:
            return known
        self.settle()
        found = self._resting = RestingRows()
        for member, first in zip(self.members, self._bounds, strict=False):
            member.rest_by(found, self, first)
        return found

    @property
    def _together(self) -> RestingRows | None:
        """The common history; None: a table has one of its own."""
        if (known := self._resting) is not None:
            for member in self.members:
                if not member.rests_by(known):
                    return None
        return known

    @property
    def has_resting_rows(self) -> bool:
        """Whether any row may have skipped a step."""
        return any(member.has_resting_rows for member in self.members)

    def catch_up(self, ids: Tensor) -> bool:
        """Lets rows (K,), in any order, take the steps they have skipped, before they are read."""
        if not self.has_resting_rows:
            return False
        if (together := self._together) is not None:
            return together.catch_up(self.local, self.state, ids)
        ordered = ids.unique()
        parts = self.split(ordered, ordered)
        for member, (own, _) in zip(self.members, parts, strict=True):
            member.catch_up(own)
        return True

    def places(self, ids: Tensor, *, to_write: bool = False) -> Tensor:
        """As `RowTable.places`."""
        return ids

    def look_up(self, ids: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """As `RowTable.look_up`."""
        self.catch_up(ids)
        return lookup(self.local, ids, dtype)

    def as_they_are(self, ids: Tensor) -> Tensor:
        """As `RowTable.as_they_are`."""
        return self.local.index_select(0, self.places(ids))

    def settle(self) -> None:
        """Has all rows take the steps they have skipped."""
        for member in self.members:
            member.settle()

    @property
    def state(self) -> dict[str, Any]:
        """Joins the optimizer state of all tables: state of rows as one tensor each, counters of the first table."""
        states = [state_of(member.holder, member.parameter) for member in self.members]
        joined, rows = dict(states[0]), self._bounds[1]
        for key, value in states[0].items():
            if is_of_rows(value, rows):
                of_key = self._states.setdefault(key, _Joined(self._bounds))
                joined[key] = of_key.of([each[key] for each in states], partial(self._move_state, key))
        return joined

    def _move_state(self, key: str, k: int, view: Tensor) -> None:
        self.members[k].keep({key: view})

    lacks_state = False  # a step that makes some is taken table by table

    def keep(self, state: Mapping[str, Any]) -> None:
        """Keeps what a step has made of state: counters, which each table has for itself."""
        counters = {key: value for key, value in state.items() if not is_of_rows(value, self.shape[0])}
        for member in self.members:
            member.keep({k: v.clone() if isinstance(v, Tensor) else v for k, v in counters.items()})

    def preview(self, ids: Tensor, rows: Tensor) -> tuple[Tensor, Options | None]:
        """As `RowTable.preview`."""
        first = self.members[0]
        if type(first.optimizer) not in ELEMENT_WISE or not self._is_one() or not first.rule.moves_all:
            return rows, None
        step = suppose(self, ids, rows)
        if (together := self._together) is not None:
            together.suppose(step)
        return step.rows, step.options


def _split(bounds: Sequence[int], ids: Tensor, rows: Tensor) -> list[Rows]:
    cuts = torch.searchsorted(ids, torch.tensor(bounds, device=ids.device)).tolist()
    ends = zip(pairwise(cuts), bounds, strict=False)
    return [(ids[first:last] - first_row, rows[first:last]) for (first, last), first_row in ends]


def _alike(state: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two tables' states have the same entries, and the same counters."""
    counters = [key for key, value in other.items() if not isinstance(value, Tensor) or not value.dim()]
    return state.keys() == other.keys() and [state[key] for key in counters] == [other[key] for key in counters]


class _Joined:
    """One tensor of which the tables' own ones are views.

    Args:
        bounds: first rows of the tables, and the end of the last one.
    """

    def __init__(self, bounds: Sequence[int]) -> None:
        self._bounds = bounds
        self.all: Tensor | None = None
        self._addresses: list[int] = []

    def of(self, parts: Sequence[Tensor], move: Callable[[int, Tensor], None]) -> Tensor:
        """All rows of `parts`, (V', d).

        Args:
            move: (number of a table, view of its rows): puts the view in the place of the table's part.
        """
        if self.all is not None and [part.data_ptr() for part in parts] == self._addresses:
            return self.all
        found = parts[0].new_empty((self._bounds[-1], *parts[0].shape[1:]))
        views = [found[first:last] for first, last in pairwise(self._bounds)]
        for k, (part, view) in enumerate(zip(parts, views, strict=True)):
            move(k, view.copy_(part))
        self.all, self._addresses = found, [view.data_ptr() for view in views]
        return found
