"""The state of an optimizer an update of which is still to come: whoever looks at it finds the update done."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from embrace_fx.vocabulary.forwarding import forward

_LOOKS = (
    *(
        "__getitem__",
        "__setitem__",
        "__delitem__",
        "__contains__",
        "__iter__",
        "__len__",
        "__eq__",
        "__ne__",
        "__repr__",
    ),
    *("__reversed__", "__or__", "__ror__", "__ior__", "keys", "values", "items", "get", "pop", "popitem", "setdefault"),
    *("update", "clear", "copy"),
)


class PendingState(defaultdict[Any, Any]):
    """Stands in for `optimizer.state` while updates are pending, and applies them when it is read.

    Args:
        optimizer: whose it is.
        apply: applies what is pending.
    """

    def __init__(self, optimizer: Optimizer, apply: Callable[[], None]) -> None:
        super().__init__(dict)
        self.optimizer = optimizer
        self.real: Any = optimizer.state
        self._apply = apply
        optimizer.state = self

    def now(self) -> Any:
        """Returns the state, with every update in it."""
        self._apply()
        return self.real

    def leave(self) -> None:
        """Gives the state its place back. Where another one has been put there since, it is for steps to come."""
        if self.optimizer.state is self:
            self.optimizer.state = self.real
            return
        other, self.optimizer.state = self.optimizer.state, self.real
        self._apply()
        self.optimizer.state = other

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.now(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.now().__reduce_ex__(protocol)


forward(PendingState, _LOOKS, lambda state, _: state.now())
