"""Tables beyond memory, below each other as one: one exchange, one update, one working set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from embrace_fx.runtime.tables.joined_table import JoinedTable
from embrace_fx.runtime.tables.row_table import RowTable
from embrace_fx.runtime.tables.update_rule import RowsAlone
from embrace_fx.runtime.tiers.slot_history import SlotHistory
from embrace_fx.runtime.tiers.tiered_table import InSlots, TieredTable
from embrace_fx.vocabulary.row_space import RowSpace


def joined(space: RowSpace, tables: Sequence[RowTable]) -> JoinedTable:
    """Makes one table of those of a row space, all of which are in memory, or beyond it."""
    beyond = [table for table in tables if isinstance(table, TieredTable)]
    return JoinedTiers(space, beyond) if beyond else JoinedTable(space, tables)


class JoinedTiers(InSlots, JoinedTable):
    """Tables beyond memory that travel together; ids are rows of the space.

    Args:
        members: in one working set, in the order of the space.
    """

    members: tuple[TieredTable, ...]

    def __init__(self, space: RowSpace, members: Sequence[TieredTable]) -> None:
        self.memory = members[0].memory
        super().__init__(space, members)

    def _make_history(self) -> SlotHistory:
        return SlotHistory(self, self.memory, range(self.memory.num_rows), [each.history for each in self.members])

    def is_one(self) -> bool:
        return super().is_one() and all(each.shown == self.members[0].shown for each in self.members)

    @property
    def state(self) -> dict[str, Any]:
        return dict(self.members[0].state)

    def begin_step(self) -> RowsAlone:
        for each in self.members:
            each.count_step()
        return super().begin_step()
