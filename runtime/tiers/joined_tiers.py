"""Tables beyond memory, below each other as one: one exchange, one update, one working set; others share the exchange.

Shape legend: V' rows of the space, d columns that this rank owns; K rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from embrace_fx.runtime.tables.held import Rows
from embrace_fx.runtime.tables.joined_table import JoinedTable
from embrace_fx.runtime.tables.own_step import same_options
from embrace_fx.runtime.tables.row_table import RowTable
from embrace_fx.runtime.tables.update_rule import OfMembers, Options, UpdateRule
from embrace_fx.runtime.tiers.histories import Histories, TogetherHistories
from embrace_fx.runtime.tiers.tiered_table import InSlots, TieredTable
from embrace_fx.vocabulary.row_space import RowSpace


def stacked(tables: Sequence[RowTable]) -> JoinedTable:
    """Makes one table of those of a row space, of which those beyond memory come first."""
    beyond = [table for table in tables if isinstance(table, TieredTable)]
    others = tables[len(beyond) :]
    space = RowSpace.of({table.name: table.shape[0] for table in tables})
    if beyond and others:
        return MixedTable(space, (stacked(beyond), stacked(others)))
    return JoinedTiers(space, beyond) if beyond else JoinedTable(space, tables)


def rest_together(tables: Sequence[TieredTable]) -> None:
    """Has the tables of a row space, in one working set, keep what their rows skip together."""
    TogetherHistories(tables[0].memory, {each.rows.start: each.histories for each in tables})


class JoinedTiers(InSlots, JoinedTable):
    """Tables beyond memory that travel together; ids are rows of the space.

    Args:
        members: in one working set, in the order of the space.
    """

    members: tuple[TieredTable, ...]

    def __init__(self, space: RowSpace, members: Sequence[TieredTable]) -> None:
        super().__init__(space, members)
        self.memory = members[0].memory
        together = members[0].histories.together
        assert together is not None
        self.histories = together

    def _is_one(self) -> bool:
        return super()._is_one() and all(each.shown == self.members[0].shown for each in self.members)

    @property
    def _together(self) -> Histories:
        return self.histories

    def _rest_together(self) -> Histories:
        return self.histories

    @property
    def has_resting_rows(self) -> bool:
        return self.histories.rest

    @property
    def state(self) -> dict[str, Any]:
        return dict(self.members[0].state)

    def begin_step(self) -> UpdateRule:
        for each in self.members:
            each.count_step()
        return super().begin_step()


class MixedTable(JoinedTable):
    """Tables that travel together, of which the first ones are beyond memory, and the others in it.

    Rows of both are in the same messages; each part looks its own up, and takes its own step.

    Args:
        parts: those beyond memory and the others. A part of one table is a row space, too: its rows rest as in one.
    """

    def __init__(self, space: RowSpace, parts: tuple[JoinedTable, JoinedTable]) -> None:
        beyond, others = self._parts = parts
        super().__init__(space, [*beyond.members, *others.members])
        self._first = beyond.shape[0]  # row of the others

    @property
    def local(self) -> Tensor:
        """Rows of the part beyond memory, which are as wide as the others and of the same dtype."""
        return self._parts[0].local

    @property
    def joined(self) -> tuple[Tensor, ...]:
        return self._parts[1].joined

    def can_wait(self) -> bool:
        return all(part.can_wait() for part in self._parts)

    def begin_step(self) -> UpdateRule:
        return OfMembers(self._by_part, [part.begin_step() for part in self._parts])

    def look_up(self, ids: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return self._gathered(ids, lambda part, own, _: part.look_up(own, dtype))

    def as_they_are(self, ids: Tensor) -> Tensor:
        return self._gathered(ids, lambda part, own, _: part.as_they_are(own))

    def preview(self, ids: Tensor, rows: Tensor) -> tuple[Tensor, Options | None]:
        if not self.members[0].rule.moves_all:
            return rows, None
        supposed: list[Options | None] = []

        def moved(part: JoinedTable, own: Tensor, at: Tensor) -> Tensor:
            found, options = part.preview(own, rows.index_select(0, at))
            supposed.append(options)
            return found

        found, (one, other) = self._gathered(ids, moved), supposed
        return (rows, None) if one is None or other is None or not same_options(one, other) else (found, one)

    def _gathered(self, ids: Tensor, ask: Callable[[JoinedTable, Tensor, Tensor], Tensor]) -> Tensor:
        """Puts together (K, d) what each part answers to its own of ids (K,), and to their places among them."""
        is_beyond = ids < self._first
        beyond, others = is_beyond.nonzero().view(-1), is_beyond.logical_not_().nonzero().view(-1)
        first = ask(self._parts[0], ids.index_select(0, beyond), beyond)
        second = ask(self._parts[1], ids.index_select(0, others) - self._first, others)
        found = first.new_empty((len(ids), first.shape[1]))
        return found.index_copy_(0, beyond, first).index_copy_(0, others, second)

    def _by_part(self, ids: Tensor, rows: Tensor) -> list[Rows]:
        """Splits rows (K, d) of the space, whose ids (K,) are sorted."""
        cut = int(torch.searchsorted(ids, self._first))
        return [(ids[:cut], rows[:cut]), (ids[cut:] - self._first, rows[cut:])]
