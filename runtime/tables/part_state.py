"""What an optimizer keeps of a sharded table: parts, to whoever reads its state, and plain tensors to the runtime."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from embrace_fx.runtime.tables.held import Held
from embrace_fx.runtime.tables.part import Part
from embrace_fx.runtime.tables.table_part import TablePart


class PartState(MutableMapping[str, Any]):
    """An optimizer's state of one table: its parts are read and written as plain tensors of this rank's, (V', d)."""

    def __init__(self, optimizer: Optimizer, parameter: nn.Parameter) -> None:
        self._optimizer, self._parameter = optimizer, parameter

    @property
    def _kept(self) -> dict[str, Any]:
        found: dict[str, Any] = self._optimizer.state.get(self._parameter, {})
        return found

    def __getitem__(self, key: str) -> Any:
        value = self._kept[key]
        return value.held.memory() if isinstance(value, Part) else value

    def __setitem__(self, key: str, value: Any) -> None:
        kept = self._optimizer.state[self._parameter]
        known = kept.get(key)
        if isinstance(known, Part) and isinstance(value, Tensor) and value.shape == known.held.shape:
            if known.held.memory() is not value:
                known.held.replace(value)
        else:
            kept[key] = as_state(self._parameter, value)

    def __delitem__(self, key: str) -> None:
        del self._kept[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)


def as_state(parameter: nn.Parameter, value: Any) -> Any:
    """A value of an optimizer's state: a part, where it has an element for each of this rank's part of the table."""
    if not isinstance(parameter, Part) or isinstance(value, Part) or not isinstance(value, Tensor):
        return value
    if not value.dim() or value.shape != parameter.held.shape:
        return value
    return TablePart(Held(value), parameter.spread, parameter.origin.of("the optimizer's state of "))
