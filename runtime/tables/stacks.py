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
from torch.distributed.tensor import DTensor

from embrace_fx.runtime.tables.layouts import as_shard
from embrace_fx.runtime.tables.row_table import RowTable
from embrace_fx.vocabulary.plan import Stack


class StackedTable:
    """Sharded tables of a stack, to their exchange and their updates one table.

    Args:
        stack: what it is of.
        members: its tables, each by columns, all of one param group of one optimizer.
    """

    def __init__(self, stack: Stack, members: Sequence[RowTable]) -> None:
        self.name = stack.name
        self._members = tuple(members)
        rows = sum(member.shape[0] for member in members)
        self.shape = torch.Size((rows, members[0].shape[1]))
        self._bounds = (*stack.first_rows, rows)
        self._weights = _Joined(self._bounds)
        self._states: dict[str, _Joined] = {}

    @property
    def local(self) -> Tensor:
        """This rank's part, (V', d)."""
        return self._weights.of([_part(member.parameter) for member in self._members], self._move_parameter)

    def _move_parameter(self, k: int, view: Tensor) -> None:
        parameter = self._members[k].parameter
        assert isinstance(parameter, DTensor)
        parameter._local_tensor = view  # the same parameter to everyone who holds it

    def _move_state(self, key: str, k: int, view: Tensor) -> None:
        parameter = self._members[k].parameter
        assert isinstance(parameter, DTensor)
        state = self._members[k].optimizer.state[parameter]
        state[key] = as_shard(view, parameter.shape, parameter.device_mesh)

    @property
    def version(self) -> int:
        """Counts what is written into this rank's part."""
        return sum(member.version for member in self._members)

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient waits for the next update at any of the tables."""
        return any(member.has_gradient for member in self._members)

    def add_gradient(self, ids: Tensor, rows: Tensor) -> None:
        """Keeps a coalesced row gradient, ids (K,), rows (K, d), until the next update: each table its own rows."""
        cuts = torch.searchsorted(ids, torch.tensor(self._bounds, device=ids.device)).tolist()
        for member, (first, last), first_row in zip(self._members, pairwise(cuts), self._bounds, strict=False):
            member.add_gradient(ids[first:last] - first_row, rows[first:last])

    def steps_as_one(self) -> bool:
        """Whether one update of the stack is what the optimizer does to each table: options and steps are the same."""
        group = self._members[0].param_group()
        held = {id(parameter) for parameter in group["params"]}
        if any(id(member.parameter) not in held for member in self._members):
            return False
        steps = [member.made_state(group).get("step") for member in self._members]
        return len({float(step) for step in steps if step is not None}) <= 1

    def begin_step(self) -> Mapping[str, Any]:
        """Counts one iteration of every table; returns the options of this moment."""
        group = self._members[0].param_group()
        for member in self._members:
            member.count_step(group)
        return group

    def apply(self, ids: Tensor, rows: Tensor, options: Mapping[str, Any]) -> None:
        """Updates rows `ids` (K,), sorted and unique, by their gradients (K, d), under the options of their step.

        One step's rows may come in several parts, none in two of them.
        """
        shard, states = self.local, [member.made_state(options) for member in self._members]
        state = dict(states[0])
        for key, value in states[0].items():
            if isinstance(value, DTensor):
                joined = self._states.setdefault(key, _Joined(self._bounds))
                state[key] = joined.of([_part(each[key]) for each in states], partial(self._move_state, key))
        self._members[0].rows.apply(shard, state, ids, rows, options)


class _Joined:
    """One tensor of which the tables' own ones are views.

    Args:
        bounds: first rows of the tables, and the end of the last one.
    """

    def __init__(self, bounds: Sequence[int]) -> None:
        self._bounds = bounds
        self._all: Tensor | None = None
        self._addresses: list[int] = []

    def of(self, parts: Sequence[Tensor], move: Callable[[int, Tensor], None]) -> Tensor:
        """All rows of `parts`, (V', d).

        Args:
            move: (number of a table, view of its rows): puts the view in the place of the table's part.
        """
        if self._all is not None and [part.data_ptr() for part in parts] == self._addresses:
            return self._all
        found = parts[0].new_empty((self._bounds[-1], parts[0].shape[1]))
        views = [found[first:last] for first, last in pairwise(self._bounds)]
        for k, (part, view) in enumerate(zip(parts, views, strict=True)):
            move(k, view.copy_(part))
        self._all, self._addresses = found, [view.data_ptr() for view in views]
        return found


def _part(shard: Tensor) -> Tensor:
    """This rank's part of a shard, without a view of it: `to_local` of each of many tables takes longer than their
    lookup."""
    assert isinstance(shard, DTensor)
    return shard._local_tensor
