"""Kernels for a table that is sharded on a grid of ranks: they route ids to ranks, and convert rows to blocks by rank
and back.

Blocks are in rank order: for each row of the grid and each column chunk, the rows in sequence. Worked examples:
`embrace_fx/vocabulary/ops.py`.

Shape legend: as there; w columns of each chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from embrace_fx.vocabulary.ops import own_columns


def route_grid(ids: Tensor, counts: Tensor, rank: int, grid_rows: int, grid_columns: int) -> list[Tensor]:
    """Implements the op `route_grid`, for a table that is sharded by rows and columns over a grid of ranks. Row r of
    the grid has the table rows whose id % grid_rows is r.

    Args:
        ids: (R,), the ids that ranks read, rank after rank.
        counts: (N,), the number of ids that each rank reads.
        rank: this rank.
        grid_rows, grid_columns: the size of the grid.

    Returns:
        [the rows of this rank's shard that any rank reads (M,), the number of ids that each rank reads from each row of
            the grid (N, grid_rows), the positions of this rank's own ids, sorted by row of the grid (U,)].
    """
    ranks = grid_rows * grid_columns
    row_of = ids.remainder(grid_rows)
    reader = torch.arange(ranks, device=ids.device).repeat_interleave(counts.to(ids.device), output_size=ids.numel())
    by_row = torch.bincount(reader * grid_rows + row_of, minlength=ranks * grid_rows).view(ranks, grid_rows)
    held = (row_of == rank // grid_columns).nonzero().view(-1)
    first = int(counts[:rank].sum())
    order = row_of[first : first + int(counts[rank])].argsort(stable=True)
    return [ids.index_select(0, held).div(grid_rows, rounding_mode="floor"), by_row.cpu(), order]


def join_grid(flat: Tensor, order: Tensor, counts: Tensor, embedding_dim: int, rank: int) -> Tensor:
    """Implements the op `join_grid`: assembles whole rows (U, D) from the columns received from each rank of a grid.

    Args:
        flat: (U * D,), the received columns, in one block per rank.
        order: (U,), the last result of `route_grid`.
        counts: (N, grid_rows), the second result of `route_grid`.
        embedding_dim: the number of columns of the table (D).
        rank: this rank.
    """
    out = flat.new_empty((order.numel(), embedding_dim))
    join_grid_into(out, order, flat, counts[rank].tolist(), counts.shape[0] // counts.shape[1])
    return out


def join_grid_into(out: Tensor, positions: Tensor, flat: Tensor, own: Sequence[int], grid_columns: int) -> None:
    """Assembles whole rows from the columns received from each rank of a grid, and writes the rows to `out`.

    Args:
        out: (U', D), written at the rows `positions`.
        positions: (U,), the row of `out` for each received row, sorted by the row of the grid that sends it.
        flat: (U * D,), the received columns, in one block per rank.
        own: for each row of the grid, the number of rows received from it.
        grid_columns: the number of columns of the grid.
    """
    columns = out.shape[1]
    width, rest = divmod(columns, grid_columns)
    if rest or not width:
        for places, first, last, block in _blocks_by_rank(positions, flat, own, columns, grid_columns):
            out[:, first:last].index_copy_(0, places, block)
        return
    pieces = _piece_positions(positions, own, grid_columns)
    rows = flat.view(-1, width).index_select(0, pieces.view(-1)).view(positions.numel(), columns)
    out.index_copy_(0, positions, rows)


def split_grid(rows: Tensor, order: Tensor, counts: Tensor, rank: int) -> Tensor:
    """Implements the op `split_grid`: splits gradient rows (U, D) into one block for each rank of a grid. Returns the
    blocks in rank order, flat (U * D,).

    Args:
        order: (U,), the last result of `route_grid`.
        counts: (N, grid_rows), the second result of `route_grid`.
        rank: this rank.
    """
    return split_selected_grid(rows, order, counts[rank].tolist(), counts.shape[0] // counts.shape[1])


def split_selected_grid(rows: Tensor, positions: Tensor, own: Sequence[int], grid_columns: int) -> Tensor:
    """Splits `rows[positions]` into one block for each rank of a grid. Returns the blocks in rank order, flat (U * D,).

    Args:
        rows: (U', D).
        positions: (U,), the indices of the rows to send, sorted by the row of the grid that receives them.
        own: for each row of the grid, the number of rows to send to it.
        grid_columns: the number of columns of the grid.
    """
    columns = rows.shape[1]
    width, rest = divmod(columns, grid_columns)
    if rest or not width:
        flat = rows.new_empty((positions.numel() * columns,))
        for places, first, last, block in _blocks_by_rank(positions, flat, own, columns, grid_columns):
            block.copy_(rows[:, first:last].index_select(0, places))
        return flat
    pieces = _piece_positions(positions, own, grid_columns).view(-1)
    chunk = torch.arange(grid_columns, device=rows.device)
    source = torch.empty_like(pieces)
    source[pieces] = (positions.unsqueeze(1) * grid_columns + chunk).view(-1)
    return rows.reshape(-1, width).index_select(0, source).view(-1)


def _piece_positions(positions: Tensor, own: Sequence[int], grid_columns: int) -> Tensor:
    """Returns the position (U, grid_columns) of each piece in the flat tensor that `split_selected_grid` returns,
    counted in pieces. A piece has the columns of one row that one column of the grid stores.

    Args:
        positions, own, grid_columns: as for `split_selected_grid`.
    """
    device = positions.device
    sizes = torch.tensor(own, device=device)
    of_row = sizes.repeat_interleave(sizes, output_size=positions.numel())
    first = (sizes.cumsum(0) - sizes).repeat_interleave(sizes, output_size=positions.numel())
    # A row's pieces come after the blocks for all earlier rows of the grid.
    base = first * (grid_columns - 1) + torch.arange(positions.numel(), device=device)
    return base.unsqueeze(1) + of_row.unsqueeze(1) * torch.arange(grid_columns, device=device)


def _blocks_by_rank(
    positions: Tensor, flat: Tensor, rows_per_grid_row: Sequence[int], columns: int, grid_columns: int
) -> list[tuple[Tensor, int, int, Tensor]]:
    """Splits `flat` into one block for each rank of the grid. A block has the rows and columns that the rank stores.

    Args:
        positions: each row's position in the output, sorted by the row of the grid that stores the row.
        flat: the blocks one after another, in rank order.
        rows_per_grid_row: for each row of the grid, the number of rows that it stores.
        columns: the number of columns of the table.
        grid_columns: the number of columns of the grid.

    Returns:
        For each rank: (the positions of its rows in the output, its first column, its last column + 1, its block as a
            view (rows, columns) of `flat`).
    """
    bounds = [own_columns(columns, grid_columns, c) for c in range(grid_columns)]
    parts = iter(flat.split([rows * (last - first) for rows in rows_per_grid_row for first, last in bounds]))
    return [
        (places, first, last, next(parts).view(places.numel(), last - first))
        for places in positions.split(list(rows_per_grid_row))
        for first, last in bounds
    ]
