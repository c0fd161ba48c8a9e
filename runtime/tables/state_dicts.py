"""Creates, loads and gathers state dicts in which sharded tables are shards by columns.

`torch.distributed.checkpoint` saves and loads parts. It gets DTensors where it gathers or splits tables itself.
Pickling a part raises, because the file would hold only one rank's columns.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from embrace_fx.runtime.tables.local_storage import CopyStorage, LocalStorage
from embrace_fx.runtime.tables.shard_layout import Layout
from embrace_fx.runtime.tables.table_shard import TableShard, cut_own_shard, gather_whole


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
    """Raises `RuntimeError` if a state dict has no name of the module, with this prefix, so that nothing would be
    loaded.
    """
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
        part = part.like(CopyStorage(cut_own_shard(part, layout), _OF_A_GRID), layout)
    return part.to_dtensor() if _will_be_gathered() else part


_OF_A_GRID = (
    "state_dict() returns a copy of a table that is sharded by a Grid, so a write into the copy would be lost. Write "
    "into the parameter, or modify a clone of the copy and load it with load_state_dict()."
)


def _will_be_gathered() -> bool:
    """Returns whether `torch.distributed.checkpoint` is the caller, with the option `full_state_dict` or
    `broadcast_from_rank0`.
    """
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
