"""State dicts with sharded tables, which hold them in parts, by columns: shown, loaded, or put together.

`torch.distributed.checkpoint` saves and loads parts; where it gathers or cuts tables itself, it gets DTensors. One
rank's file of a part would hold that rank's columns alone, so that pickling it is refused; `whole_state` gives what one
rank can write.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from embrace_fx.runtime.tables.local_storage import CopyStorage, LocalStorage
from embrace_fx.runtime.tables.part import Part, own_part_of, whole
from embrace_fx.runtime.tables.part_layout import Layout


def show_parts(state_dict: dict[str, Any], names: Iterable[str], *, prefix: str = "") -> None:
    """Shows this rank's parts of tables by columns. Collective where one lies on a grid.

    Args:
        names: of the tables, by each of their names.
        prefix: of the model's names in the state dict.
    """
    shown: dict[int, Tensor] = {}  # a tied parameter once
    for name in names:
        value = state_dict.get(prefix + name)
        if isinstance(value, Part) and not value.held.is_elsewhere:
            if id(value.held) not in shown:
                shown[id(value.held)] = as_shown(value)
            state_dict[prefix + name] = shown[id(value.held)]


def as_shown(part: Part) -> Tensor:
    """Returns a part of a table as state dicts show it: by columns, of a table on a grid a copy. Collective there.

    Where `torch.distributed.checkpoint` gathers it, or cuts it out of a whole one, it is a DTensor.
    """
    if part.spread.is_alone:
        return part
    if part.spread.grid is not None:
        layout = part.spread.by_columns()
        part = part.like(CopyStorage(own_part_of(part, layout), _OF_A_GRID), layout)
    return part.shard() if _is_gathered() else part


_OF_A_GRID = (
    "state_dict() gives a copy of a table on a grid, so that a write into it would be lost. Write into the "
    "parameter; or into a clone of the value, and call load_state_dict()."
)


def _is_gathered() -> bool:
    """Whether `torch.distributed.checkpoint` asks for a state dict in order to gather it, or to cut whole tensors."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == _CHECKPOINTS and (info := frame.f_locals.get("info")) is not None:
            return bool(info.full_state_dict or info.broadcast_from_rank0)
        frame = frame.f_back
    return False


_CHECKPOINTS = "torch.distributed.checkpoint.state_dict"


def take_own_parts(
    state_dict: dict[str, Any],
    layouts: Mapping[str, Layout],
    parameter: Callable[[str], Tensor],
    *,
    prefix: str = "",
) -> None:
    """Fits a state dict to a model that is to load it, in place: what is whole in one and not in the other.

    Values of sharded tables, whole or in parts, become this rank's parts; parts of tables that are whole here are put
    together. Collective for the latter, and where tables are on a grid and values by columns.

    Args:
        layouts: of the tables, by each of their names.
        parameter: finds one of the model's by name.
        prefix: as of `show_parts`.
    """
    for name, value in state_dict.items():
        if not isinstance(value, Tensor) or not name.startswith(prefix):
            continue
        if (layout := layouts.get(name.removeprefix(prefix))) is None:
            state_dict[name] = whole(value)
        elif value.shape == layout.shape and not (isinstance(value, Part) and value.spread.fits(layout)):
            own = parameter(name.removeprefix(prefix))
            check_in_memory(own)
            held = own_part_of(value, layout)
            state_dict[name] = own.like(LocalStorage(held)) if isinstance(own, Part) else held


def check_in_memory(value: Any) -> None:
    """Raises `RuntimeError` where a value is a table's that no memory has all of: on every rank, before any sends."""
    if isinstance(value, Part) and value.held.is_elsewhere:
        value.held.dense()


def whole_state(state: Any) -> Any:
    """A state dict, nested as it may be, with each sharded table whole, as a plain tensor, on every rank. Collective.

    Everything else is the same object. The tables are gathered in the order of their keys as text: the ranks may have
    put them into their dicts in other orders.
    """
    if isinstance(state, Part | DTensor):
        return whole(state.detach())
    if isinstance(state, dict):
        found = copy.copy(state)
        values = {key: whole_state(state[key]) for key in sorted(state, key=str)}
        found.update({key: values[key] for key in state})
        return found
    return [whole_state(each) for each in state] if isinstance(state, list) else state
