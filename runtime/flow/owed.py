"""Gradients in flight and updates still to be applied, of a bucket or a table.

    in flight  a backward has sent the gradients; `.grad` stands in for them
    stepped    an optimizer has taken them; the update waits for the next forward, under the options of that moment
    applied    nothing is owed

Code that is about to read or change parameters or gradients calls `wait`, `apply` or `drop`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod


class PendingUpdate(ABC):
    """The pending work of one bucket or table: a gradient in flight, or an optimizer update that is not applied yet."""

    @property
    @abstractmethod
    def waiting(self) -> bool:
        """Whether there are in-flight gradients that no optimizer step has used yet."""

    @abstractmethod
    def wait(self) -> None:
        """Waits for in-flight gradients that no optimizer step has used yet."""

    @abstractmethod
    def apply(self) -> None:
        """Applies the update of an optimizer step that was deferred to the next forward, if there is one."""

    @abstractmethod
    def drop(self) -> None:
        """Drops in-flight gradients that no optimizer step has used yet."""
