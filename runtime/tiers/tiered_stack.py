"""Tables beyond memory, below each other as one: one exchange, one update, one working set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from embrace_fx.runtime.tables.stacks import StackedTable
from embrace_fx.runtime.tables.update_rule import UpdateRule
from embrace_fx.runtime.tiers.histories import Histories, TogetherHistories
from embrace_fx.runtime.tiers.tiered_table import InSlots, TieredTable
from embrace_fx.vocabulary.plan import Stack


def rest_together(tables: Sequence[TieredTable]) -> None:
    """Has the tables of a stack, in one working set, keep what their rows skip together."""
    TogetherHistories(tables[0].memory, {each.rows.start: each.histories for each in tables})


class TieredStack(InSlots, StackedTable):
    """Tables beyond memory that travel together; ids are rows of the stack.

    Args:
        members: in one working set, in the order of the stack.
    """

    members: tuple[TieredTable, ...]

    def __init__(self, stack: Stack, members: Sequence[TieredTable]) -> None:
        super().__init__(stack, members)
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
