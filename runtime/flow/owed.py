"""What is owed to the parameters of one unit: a bucket, a table, or a row space.

    in flight  a backward has sent the gradients; `.grad` stands in for them
    stepped    an optimizer has taken them; the update waits for the next forward, under the options of that moment
    applied    nothing is owed

Code that is about to read or change parameters or gradients calls `wait`, `apply` or `drop`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod


class PendingUpdate(ABC):
    """The gradient in flight, or the update to apply, of one unit (a bucket, a table or a row space), for one backward
    at a time.
    """

    @property
    @abstractmethod
    def waiting(self) -> bool:
        """Returns whether gradients are in flight that no step has taken."""

    @abstractmethod
    def wait(self) -> None:
        """Waits for gradients that no step has taken, which become ordinary ones."""

    @abstractmethod
    def apply(self) -> None:
        """Applies the update that a step has left."""

    @abstractmethod
    def drop(self) -> None:
        """Forgets gradients that no step has taken."""
