"""What state dicts show of sharded tables: DTensors by columns, under the original names; and what they load.

Contract
    A shown shard shares its memory with the parameter, so that a checkpoint may be loaded into it in place.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor

from embrace_fx.runtime.step.model_state import ModelState
from embrace_fx.runtime.tables.layouts import by_columns
from embrace_fx.runtime.tables.row_table import RowTable


def show_shards(state: ModelState, state_dict: dict[str, Any], prefix: str, group: dist.ProcessGroup | None) -> None:
    """Puts DTensors in the place of this rank's parts. Collective where a table lies on a grid."""
    shown: dict[str, Tensor] = {}  # a tied parameter once
    for name, table in _shards(state):
        if (key := prefix + name) in state_dict:
            if table.name not in shown:
                assert group is not None
                shown[table.name] = by_columns(table.shard(state_dict[key].detach()), group)
            state_dict[key] = shown[table.name]


def load_parts(state: ModelState, state_dict: dict[str, Any], prefix: str, group: dist.ProcessGroup | None) -> None:
    """Puts this rank's parts in the place of whole tables and DTensors. Collective from columns to a grid."""
    for name, table in _shards(state):
        value = state_dict.get(prefix + name)
        if isinstance(value, Tensor) and value.shape == table.shape:  # of other shapes load_state_dict names both
            state_dict[prefix + name] = table.own_part(value, group)


def _shards(state: ModelState) -> Iterator[tuple[str, RowTable]]:
    """The sharded tables, by each of their names."""
    by_parameter = {table.parameter: table for table in state.tables.values() if table.mesh is not None}
    for name in state.names:
        if (parameter := state.parameter(name)) in by_parameter:
            yield name, by_parameter[parameter]
