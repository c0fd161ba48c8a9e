"""Keeps track of the optimizers that update a model's parameters, and of how they treat table rows without a
gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from embrace_fx.runtime.tables.history import deferred_steps_class
from embrace_fx.runtime.tables.update_rule import dense_update_policy
from embrace_fx.vocabulary.exactness import DenseUpdatePolicy, RowUpdates


class KnownOptimizers:
    """The optimizers known to update a model's parameters, in the order of registration. Holds weak references.

    Attributes:
        on_new: called with each new optimizer.
    """

    def __init__(self) -> None:
        self.on_new: Callable[[Optimizer], None] = lambda optimizer: None
        self._known: list[weakref.ref[Optimizer]] = []

    @property
    def optimizers(self) -> list[Optimizer]:
        """The known optimizers that still exist."""
        return [optimizer for known in self._known if (optimizer := known()) is not None]

    def has(self, optimizer: Optimizer) -> bool:
        """Returns whether an optimizer has been registered."""
        return weakref.ref(optimizer) in self._known

    def add(self, optimizer: Optimizer) -> bool:
        """Registers an optimizer. Returns False if it was registered before."""
        if self.has(optimizer):
            return False
        self._known.append(weakref.ref(optimizer))
        self.on_new(optimizer)
        return True

    def find(self, parameter: Tensor) -> list[tuple[Optimizer, Mapping[str, Any]]]:
        """Returns (optimizer, param group) for each optimizer that updates a parameter."""
        return [
            (optimizer, group)
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            if any(p is parameter for p in group["params"])
        ]

    def dense_update_policy(self, parameter: Tensor, row_updates: RowUpdates) -> DenseUpdatePolicy:
        """Returns how a table's optimizer updates rows that have no gradient under the user's option `row_updates`. If
        no optimizer is registered for the table, or several are, assumes one that changes all rows, unless the option
        is "lazy".
        """
        held = self.find(parameter)
        if len(held) == 1:
            (optimizer, group) = held[0]
            return dense_update_policy(type(optimizer), group, row_updates, parameter.dtype)
        if row_updates == "lazy":
            return ""
        can_rest = all(deferred_steps_class(type(each), group, parameter.dtype) is not None for each, group in held)
        return "either" if can_rest else "sweep"
