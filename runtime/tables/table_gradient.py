"""The `.grad` of a table's members, which one backward delivers together."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from sys import getrefcount
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from embrace_fx.runtime.tables.gradient_storage import GradientStorage
from embrace_fx.runtime.tables.local_storage import GradientFuture, Rows
from embrace_fx.runtime.tables.table_shard import TableShard

if TYPE_CHECKING:
    from embrace_fx.runtime.tables.member import Member


class TableGradient:
    """The `.grad` objects of a table's members, which one backward delivers together and a later one may reuse.

    Attributes:
        holds: whether memory of the last gradients is still held.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = members
        # The gradient objects that the last backward has given to members.
        self._given: list[tuple[Member, nn.Parameter, TableShard, GradientStorage]] = []
        self._late: GradientFuture[Sequence[Rows]] | None = None  # the future of the last backward
        self._rows: Rows | None = None
        self.holds = False

    def deliver(
        self,
        late: GradientFuture[Sequence[Rows]],
        absent: Collection[str] = (),
        rows: Rows | None = None,
        *,
        unreduced: bool = False,
    ) -> None:
        """Makes each member's `.grad` the gradient of a future, or adds it to an existing `.grad`.

        Args:
            absent: names of members without a gradient.
            rows: ids (K,) and rows (K, d) of all members, if they have arrived.
            unreduced: whether the gradients are this rank's own sums.
        """
        if not absent and self._are_free():
            for k, (_, parameter, part, held) in enumerate(self._given):
                held.late, held.unreduced = (late, k), unreduced
                parameter.grad = part
        else:
            for k, member in enumerate(self._members):
                if member.name not in absent:
                    member.add_late_gradient(late, k, unreduced=unreduced)
            self._given = self._slots(late)
        self._late, self._rows, self.holds = (late, rows, True) if self._given else (None, None, False)

    def _slots(
        self, late: GradientFuture[Sequence[Rows]]
    ) -> list[tuple[Member, nn.Parameter, TableShard, GradientStorage]]:
        """Returns the gradient objects for reuse in later backwards, if each holds only this gradient; else an empty
        list.
        """
        found = []
        for member in self._members:
            part = member.parameter.grad
            held = part.held if isinstance(part, TableShard) else None
            if not isinstance(part, TableShard) or not isinstance(held, GradientStorage) or not held.waits_for(late):
                return []
            found.append((member, member.parameter, part, held))
        return found

    def _are_free(self) -> bool:
        """Returns whether the last backward's gradient objects can be reused: dropped, unread and not referenced."""
        late, (alone, of_gradient) = self._late, _ALONE
        for member, parameter, part, held in self._given:
            if member.parameter is not parameter or parameter.grad is not None:
                return False
            if held.late is None or held.late[0] is not late or part._use_count() != 1:  # type: ignore[attr-defined]
                return False
            if getrefcount(part) != alone or getrefcount(held) != of_gradient:
                return False
        return bool(self._given)

    def give_back(self) -> None:
        """Frees the memory of gradients that the loop has dropped."""
        if self._are_free():
            self._late, self._rows, self.holds = GradientFuture(tuple), None, False
            for k, (_, _, _, held) in enumerate(self._given):
                held.late = self._late, k

    def count_in_flight(self, late: GradientFuture[Sequence[Rows]]) -> int:
        """Returns how many members' `.grad` is still in flight in this future."""
        if late is self._late and self._given:
            for member, parameter, part, held in self._given:
                is_same = member.parameter is parameter and parameter.grad is part
                if not is_same or held.late is None or held.late[0] is not late:
                    break
            else:
                return len(self._members)
        return sum([member.waits_for(late) for member in self._members])

    def rows(self) -> Rows | None:
        """Returns the row gradient of all members, or None if the loop has replaced or changed a `.grad`."""
        if self._rows is None or self._late is None or self.count_in_flight(self._late) < len(self._members):
            self._rows = None
        return self._rows


def _references() -> tuple[int, int]:
    """Returns the reference counts of a gradient and its storage that mean that no other code refers to them."""
    made: Any = torch.empty(0, device="cpu")
    made.held = object()
    given = [(None, None, made, made.held)]
    del made
    for _, _, part, held in given:
        return getrefcount(part), getrefcount(held)
    raise AssertionError


_ALONE = _references()
