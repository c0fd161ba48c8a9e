"""Computes which rows and columns of a sharded table each rank owns, and moves shards between layouts.

By columns, a rank has the columns that torch.chunk gives it, which `torch.distributed.checkpoint` can re-shard. On a
`Grid`, a rank has some columns of the rows with id % rows == r.

Shape legend: V x D the table; V' x d a rank's part.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from embrace_fx.runtime.ranks.backends import goes_through_host
from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.runtime.ranks.messages import receive_one, send_one
from embrace_fx.vocabulary.ops import own_columns
from embrace_fx.vocabulary.plan import Grid

Slices = tuple[slice, slice]
"""Slices of a table's rows and columns."""


def make_mesh(communicator: Communicator, device_type: str, grid: Grid | None) -> DeviceMesh | None:
    """Returns the device mesh over which tables are sharded on `grid`, or by columns if `grid` is None. Returns None
    for a single process. The first call for a grid is collective, because it makes process groups.
    """
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


def owned_slices(shape: Sequence[int], grid: Grid, rank: int) -> Slices:
    """Returns the slices of rows and of columns of a table (V, D) that `rank` owns on a grid."""
    return grid.own_rows(shape[0], rank), slice(*own_columns(shape[1], grid.columns, grid.place(rank)[1]))


def own_slices(shape: Sequence[int], mesh: DeviceMesh) -> Slices:
    """Returns the slices of rows and of columns of a table that this rank owns on a mesh."""
    # Do not use the mesh's groups: torch may return an equal mesh whose groups are destroyed.
    place = mesh.get_coordinate()
    assert place is not None
    grid = Grid(*mesh.shape) if mesh.ndim > 1 else Grid(1, mesh.size())
    return owned_slices(shape, grid, place[0] * grid.columns + place[1] if mesh.ndim > 1 else place[0])


def scatter_table(table: Tensor, group: dist.ProcessGroup, grid: Grid | None) -> Tensor:
    """Scatters rank 0's table (V, D) on a grid, or by columns. Returns this rank's shard (V', d). Collective.

    Args:
        table: the table on rank 0; on other ranks, any tensor of its shape, dtype and device type.
    """
    if goes_through_host(table, group):
        return scatter_table(table.cpu(), group, grid).to(table.device)
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    parts = [owned_slices(table.shape, grid or Grid(1, size), r) for r in range(size)]
    if rank > 0:
        own = torch.empty_like(table[parts[rank]], memory_format=torch.contiguous_format)
        if own.numel():
            receive_one(own, 0, group)
        return own
    # Send point to point, because scatter needs equal sizes, and shards may differ in size or be empty.
    for r in range(1, size):
        piece = table[parts[r]].contiguous()
        if piece.numel():
            send_one(piece, r, group)
    return table[parts[0]].clone(memory_format=torch.contiguous_format)


@torch.no_grad()
def regrid(local: Tensor, shape: Sequence[int], old: Grid, new: Grid, group: dist.ProcessGroup) -> Tensor:
    """Changes the grid on which a table is sharded, by an AlltoAll. Returns this rank's new shard. Collective.

    Args:
        local: this rank's old shard.
        shape: the shape (V, D) of the whole table.
    """
    if goes_through_host(local, group):
        return regrid(local.cpu(), shape, old, new, group).to(local.device)
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    had, wanted = ([owned_slices(shape, grid, r) for r in range(size)] for grid in (old, new))
    sent = [local[_relative_to(had[rank], _intersection(had[rank], each))].reshape(-1) for each in wanted]
    places = [_relative_to(wanted[rank], _intersection(each, wanted[rank])) for each in had]
    moved = local.new_empty([len(range(length)[own]) for length, own in zip(shape, wanted[rank], strict=True)])
    receive_sizes = [moved[place].numel() for place in places]
    received = local.new_empty((sum(receive_sizes),))
    sent_sizes = [piece.numel() for piece in sent]
    dist.all_to_all_single(received, torch.cat(sent), receive_sizes, sent_sizes, group=group)
    for place, piece in zip(places, received.split(receive_sizes), strict=True):
        moved[place] = piece.view(moved[place].shape)
    return moved


def _intersection(a: Slices, b: Slices) -> Slices:
    """Returns the rows and columns that two shards have in common."""
    first = max(a[1].start, b[1].start)
    return a[0] if b[0].step == 1 else b[0], slice(first, max(first, min(a[1].stop, b[1].stop)))


def _relative_to(part: Slices, common: Slices) -> Slices:
    """Converts rows and columns of a table to indices into a shard.

    Args:
        part: the shard's rows and columns.
        common: the rows and columns to convert.
    """
    rows = common[0] if part[0].step == 1 else slice(None)
    return rows, slice(common[1].start - part[1].start, common[1].stop - part[1].start)
