"""Optimizer state of sharded tables: parts for users, plain tensors for the runtime, and state dicts.

Contract
    State to load may be whole or in parts. A rank keeps its part of a sharded table's state, and all of other state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from embrace_fx.runtime.tables.local_storage import LocalStorage
from embrace_fx.runtime.tables.part import Part, own_part_of, whole
from embrace_fx.runtime.tables.part_layout import Layout
from embrace_fx.runtime.tables.state_dicts import as_shown

if TYPE_CHECKING:
    from embrace_fx.runtime.ranks.communicator import Communicator
    from embrace_fx.runtime.tables.model_state import ModelState


def state_of(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Any]:
    """Returns an optimizer's state of a table, with this rank's parts as plain tensors (V', d)."""
    kept = optimizer.state.get(parameter) or {}
    found, shape = dict(kept), None
    for key, value in found.items():
        if isinstance(value, Tensor) and value.dim() and not isinstance(value, Part):
            shape = shape or parameter.shape
            if value.shape == shape and isinstance(parameter, Part):
                value = kept[key] = as_state(parameter, value)  # a whole tensor from the user
        if isinstance(value, Part):
            found[key] = value.held.memory()
    return found


def keep_state(optimizer: Optimizer, parameter: nn.Parameter, state: Mapping[str, Any]) -> None:
    """Stores values, in the form that `state_of` returns, in an optimizer's state."""
    kept = optimizer.state[parameter] if state else {}
    for key, value in state.items():
        known = kept.get(key)
        if isinstance(known, Part) and isinstance(value, Tensor) and value.shape == known.held.shape:
            if known.held.memory() is not value:
                known.held.replace(value)
        else:
            kept[key] = as_state(parameter, value)


def as_state(parameter: nn.Parameter, value: Any) -> Any:
    """Converts a value to the form that users find in the optimizer's state.

    A tensor with one element per element of the table, or of this rank's part, becomes a `Part`. Other values are
    returned unchanged.
    """
    if not isinstance(parameter, Part) or isinstance(value, Part) or not isinstance(value, Tensor):
        return value
    if value.dim() and value.shape == parameter.shape != parameter.held.shape:
        value = parameter.spread.cut(value).clone()
    if not value.dim() or value.shape != parameter.held.shape:
        return value
    return Part(LocalStorage(value), parameter.spread, "the optimizer's state of ")


def own_state(parameter: nn.Parameter, layout: Layout, state: Mapping[str, Any]) -> dict[str, Any]:
    """Cuts this rank's part out of an optimizer's state of a table. Collective like `own_part_of`."""
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    return {**state, **{key: as_state(parameter, own_part_of(v, layout)) for key, v in tensors.items()}}


def whole_state_of(parameter: nn.Parameter, state: Mapping[str, Any]) -> dict[str, Any]:
    """Gathers an optimizer's state of a table. Collective."""
    return {key: whole(as_state(parameter, value)) for key, value in state.items()}


# -- state dicts -------------------------------------------------------------------------------------------------------


def show_state(
    optimizer: Optimizer, state_dict: dict[str, Any], model: ModelState, communicator: Communicator
) -> dict[str, Any]:
    """Shows the state of tables as parts by columns. Collective if a table lies on a grid."""
    shown = dict(state_dict["state"])
    tables = {table.parameter: table for table in model.tables.values()}
    for key, parameter in _numbered(optimizer, state_dict):
        table = tables.get(parameter)
        if table is not None and table.store.refusal:
            raise RuntimeError(table.store.refusal)
        if key not in shown or table is None or table.layout.mesh is None:
            continue
        with communicator.watching():
            state = {name: as_state(parameter, value) for name, value in shown[key].items()}
            shown[key] = {name: as_shown(v) if isinstance(v, Part) else v for name, v in state.items()}
    return {**state_dict, "state": shown}


def own_parts(
    optimizer: Optimizer, state_dict: dict[str, Any], model: ModelState, communicator: Communicator
) -> dict[str, Any]:
    """Cuts this rank's parts out of a state dict, whole or in parts. Collective if its parts have other columns."""
    loaded = dict(state_dict["state"])
    with communicator.watching():
        for key, parameter in _numbered(optimizer, state_dict):
            own = own_state_of(parameter, loaded.get(key, {}), model)
            if key in loaded:
                loaded[key] = own
    return {**state_dict, "state": loaded}


def own_state_of(parameter: nn.Parameter, state: dict[str, Any], model: ModelState) -> dict[str, Any]:
    """Converts loaded state of a parameter to this rank's: a part for a sharded table, else all. Collective like
    `own_parts`.
    """
    table = next((table for table in model.tables.values() if table.parameter is parameter), None)
    if table is not None and table.store.refusal:
        raise RuntimeError(table.store.refusal)
    if table is not None:
        return own_state(parameter, table.layout, state)
    return {key: whole(value) for key, value in state.items()}


def _numbered(optimizer: Optimizer, state_dict: dict[str, Any]) -> list[tuple[int, nn.Parameter]]:
    """Returns an optimizer's parameters with their indices in a state dict."""
    numbers = [key for group in state_dict["param_groups"] for key in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return list(zip(numbers, parameters, strict=False))
