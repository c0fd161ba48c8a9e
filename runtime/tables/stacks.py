"""Tables below each other as one (`embrace_fx.plan.Stack`): their parts and their optimizer's state in one memory.

Contract
    Each table's parameter and state stay the tensors they are to everyone else: views of the stack's rows. Whoever puts
    others in their place (a checkpoint, `Module.to`) is noticed at the next use, and their values are taken over.
    What concerns one table alone, its waiting gradient and its number of steps, stays with the table.

Shape legend: V' rows of the stack, d columns that this rank owns; K rows with gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from embrace_fx.runtime.tables.held_gradient import Rows
from embrace_fx.runtime.tables.own_step import is_of_rows, rows_of_state, step_rows
from embrace_fx.runtime.tables.row_optimizers import row_optimizer
from embrace_fx.runtime.tables.row_table import Options, RowTable, Supposed, suppose, sweep
from embrace_fx.vocabulary.exactness import ELEMENT_WISE
from embrace_fx.vocabulary.plan import Stack


class StackedTable:
    """Sharded tables of a stack, to their exchange and their updates one table.

    Args:
        stack: what it is of.
        members: its tables, each by columns.
    """

    grid = None

    def __init__(self, stack: Stack, members: Sequence[RowTable]) -> None:
        self.name = stack.name
        self.members = tuple(members)
        rows = sum(member.shape[0] for member in members)
        self.shape = torch.Size((rows, members[0].shape[1]))
        self._bounds = (*stack.first_rows, rows)
        self._weights = _Joined(self._bounds)
        self._states: dict[str, _Joined] = {}
        self._applied: list[Tensor] = []

    @property
    def local(self) -> Tensor:
        """This rank's part, (V', d)."""
        return self._weights.of([member.local for member in self.members], self._move_parameter)

    def _move_parameter(self, k: int, view: Tensor) -> None:
        self.members[k].move(view)  # the same parameter to everyone who holds it

    @property
    def joined(self) -> tuple[Tensor, ...]:
        """Tensors besides the parameters that hold the stack's memory."""
        return () if self._weights.all is None else (self._weights.all,)

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient waits for the next update at any of the tables."""
        return any(member.has_gradient for member in self.members)

    def split(self, ids: Tensor, rows: Tensor) -> list[Rows]:
        """Each table's own of rows (K, d) of the stack, whose ids (K,) are sorted."""
        cuts = torch.searchsorted(ids, torch.tensor(self._bounds, device=ids.device)).tolist()
        ends = zip(pairwise(cuts), self._bounds, strict=False)
        return [(ids[first:last] - first_row, rows[first:last]) for (first, last), first_row in ends]

    @property
    def holder(self) -> Optimizer:
        """The optimizer that steps it."""
        return self.members[0].holder

    def steps_in_parts(self) -> bool:
        """Whether a step can be taken rows by rows."""
        return all(member.steps_in_parts() for member in self.members)

    def steps_as_one(self) -> bool:
        """Whether one update of the stack is what the optimizer does to each table: options and state are alike."""
        first = self.members[0]
        if first.optimizer is None or any(member.optimizer is not first.optimizer for member in self.members):
            return False
        if not (group := self._common_group()):
            return False
        states = [member.state if member.moves_all(group) else member.made_state(group) for member in self.members]
        return all(_alike(each, states[0]) for each in states)

    def _common_group(self) -> Options:
        """The param group that holds all tables; empty where there is none."""
        group = self.members[0].param_group()
        held = {id(parameter) for parameter in group["params"]}
        return group if all(id(member.parameter) in held for member in self.members) else {}

    def begin_step(self) -> Options:
        """Counts one iteration of every table; returns the options of this moment."""
        group = self.members[0].param_group()
        self._applied = []
        if self._rests(group):
            for member in self.members:
                member.begin_step()
            return group
        self.settle()
        if not self.members[0].moves_all(group):
            for member in self.members:
                member.count_step(group)
        return group

    def _rests(self, options: Options) -> bool:
        """Whether rows without gradient rest: each table knows which of its."""
        return all(member.rests(options) for member in self.members)

    @property
    def has_resting_rows(self) -> bool:
        """Whether any row may have skipped a step."""
        return any(member.has_resting_rows for member in self.members)

    def catch_up(self, ids: Tensor) -> bool:
        """Lets rows (K,), in any order, take the steps they have skipped, before they are read."""
        if not self.has_resting_rows:
            return False
        ordered = ids.unique()
        parts = self.split(ordered, ordered)
        for member, (own, _) in zip(self.members, parts, strict=True):
            member.catch_up(own)
        return True

    def settle(self) -> None:
        """Has all rows take the steps they have skipped."""
        for member in self.members:
            member.settle()

    def _joined_state(self) -> dict[str, Any]:
        """Joins the optimizer state of all tables: state of rows as one tensor each, counters of the first table."""
        states = [member.state for member in self.members]
        joined = dict(states[0])
        for key, value in states[0].items():
            if is_of_rows(value, self.members[0].local.shape[0]):
                of_key = self._states.setdefault(key, _Joined(self._bounds))
                joined[key] = of_key.of([each[key] for each in states], partial(self._move_state, key))
        return joined

    def _move_state(self, key: str, k: int, view: Tensor) -> None:
        self.members[k].state[key] = view

    def apply(self, ids: Tensor, rows: Tensor, options: Options) -> None:
        """Updates rows `ids` (K,), sorted and unique, by their gradients (K, d), under the options of their step.

        One step's rows may come in several parts, none in two of them.
        """
        if self._rests(options):
            for member, part in zip(self.members, self.split(ids, rows), strict=True):
                member.apply(*part, options)
            return
        if not self.members[0].moves_all(options):
            row_optimizer(type(self.holder)).apply(self.local, self._joined_state(), ids, rows, options)
            return
        step_rows(self.holder, options, self.local, self._joined_state(), ids, rows)
        self._applied.append(ids)

    def finish(self, parts: Sequence[Rows], options: Options) -> None:
        """Updates the rows that the step has not updated yet, as `RowTable.finish`."""
        if self._rests(options):
            split = [self.split(*part) for part in parts]
            for k, member in enumerate(self.members):
                member.finish([each[k] for each in split], options)
            return
        if not self.members[0].moves_all(options):
            for ids, rows in parts:
                self.apply(ids, rows, options)
            return
        applied, self._applied = self._applied, []
        state = self._joined_state()
        sweep(self.holder, options, self.local, state, parts, applied)
        for member in self.members:
            counters = {key: value for key, value in state.items() if not is_of_rows(value, self.shape[0])}
            member.state.update({k: v.clone() if isinstance(v, Tensor) else v for k, v in counters.items()})

    def may_move(self) -> bool:
        """Whether rows without gradient may move in the next step."""
        return any(member.may_move() for member in self.members)

    def coming(self, ids: Tensor) -> tuple[Tensor, Supposed]:
        """Rows of the stack as the next step will leave them, as `RowTable.coming`."""
        self.catch_up(ids)
        rows = self.local.index_select(0, ids)
        if any(type(member.optimizer) not in ELEMENT_WISE for member in self.members) or not self.steps_as_one():
            return rows, Supposed(None, {})
        state = rows_of_state(self._joined_state(), ids, self.shape[0])
        return rows, suppose(self.holder, self.members[0].param_group(), rows, state)

    def is_as(self, supposed: Supposed) -> bool:
        """Whether the step that was just taken is the one supposed."""
        return all(member.is_as(supposed) for member in self.members)


def _alike(state: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two tables' states have the same entries, and the same counters."""
    return state.keys() == other.keys() and all(
        bool(state[key] == value) for key, value in other.items() if not isinstance(value, Tensor) or value.dim() == 0
    )


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
