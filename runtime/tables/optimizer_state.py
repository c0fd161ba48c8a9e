"""State dicts of the optimizers that step a model's sharded tables: parts are shown, whole tensors are cut.

Contract
    State that is loaded may come whole or in parts; a rank keeps its part of a sharded table's, and of others all of
    it.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.runtime.tables.model_state import ModelState
from embrace_fx.runtime.tables.part import Part, whole
from embrace_fx.runtime.tables.part_state import as_state, own_state
from embrace_fx.runtime.tables.state_dicts import as_shown


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
