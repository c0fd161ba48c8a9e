"""Converts optimizer state of sharded tables: to shards for users, to plain tensors for the runtime, and for state
dicts.

Contract
    State to load may be whole or in parts. A rank keeps its part of a sharded table's state, and all of other state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from embrace_fx.runtime.tables.local_storage import LocalStorage
from embrace_fx.runtime.tables.shard_layout import Layout
from embrace_fx.runtime.tables.state_dicts import to_state_dict_form
from embrace_fx.runtime.tables.table_shard import TableShard, cut_own_shard, gather_whole

if TYPE_CHECKING:
    from embrace_fx.runtime.ranks.communicator import Communicator
    from embrace_fx.runtime.tables.model_state import ModelState


def read_state(optimizer: Optimizer, parameter: nn.Parameter) -> dict[str, Any]:
    """Returns an optimizer's state of a table, with this rank's shards (V', d) as plain tensors."""
    kept = optimizer.state.get(parameter) or {}
    found, shape = dict(kept), None
    for key, value in found.items():
        if isinstance(value, Tensor) and value.dim() and not isinstance(value, TableShard):
            shape = shape or parameter.shape
            if value.shape == shape and isinstance(parameter, TableShard):
                value = kept[key] = to_user_state(parameter, value)  # the user has stored a whole tensor
        if isinstance(value, TableShard):
            found[key] = value.held.memory()
    return found


def write_state(optimizer: Optimizer, parameter: nn.Parameter, state: Mapping[str, Any]) -> None:
    """Stores a table's optimizer state, with this rank's shards as plain tensors, in `optimizer.state`."""
    kept = optimizer.state[parameter] if state else {}
    for key, value in state.items():
        known = kept.get(key)
        if isinstance(known, TableShard) and isinstance(value, Tensor) and value.shape == known.held.shape:
            if known.held.memory() is not value:
                known.held.replace(value)
        else:
            kept[key] = to_user_state(parameter, value)


def to_user_state(parameter: nn.Parameter, value: Any) -> Any:
    """Returns the value that users see in `optimizer.state`: a `TableShard` for a tensor with the shape of the table or
    of this rank's shard, other values unchanged.
    """
    if not isinstance(parameter, TableShard) or isinstance(value, TableShard) or not isinstance(value, Tensor):
        return value
    if value.dim() and value.shape == parameter.shape != parameter.held.shape:
        value = parameter.spread.cut(value).clone()
    if not value.dim() or value.shape != parameter.held.shape:
        return value
    return TableShard(LocalStorage(value), parameter.spread, "the optimizer's state of ")


def cut_own_state(parameter: nn.Parameter, layout: Layout, state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a table's optimizer state with this rank's shards of the tensors that have the table's shape. Collective
    if such a tensor is sharded in another layout than `layout`.
    """
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    return {**state, **{key: to_user_state(parameter, cut_own_shard(v, layout)) for key, v in tensors.items()}}


def gather_state(parameter: nn.Parameter, state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a table's optimizer state with whole tensors, gathered from all ranks. Collective."""
    return {key: gather_whole(to_user_state(parameter, value)) for key, value in state.items()}


# -- state dicts -------------------------------------------------------------------------------------------------------


def state_dict_with_shards(
    optimizer: Optimizer, state_dict: dict[str, Any], model: ModelState, communicator: Communicator
) -> dict[str, Any]:
    """Returns an optimizer's state dict in which the state of sharded tables is sharded by columns. Collective if a
    table is sharded by rows and columns.
    """
    shown = dict(state_dict["state"])
    tables = {table.parameter: table for table in model.tables.values()}
    for key, parameter in _numbered_parameters(optimizer, state_dict):
        table = tables.get(parameter)
        if table is not None and table.store.refusal:
            raise RuntimeError(table.store.refusal)
        if key not in shown or table is None or table.layout.mesh is None:
            continue
        with communicator.watching():
            state = {name: to_user_state(parameter, value) for name, value in shown[key].items()}
            shown[key] = {name: to_state_dict_form(v) if isinstance(v, TableShard) else v for name, v in state.items()}
    return {**state_dict, "state": shown}


def state_dict_to_load(
    optimizer: Optimizer, state_dict: dict[str, Any], model: ModelState, communicator: Communicator
) -> dict[str, Any]:
    """Returns an optimizer's state dict in which the state of sharded tables is reduced to this rank's shards.
    Collective if ranks must exchange shards.
    """
    loaded = dict(state_dict["state"])
    with communicator.watching():
        for key, parameter in _numbered_parameters(optimizer, state_dict):
            own = convert_loaded_state(parameter, loaded.get(key, {}), model)
            if key in loaded:
                loaded[key] = own
    return {**state_dict, "state": loaded}


def convert_loaded_state(parameter: nn.Parameter, state: dict[str, Any], model: ModelState) -> dict[str, Any]:
    """Returns a parameter's loaded optimizer state as this rank stores it. Collective if ranks must exchange shards."""
    table = next((table for table in model.tables.values() if table.parameter is parameter), None)
    if table is not None and table.store.refusal:
        raise RuntimeError(table.store.refusal)
    if table is not None:
        return cut_own_state(parameter, table.layout, state)
    return {key: gather_whole(value) for key, value in state.items()}


def _numbered_parameters(optimizer: Optimizer, state_dict: dict[str, Any]) -> list[tuple[int, nn.Parameter]]:
    """Returns (number in the state dict, parameter) for each parameter of an optimizer."""
    numbers = [key for group in state_dict["param_groups"] for key in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return list(zip(numbers, parameters, strict=False))
