"""Creates, loads, gathers and saves state dicts in which sharded tables are shards by columns. Converts the state of
optimizers: to shards for users, to plain tensors for the runtime.

`torch.distributed.checkpoint` saves and loads parts. It gets DTensors where it gathers or splits tables itself.
Pickling a part raises, because the file would hold only one rank's columns. State to load may be whole or in parts: a
rank keeps its part of a sharded table's state, and all of other state.
"""

from __future__ import annotations

import copy
import mmap
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from embrace_fx.runtime.tables.local_storage import LocalStorage
from embrace_fx.runtime.tables.shard_layout import Layout
from embrace_fx.runtime.tables.table_shard import TableShard, cut_own_shard, gather_rows, gather_whole

if TYPE_CHECKING:
    from embrace_fx.runtime.ranks.communicator import Communicator
    from embrace_fx.runtime.tables.model_state import ModelState


def insert_shards(state_dict: dict[str, Any], names: Iterable[str], *, prefix: str = "") -> None:
    """Replaces sharded tables in a state dict by this rank's shards, in the form of `to_state_dict_form`. Collective if
    a table is sharded by rows and columns.

    Args:
        names: the names of the sharded tables; a tied parameter has several.
        prefix: the prefix of the model's names in the state dict.
    """
    # Id of a storage -> its form in the state dict, so that a tied parameter is converted once.
    shown: dict[int, Tensor] = {}
    for name in names:
        value = state_dict.get(prefix + name)
        if isinstance(value, TableShard) and not value.held.is_elsewhere:
            if id(value.held) not in shown:
                shown[id(value.held)] = to_state_dict_form(value)
            state_dict[prefix + name] = shown[id(value.held)]


def check_names(module: nn.Module, state_dict: Mapping[str, Any], prefix: str) -> None:
    """Raises `RuntimeError` if a state dict has no name of the module, so that nothing would be loaded."""
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    own = dict.fromkeys(prefix + name for name, _ in named)
    given = [name for name in state_dict if name.startswith(prefix)]
    if given and own.keys().isdisjoint(given) and not any(name.endswith("_extra_state") for name in given):
        raise RuntimeError(
            f"load_state_dict(): no key of the state dict is a parameter or buffer of {type(module).__name__}, so "
            f"nothing would be loaded. The first key is {given[0]!r}, but the model's is {next(iter(own), '')!r}. Keys "
            "of a compiled model have no 'module.' prefix: remove the code that strips it."
        )


def to_state_dict_form(part: TableShard) -> Tensor:
    """Returns a shard as a state dict contains it: sharded by columns, as a DTensor if `torch.distributed.checkpoint`
    will gather it or replace it by a loaded whole tensor. A table sharded by rows and columns is copied: collective.
    """
    if part.spread.is_alone:
        return part
    if part.spread.grid is not None:
        layout = part.spread.by_columns()
        part = part.like(LocalStorage(cut_own_shard(part, layout), no_writes=_OF_A_GRID), layout)
    return part.to_dtensor() if _will_be_gathered() else part


_OF_A_GRID = (
    "state_dict() returns a copy of a table that is sharded by a Grid, so a write into the copy would be lost. Write "
    "into the parameter, or modify a clone of the copy and load it with load_state_dict()."
)


