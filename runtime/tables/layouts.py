"""Where a sharded table's parts lie: by columns, or on a grid of rows and columns; and moves between the two.

By columns a rank has those that torch.chunk gives it: what `torch.distributed.checkpoint` re-shards. On a `Grid` it has
some columns of the rows with id % rows == r.

Shape legend: V x D the table, V' x d a rank's part of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from embrace_fx.runtime.ranks.backends import travels_by_host
from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.runtime.ranks.messages import receive_one, send_one
from embrace_fx.vocabulary.ops import own_columns
from embrace_fx.vocabulary.plan import Grid

Slices = tuple[slice, slice]
"""Rows and columns of a table."""


def mesh_of(communicator: Communicator, device_type: str, grid: Grid | None) -> DeviceMesh | None:
    """Returns the mesh of tables on a device; None: a single process. On a grid, the first time, collective: each of
    its rows and columns gets a process group."""
    group = communicator.group
    if group is None or communicator.world_size == 1:
        return None
    if grid is None:
        return DeviceMesh.from_group(group, device_type)
    found = communicator.meshes.get((device_type, grid))
    if found is None:
        ranks = torch.tensor(dist.get_process_group_ranks(group), device="cpu").view(grid.rows, grid.columns)
        along = {f"a column of a {grid}": ranks.t().tolist(), f"a row of a {grid}": ranks.tolist()}
        groups = [communicator.sub_group(name, parts) for name, parts in along.items()]
        found = DeviceMesh.from_group(groups, device_type, mesh=ranks, mesh_dim_names=("rows", "columns"))
        communicator.meshes[device_type, grid] = found
    return found


def part_of(shape: Sequence[int], grid: Grid, rank: int) -> Slices:
    """Returns the rows and columns of a table (V, D) that a rank owns; by columns the grid has one row."""
    return grid.own_rows(shape[0], rank), slice(*own_columns(shape[1], grid.columns, grid.place(rank)[1]))


def own_part(shape: Sequence[int], mesh: DeviceMesh) -> Slices:
    """Returns this rank's part of a table that lies on a mesh."""
    place = mesh.get_coordinate()  # not its groups: torch may hand out an equal mesh of groups that have ended
    assert place is not None
    grid = Grid(*mesh.shape) if mesh.ndim > 1 else Grid(1, mesh.size())
    return part_of(shape, grid, place[0] * grid.columns + place[1] if mesh.ndim > 1 else place[0])


def scatter_table(table: Tensor, group: dist.ProcessGroup, grid: Grid | None) -> Tensor:
    """Rank 0's table (V, D), to each rank its own part (V', d). Each rank passes its own, equally shaped, table."""
    if travels_by_host(table, group):
        return scatter_table(table.cpu(), group, grid).to(table.device)
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    parts = [part_of(table.shape, grid or Grid(1, size), r) for r in range(size)]
    if rank > 0:
        own = torch.empty_like(table[parts[rank]], memory_format=torch.contiguous_format)
        if own.numel():
            receive_one(own, 0, group)
        return own
    # Point to point: scatter wants pieces of one size, and ranks may own fewer columns or rows than others, or none.
    for r in range(1, size):
        piece = table[parts[r]].contiguous()
        if piece.numel():
            send_one(piece, r, group)
    return table[parts[0]].clone(memory_format=torch.contiguous_format)


@torch.no_grad()
def regrid(local: Tensor, shape: Sequence[int], old: Grid, new: Grid, group: dist.ProcessGroup) -> Tensor:
    """This rank's part of a table on another grid, from its part on the old one: an AlltoAll of what both have."""
    if travels_by_host(local, group):
        return regrid(local.cpu(), shape, old, new, group).to(local.device)
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    had, wanted = ([part_of(shape, grid, r) for r in range(size)] for grid in (old, new))
    sent = [local[_within(had[rank], _common(had[rank], each))].reshape(-1) for each in wanted]
    places = [_within(wanted[rank], _common(each, wanted[rank])) for each in had]
    moved = local.new_empty([len(range(length)[own]) for length, own in zip(shape, wanted[rank], strict=True)])
    receive_sizes = [moved[place].numel() for place in places]
    received = local.new_empty((sum(receive_sizes),))
    sent_sizes = [piece.numel() for piece in sent]
    dist.all_to_all_single(received, torch.cat(sent), receive_sizes, sent_sizes, group=group)
    for place, piece in zip(places, received.split(receive_sizes), strict=True):
        moved[place] = piece.view(moved[place].shape)
    return moved


def _common(a: Slices, b: Slices) -> Slices:
    """Intersects two parts, one of which has all rows."""
    first = max(a[1].start, b[1].start)
    return a[0] if b[0].step == 1 else b[0], slice(first, max(first, min(a[1].stop, b[1].stop)))


def _within(part: Slices, common: Slices) -> Slices:
    """Maps rows and columns of a table to indices into a part that holds them: all its rows, or the part has all."""
    rows = common[0] if part[0].step == 1 else slice(None)
    return rows, slice(common[1].start - part[1].start, common[1].stop - part[1].start)
