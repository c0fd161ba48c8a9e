"""State dicts of the optimizers that step a model's sharded tables: DTensors are shown, whole tensors are cut.

Contract
    What is shown re-shards: DTensors by columns. State that is loaded may come whole or in DTensors; a rank keeps its
    part of a sharded table's, and of others all of it.
"""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.runtime.tables.layouts import whole_table
from embrace_fx.runtime.tables.model_state import ModelState
from embrace_fx.runtime.tables.part_state import own_state, plain_state
from embrace_fx.runtime.tables.state_dicts import Watch, as_table_shard, shard_by_columns


def show_state(
    optimizer: Optimizer, state_dict: dict[str, Any], model: ModelState, communicator: Communicator
) -> dict[str, Any]:
    """Returns the tables' state as DTensors by columns, which re-shard. Collective where a table lies on a grid."""
    group, shown = communicator.group, dict(state_dict["state"])
    watch = _watching(communicator)
    tables = {table.parameter: table for table in model.tables.values()}
    for key, parameter in _numbered(optimizer, state_dict):
        table = tables.get(parameter)
        if table is not None and table.no_dense:
            raise RuntimeError(table.no_dense)
        if key not in shown or table is None or table.layout.mesh is None:
            continue
        state, shape = plain_state(shown[key]), table.local.shape
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == shape:
                with watch():
                    shard = shard_by_columns(value, table.layout, group)
                state[name] = as_table_shard(shard, f"{name} of parameter {key}", watch)
        shown[key] = state
    return {**state_dict, "state": shown}


def own_parts(
    optimizer: Optimizer, state_dict: dict[str, Any], model: ModelState, communicator: Communicator
) -> dict[str, Any]:
    """Cuts this rank's parts out of a state dict, whole or in DTensors. Collective as `show_state` is."""
    loaded = dict(state_dict["state"])
    with communicator.watching():
        for key, parameter in _numbered(optimizer, state_dict):
            own = own_state_of(parameter, loaded.get(key, {}), model, communicator)
            if key in loaded:
                loaded[key] = own
    return {**state_dict, "state": loaded}


def own_state_of(
    parameter: nn.Parameter, state: dict[str, Any], model: ModelState, communicator: Communicator
) -> dict[str, Any]:
    """State of a parameter as it is here: this rank's part of a sharded table's, and of others all of it."""
    table = next((table for table in model.tables.values() if table.parameter is parameter), None)
    if table is not None and table.no_dense:
        raise RuntimeError(table.no_dense)
    if table is not None:
        return own_state(parameter, table.layout, state, communicator.group)
    return {key: whole_table(v, v.device_mesh.get_group()) if isinstance(v, DTensor) else v for key, v in state.items()}


def _watching(communicator: Communicator) -> Watch:
    """Makes a state dict's access to a communicator, which it does not keep alive."""
    itself = weakref.ref(communicator)
    return lambda: found.watching() if (found := itself()) is not None else nullcontext()


def _numbered(optimizer: Optimizer, state_dict: dict[str, Any]) -> list[tuple[int, nn.Parameter]]:
    """Pairs an optimizer's parameters with their numbers in a state dict."""
    numbers = [key for group in state_dict["param_groups"] for key in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return list(zip(numbers, parameters, strict=False))
