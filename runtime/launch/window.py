"""A window of launches: from the head of one backward to that of the next."""

from __future__ import annotations

from collections.abc import Sequence

from embrace_fx.runtime.launch.ticket import Ticket
from embrace_fx.vocabulary.operation_id import OperationId


class LaunchWindow:
    """The launches of one window: what has been submitted, by its place in the order.

    Attributes:
        held: nothing of it leaves yet.
        dropped: nothing of it will.
    """

    def __init__(self, order: tuple[OperationId, ...], number: int = 0, *, held: bool = False) -> None:
        self.held = held
        self.dropped = False
        self.order = order
        self._passed = 0  # of them, the first so many, that have been launched or are not coming
        self.number = number
        self.waiting: dict[OperationId, Ticket] = {}  # submitted, and not launched
        self.expected = set(order)  # may still be submitted
        self.in_forward = False

    def to_come(self) -> Sequence[OperationId]:
        """The launches from the first one on that has not been launched, and may still be."""
        order, waiting, expected = self.order, self.waiting, self.expected
        while self._passed < len(order) and order[self._passed] not in waiting and order[self._passed] not in expected:
            self._passed += 1
        return order[self._passed :]

    def drop(self) -> None:
        """Has nothing of it leave."""
        self.dropped = True
        for ticket in self.waiting.values():
            ticket.drop()
        self.waiting.clear()
