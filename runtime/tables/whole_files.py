"""Saves a state dict with sharded tables to one file, without ever holding a whole table on a rank.

Contract
    The file contains plain tensors, as `torch.save` would write them, and `torch.load` reads it. Rank 0 first writes a
    file of the final size, then fills in the columns of each table, which arrive in blocks of rows. The file is renamed
    once it is complete. If nothing is sharded, no rank communicates: each calling rank writes the same file, under a
    temporary name of its own.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensorMode

from embrace_fx.runtime.ranks.backends import goes_through_host
from embrace_fx.runtime.ranks.messages import receive_one, send_one
from embrace_fx.runtime.tables.state_dicts import check_in_memory
from embrace_fx.runtime.tables.table_shard import TableShard, cut_own_shard
from embrace_fx.vocabulary.ops import own_columns

_BLOCK_ELEMENTS = 1 << 20


@torch.no_grad()
def save_gathered(state: dict[str, Any], path: Path) -> None:
    """Saves a state dict to a file, with sharded tables gathered from all ranks as plain tensors. Collective."""
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
                _gather_columns(value, place, group)
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
    """Returns a copy of the state dict with an uninitialized CPU tensor of the same shape in place of each tensor."""
    if isinstance(state, Tensor):
        return torch.empty(state.shape, dtype=state.dtype, device="cpu")
    if isinstance(state, dict):
        return {key: _with_placeholders(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(map(_with_placeholders, state))
    return state


def _gather_columns(part: TableShard, place: Tensor | None, group: dist.ProcessGroup) -> None:
    """Gathers all ranks' columns of a table into a file, on the rank that writes it. Other ranks send theirs.
    Collective.

    Args:
        place: the tensor (V, D) in the file, or None on other ranks.
    """
    size, local = dist.get_world_size(group), cut_own_shard(part, part.spread.by_columns())
    by_host = goes_through_host(local, group)
    rows_a_block = max(1, _BLOCK_ELEMENTS // max(1, part.shape[1]))
    for block in local.split(rows_a_block) if place is None else ():
        if block.numel():
            send_one((block.cpu() if by_host else block).contiguous(), 0, group)
    if place is None:
        return
    columns = [own_columns(part.shape[1], size, rank) for rank in range(size)]
    place[:, slice(*columns[0])] = local
    for rank in range(1, size):
        width = columns[rank][1] - columns[rank][0]
        for rows in place[:, slice(*columns[rank])].split(rows_a_block) if width else ():
            block = local.new_empty((len(rows), width), device="cpu" if by_host else local.device)
            receive_one(block, rank, group)
            rows.copy_(block)
