"""Optimizer state with pending updates: the first read applies them."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from embrace_fx.vocabulary.proxies import forward_methods

_LOOKS = [name for name in vars(dict) if name not in ("__new__", "__init__", "__getattribute__", "__hash__", "__doc__")]


class PendingState(defaultdict[Any, Any]):
    """Stands in for `optimizer.state` while updates are pending. The first read applies them by `apply`."""

    def __init__(self, optimizer: Optimizer, apply: Callable[[], None]) -> None:
        super().__init__(dict)
        self.optimizer = optimizer
        self.real: Any = optimizer.state
        self._apply = apply
        optimizer.state = self

    def apply_and_get(self) -> Any:
        """Applies the pending updates, and returns the optimizer's own state."""
        self._apply()
        return self.real

    def restore(self) -> None:
        """Puts the optimizer's own state back, or applies the updates and keeps a state that the user has assigned."""
        if self.optimizer.state is self:
            self.optimizer.state = self.real
            return
        other, self.optimizer.state = self.optimizer.state, self.real
        self._apply()
        self.optimizer.state = other

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.apply_and_get(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.apply_and_get().__reduce_ex__(protocol)


forward_methods(PendingState, _LOOKS, lambda state, _: state.apply_and_get())
