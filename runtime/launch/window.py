"""A window of launches: from the head of one backward to that of the next."""

from __future__ import annotations

from collections.abc import Sequence

from embrace_fx.runtime.launch.ticket import Ticket
from embrace_fx.vocabulary.operation_id import OperationId


class LaunchWindow:
    """The launches of one window, in their order.

    Attributes:
        held: no launch leaves yet.
        dropped: no launch will leave.
    """

    def __init__(self, order: tuple[OperationId, ...], number: int = 0, *, held: bool = False) -> None:
        self.held = held
        self.dropped = False
        self.order = order
        self._passed = 0  # number of launches at the head of the order that are launched or will not come
        self.number = number
        self.waiting: dict[OperationId, Ticket] = {}  # submitted, not launched
        self.expected = set(order)  # not submitted yet, but may be
        self.in_forward = False

    def to_come(self) -> Sequence[OperationId]:
        """Returns the launches of the order from the first one on that may still be launched."""
        order, waiting, expected = self.order, self.waiting, self.expected
        while self._passed < len(order) and order[self._passed] not in waiting and order[self._passed] not in expected:
            self._passed += 1
        return order[self._passed :]

    def drop(self) -> None:
        """Drops all launches of the window."""
        self.dropped = True
        for ticket in self.waiting.values():
            ticket.drop()
        self.waiting.clear()
