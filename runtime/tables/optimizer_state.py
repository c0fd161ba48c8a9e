"""What optimizers keep of sharded tables: parts for whoever reads it, plain tensors for the runtime; and state dicts.

Contract
    State that is loaded may come whole or in parts; a rank keeps its part of a sharded table's, and of others all of
    it.
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
    """Returns a value of a table's optimizer state as users see it.

    A tensor with one element per element of the table, or of this rank's shard, becomes a `Part`; any other value is
    returned as it is.
    """
    if not isinstance(parameter, Part) or isinstance(value, Part) or not isinstance(value, Tensor):
        return value
    if value.dim() and value.shape == parameter.shape != parameter.held.shape:
        value = parameter.spread.cut(value).clone()
    if not value.dim() or value.shape != parameter.held.shape:
        return value
    return Part(LocalStorage(value), parameter.spread, "the optimizer's state of ")


def own_state(parameter: nn.Parameter, layout: Layout, state: Mapping[str, Any]) -> dict[str, Any]:
    """Cuts this rank's part out of an optimizer's state of a table. Collective as `own_part_of` is."""
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    return {**state, **{key: as_state(parameter, own_part_of(v, layout)) for key, v in tensors.items()}}


def whole_state_of(parameter: nn.Parameter, state: Mapping[str, Any]) -> dict[str, Any]:
    """Puts an optimizer's state of a table together. Collective."""
    return {key: whole(as_state(parameter, value)) for key, value in state.items()}


# -- state dicts -------------------------------------------------------------------------------------------------------


def show_state(
    optimizer: Optimizer, state_dict: dict[str, Any], model: ModelState, communicator: Communicator
) -> dict[str, Any]:
    """Returns the tables' state in parts by columns. Collective where a table lies on a grid."""
    shown = dict(state_dict["state"])
    tables = {table.parameter: table for table in model.tables.values()}
    for key, parameter in _numbered(optimizer, state_dict):
        table = tables.get(parameter)
        if table is not None and table.no_dense:
            raise RuntimeError(table.no_dense)
        if key not in shown or table is None or table.layout.mesh is None:
            continue
        with communicator.watching():
            state = {name: as_state(parameter, value) for name, value in shown[key].items()}
            shown[key] = {name: as_shown(v) if isinstance(v, Part) else v for name, v in state.items()}
    return {**state_dict, "state": shown}


def own_parts(
    optimizer: Optimizer, state_dict: dict[str, Any], model: ModelState, communicator: Communicator
) -> dict[str, Any]:
    """Cuts this rank's parts out of a state dict, whole or in parts. Collective where these are of other columns."""
    loaded = dict(state_dict["state"])
    with communicator.watching():
        for key, parameter in _numbered(optimizer, state_dict):
            own = own_state_of(parameter, loaded.get(key, {}), model)
            if key in loaded:
                loaded[key] = own
    return {**state_dict, "state": loaded}


def own_state_of(parameter: nn.Parameter, state: dict[str, Any], model: ModelState) -> dict[str, Any]:
    """State of a parameter as it is here: this rank's part of a sharded table's, and of others all of it. Collective as
    `own_parts` is."""
    table = next((table for table in model.tables.values() if table.parameter is parameter), None)
    if table is not None and table.no_dense:
        raise RuntimeError(table.no_dense)
    if table is not None:
        return own_state(parameter, table.layout, state)
    return {key: whole(value) for key, value in state.items()}


def _numbered(optimizer: Optimizer, state_dict: dict[str, Any]) -> list[tuple[int, nn.Parameter]]:
    """Pairs an optimizer's parameters with their numbers in a state dict."""
    numbers = [key for group in state_dict["param_groups"] for key in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return list(zip(numbers, parameters, strict=False))
