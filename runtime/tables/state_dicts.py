"""State dicts with sharded tables: as shards, which only `torch.distributed.checkpoint` may write, or whole.

A state dict shows a sharded table as a `TableShard`, a DTensor by columns. One rank's file of it would hold that rank's
columns alone, so that pickling it is refused; `whole_state` gives what one rank can write.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from embrace_fx.runtime.tables.held import Held
from embrace_fx.runtime.tables.layouts import by_columns, whole_table
from embrace_fx.runtime.tables.part import REFUSAL, Part
from embrace_fx.runtime.tables.part_layout import Layout

Watch = Callable[[], AbstractContextManager[None]]


class TableShard(DTensor):
    """A sharded table, or its optimizer's state, in a state dict.

    To torch it is the DTensor that it was made of. A copy of it is a shard too; a pickle of it is refused.
    """

    _embrace_name: str
    _embrace_watch: Watch

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(REFUSAL.format(f"a part of the sharded {self._embrace_name}"))

    def __deepcopy__(self, memo: dict[int, Any]) -> TableShard:
        with torch.no_grad():
            local = self.to_local().clone()
        shape, stride = self.shape, self.stride()
        own = DTensor.from_local(local, self.device_mesh, self.placements, run_check=False, shape=shape, stride=stride)
        return as_table_shard(own, self._embrace_name, self._embrace_watch)

    # What writers of other formats read a tensor by.

    def untyped_storage(self) -> NoReturn:
        self.__reduce_ex__(2)

    def data_ptr(self) -> int:
        return 0  # no memory of its own: what stages it for an asynchronous save copies the local part

    def numpy(self, *_: Any, **__: Any) -> NoReturn:
        self.__reduce_ex__(2)


def as_table_shard(shard: DTensor, name: str, watch: Watch) -> TableShard:
    """Returns a shard as state dicts show it, in the same memory.

    Args:
        watch: a function, within whose context the error of a collective names ranks.
    """
    found = shard.detach()
    found.__class__ = TableShard  # a DTensor's constructor takes no subclass
    assert isinstance(found, TableShard)
    found._embrace_name, found._embrace_watch = name, watch
    return found


def show_shards(
    state_dict: dict[str, Any],
    layouts: Mapping[str, Layout],
    group: dist.ProcessGroup | None,
    watch: Watch,
    *,
    prefix: str = "",
) -> None:
    """Puts shards by columns in the place of this rank's parts of tables. Collective where one lies on a grid.

    Args:
        layouts: of the tables, by each of their names.
        watch: as of `as_table_shard`.
        prefix: of the model's names in the state dict.
    """
    shown: dict[tuple[Any, ...], DTensor] = {}  # a tied parameter once; tables of a stack share their memory
    for name, layout in layouts.items():
        value = state_dict.get(prefix + name)
        if value is None or isinstance(value, DTensor) or (isinstance(value, Part) and value.held.is_elsewhere):
            continue
        local = value.held.memory() if isinstance(value, Part) else value
        memory = local.untyped_storage()._cdata, local.storage_offset(), *layout.shape
        if memory not in shown:
            shown[memory] = shard_by_columns(local, layout, group)
        state_dict[prefix + name] = as_table_shard(shown[memory], prefix + name, watch)


def shard_by_columns(local: Tensor, layout: Layout, group: dist.ProcessGroup | None) -> DTensor:
    """Returns a rank's part (V', d) of a table as a shard by columns. Collective where it lies on a grid."""
    assert group is not None
    found = by_columns(layout.shard(local.detach()), group)
    assert isinstance(found, DTensor)
    return found


def take_own_parts(
    state_dict: dict[str, Any],
    layouts: Mapping[str, Layout],
    group: dist.ProcessGroup | None,
    parameter: Callable[[str], Tensor],
    *,
    prefix: str = "",
) -> None:
    """Fits a state dict to a model that is to load it, in place: what is whole in one and not in the other.

    Values of sharded tables, whole or by columns, become this rank's parts; shards of tables that are whole here are
    put together. Collective for the latter, and where tables are on a grid and values by columns.

    Args:
        layouts, prefix: as of `show_shards`.
        parameter: finds one of the model's by name.
    """
    for name, value in state_dict.items():
        if not isinstance(value, Tensor) or not name.startswith(prefix):
            continue
        if (layout := layouts.get(name.removeprefix(prefix))) is not None:
            if isinstance(value, Part) or value.shape != layout.shape:
                continue  # of other shapes load_state_dict names both
            check_in_memory(parameter(name.removeprefix(prefix)))
            own, held = parameter(name.removeprefix(prefix)), layout.part_of(value, group)
            state_dict[name] = own.like(Held(held)) if isinstance(own, Part) else held
        elif isinstance(value, DTensor):
            state_dict[name] = whole_table(value, value.device_mesh.get_group())


def check_in_memory(value: Any) -> None:
    """Raises `RuntimeError` where a value is a table's that no memory has all of: on every rank, before any sends."""
    if isinstance(value, Part) and value.held.is_elsewhere:
        value.held.dense()


def whole_state(state: Any) -> Any:
    """A state dict, nested as it may be, with each sharded table whole, as a plain tensor, on every rank. Collective.

    Everything else is the same object. The tables are gathered in the order of their keys as text: the ranks may have
    put them into their dicts in other orders.
    """
    if isinstance(state, TableShard):
        with state._embrace_watch():
            return whole_table(state.detach(), state.device_mesh.get_group())
    if isinstance(state, DTensor):
        return whole_table(state.detach(), state.device_mesh.get_group())
    check_in_memory(state)
    if isinstance(state, dict):
        found = copy.copy(state)
        whole = {key: whole_state(state[key]) for key in sorted(state, key=str)}
        found.update({key: whole[key] for key in state})
        return found
    return [whole_state(each) for each in state] if isinstance(state, list) else state
