"""Optimizer state of a sharded table: parts for whoever reads it, plain tensors for the runtime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from embrace_fx.runtime.tables.held import Held
from embrace_fx.runtime.tables.part import Part, own_part_of, whole
from embrace_fx.runtime.tables.part_layout import Layout


def state_of(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Any]:
    """Returns an optimizer's state of one table, its parts as plain tensors of this rank's, (V', d)."""
    kept = optimizer.state.get(parameter) or {}
    found, shape = dict(kept), None
    for key, value in found.items():
        if isinstance(value, Tensor) and value.dim() and not isinstance(value, Part):
            shape = shape or parameter.shape
            if value.shape == shape and isinstance(parameter, Part):
                value = kept[key] = as_state(parameter, value)  # whole: the user's own
        if isinstance(value, Part):
            found[key] = value.held.memory()
    return found


def keep_state(optimizer: Optimizer, parameter: nn.Parameter, state: Mapping[str, Any]) -> None:
    """Keeps values of it, as `state_of` has them."""
    kept = optimizer.state[parameter] if state else {}
    for key, value in state.items():
        known = kept.get(key)
        if isinstance(known, Part) and isinstance(value, Tensor) and value.shape == known.held.shape:
            if known.held.memory() is not value:
                known.held.replace(value)
        else:
            kept[key] = as_state(parameter, value)


def as_state(parameter: nn.Parameter, value: Any) -> Any:
    """A value of an optimizer's state: a part, where it has an element for each of the table's, or of this rank's."""
    if not isinstance(parameter, Part) or isinstance(value, Part) or not isinstance(value, Tensor):
        return value
    if value.dim() and value.shape == parameter.shape != parameter.held.shape:
        value = parameter.spread.cut(value).clone()
    if not value.dim() or value.shape != parameter.held.shape:
        return value
    return Part(Held(value), parameter.spread, "the optimizer's state of ")


def own_state(parameter: nn.Parameter, layout: Layout, state: Mapping[str, Any]) -> dict[str, Any]:
    """Cuts this rank's part out of an optimizer's state of a table. Collective as `own_part_of` is."""
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    return {**state, **{key: as_state(parameter, own_part_of(v, layout)) for key, v in tensors.items()}}


def whole_state_of(parameter: nn.Parameter, state: Mapping[str, Any]) -> dict[str, Any]:
    """Puts an optimizer's state of a table together. Collective."""
    return {key: whole(as_state(parameter, value)) for key, value in state.items()}