def _will_be_gathered() -> bool:
    """Returns whether `torch.distributed.checkpoint` calls, and gathers state dicts or loads them from rank 0."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == _CHECKPOINTS and (info := frame.f_locals.get("info")) is not None:
            return bool(info.full_state_dict or info.broadcast_from_rank0)
        frame = frame.f_back
    return False


_CHECKPOINTS = "torch.distributed.checkpoint.state_dict"


def convert_state_dict(
    state_dict: dict[str, Any],
    layouts: Mapping[str, Layout],
    parameter: Callable[[str], Tensor],
    *,
    prefix: str = "",
) -> None:
    """Converts a state dict in place to the layouts of the model that loads it: values of sharded tables become this
    rank's shards, and other shards are gathered. Collective if ranks must exchange shards.

    Args:
        layouts: the layouts of sharded tables, by all of their names.
        parameter: function that returns the model's parameter with a name.
        prefix: the prefix of the model's names in the state dict.
    """
    for name, value in state_dict.items():
        if not isinstance(value, Tensor) or not name.startswith(prefix):
            continue
        if (layout := layouts.get(name.removeprefix(prefix))) is None:
            state_dict[name] = gather_whole(value)
        elif value.shape == layout.shape and not (isinstance(value, TableShard) and value.spread.fits(layout)):
            own = parameter(name.removeprefix(prefix))
            check_in_memory(own)
            held = cut_own_shard(value, layout)
            state_dict[name] = own.like(LocalStorage(held)) if isinstance(own, TableShard) else held


def check_in_memory(value: Any) -> None:
    """Raises `RuntimeError` on every rank if the value is a table larger than memory."""
    if isinstance(value, TableShard) and value.held.is_elsewhere:
        value.held.dense()


def gather_state_dict(state: Any) -> Any:
    """Returns a nested state dict with each sharded table gathered as a plain tensor, on every rank, in the order of
    their keys as text, because ranks may have inserted them in different orders. Collective.
    """
    if isinstance(state, TableShard | DTensor):
        return gather_whole(state.detach())
    if isinstance(state, dict):
        found = copy.copy(state)
        values = {key: gather_state_dict(state[key]) for key in sorted(state, key=str)}
        found.update({key: values[key] for key in state})
        return found
    return [gather_state_dict(each) for each in state] if isinstance(state, list) else state


# -- whole tables in one file ------------------------------------------------------------------------------------------


@torch.no_grad()
def save_gathered(state: dict[str, Any], path: Path) -> None:
    """Saves a state dict to a file of plain tensors, as `torch.save` does, with sharded tables gathered from all ranks.
    Collective, except if nothing is sharded: each calling rank then writes the same file.

    Rank 0 first writes a file of the final size, under another name, then fills in each table block by block, and
    renames the file last.
    """
    values = list(_tensors_in_order(state))
    for each in values:
        check_in_memory(each)
    first = next((each.spread for each in values if isinstance(each, TableShard) and not each.spread.is_alone), None)
    group = None if first is None else first.group
    if first is not None:
        first.wait_for_ranks()
    rank = dist.get_rank() if dist.is_initialized() else 0
    writes = group is None or dist.get_rank(group) == 0
    being_written = path.with_name(f"{path.name}.part" if group is not None else f"{path.name}.part-{rank}")
    places: list[Tensor | None] = [None] * len(values)
    if writes:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FakeTensorMode(), torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(_with_placeholders(state), being_written)
        with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
            places = list(_tensors_in_order(torch.load(being_written, mmap=True, weights_only=True)))
    for value, place in zip(values, places, strict=True):
        if isinstance(value, TableShard) and group is not None:
            with value.spread.watching():
                for at, rows in gather_rows(value):
                    if place is not None:
                        place[at : at + len(rows)] = rows
        elif place is not None:
            place.copy_(value)
    if writes:
        del places
        with being_written.open("rb+") as file:
            os.fsync(file.fileno())
        being_written.replace(path)
    if group is not None:
        dist.barrier(group)  # after this call, every rank finds the file


def _tensors_in_order(state: Any) -> Iterator[Tensor]:
    """Yields the tensors of a state dict, sorted by their keys as text, so that the order is equal on all ranks."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, dict):
        for key in sorted(state, key=str):
            yield from _tensors_in_order(state[key])
    elif isinstance(state, list | tuple):
        for each in state:
            yield from _tensors_in_order(each)


def _with_placeholders(state: Any) -> Any:
    """Returns a copy of the state dict with an uninitialized CPU tensor in place of each tensor."""
    if isinstance(state, Tensor):
        return torch.empty(state.shape, dtype=state.dtype, device="cpu")
    if isinstance(state, dict):
        return {key: _with_placeholders(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(map(_with_placeholders, state))
    return state


# -- the state of optimizers -------------------------------------------------------------------------------------------


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
