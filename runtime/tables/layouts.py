"""Computes which rows and columns of a sharded table each rank owns, and scatters tables.

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
