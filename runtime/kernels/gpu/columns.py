"""Triton kernels that convert rows to blocks of columns and back, for the AlltoAll of a sharded table (EmbRace, ICPP
2022, section 4.1).

Shape legend: as in `embrace_fx/vocabulary/ops.py`. A block is what one rank owns of the columns,
w = ceil(D / N) wide; the last may be narrower, and ranks beyond it own none.

    rows (U, D)    a0 a1 a2 a3        flat (U * D,), N = 2    a0 a1 b0 b1 | a2 a3 b2 b3
                   b0 b1 b2 b3

Both are copies: a program loads a tile and stores it, both ends in runs of consecutive elements, so that rows of a
multiple of 16 bytes go by 128-bit accesses. Rows are addressed in 64 bits, as V * D may exceed 2^31.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from embrace_fx.runtime.kernels.gpu.tiles import choose_tile, on_tensor_device, require_contiguous


# All kernels in this package are compiled for the table's width, because Triton can use wide accesses only if it knows
# the width's divisors. They are not specialized on the count of rows, which differs from step to step: Triton would
# compile them again whenever it is 1 or a multiple of 16.
# A program handles one rank's columns of some rows (the second axis of the launch grid counts ranks), so that both its
# loads and its stores are consecutive. A tile of a full row's columns could extend over two blocks.
@triton.jit(do_not_specialize=["count"])
def _move_columns(
    rows, positions, flat, count, width: tl.constexpr, block_width: tl.constexpr,
    PACK: tl.constexpr, SELECTED: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Triton kernel: copies one tile between whole rows and blocks of columns, one block per rank.

    Args:
        rows: (U', D), the rows.
        positions: (U,), the indices in `rows` of the rows to copy. Read only if `SELECTED`; otherwise all rows are
            copied.
        flat: (U * D,), the blocks: for each rank, its columns of all copied rows.
        count: the number of rows to copy (U).
        width: the number of columns of a row (D).
        block_width: the number of columns of each block except the last one.
        PACK: whether to copy from `rows` to `flat`; otherwise from `flat` to `rows`.
        EVEN: whether all blocks are equally wide.
        ROWS, COLUMNS: the size of the tile.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1) * block_width
    if EVEN:  # no tl.minimum here, because it would hide from Triton that the width may be divisible by 16
        own = block_width
    else:
        own = tl.minimum(block_width, width - first)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < count)[:, None] & (column < own)[None, :]
    if SELECTED:
        at = tl.load(positions + row, mask=row < count, other=0)
    else:
        at = row
    whole = rows + at[:, None] * width + (first + column)[None, :]
    # All blocks before this one are full.
    block = flat + count.to(tl.int64) * first + row[:, None] * own + column[None, :]
    if PACK:
        tl.store(block, tl.load(whole, mask=inside, other=0.0), mask=inside)
    else:
        tl.store(whole, tl.load(block, mask=inside, other=0.0), mask=inside)


def _launch_tiles(
    rows: Tensor, positions: Tensor | None, flat: Tensor, count: int, group_size: int, pack: bool
) -> None:
    """Launches the kernel that copies rows into one block of columns per rank, or the blocks back into rows.

    Args:
        rows: (U', D), the rows.
        positions: (U,), the indices in `rows` of the rows to copy, or None for all rows.
        flat: (U * D,), the blocks: for each rank, its columns of all copied rows.
        count: the number of rows to copy (U).
        group_size: the number of ranks.
        pack: whether to copy from `rows` to `flat`; otherwise from `flat` to `rows`.
    """
    width = rows.shape[1]
    if count == 0 or width == 0:
        return
    block_width = triton.cdiv(width, group_size)
    tile = choose_tile(block_width, rows.itemsize)
    grid = (triton.cdiv(count, tile.rows), triton.cdiv(width, block_width), triton.cdiv(block_width, tile.columns))
    _move_columns[grid](
        rows, rows if positions is None else positions, flat, count, width, block_width,
        PACK=pack, SELECTED=positions is not None, EVEN=width % block_width == 0,
        ROWS=tile.rows, COLUMNS=tile.columns,
    )  # fmt: skip


@on_tensor_device
def pack_columns(rows: Tensor, group_size: int, positions: Tensor | None = None) -> Tensor:
    """Copies rows into one block of columns for each rank, in a single pass. Returns the blocks in rank order, flat (U
    * D,).

    Args:
        rows: (U', D), contiguous.
        group_size: the number of ranks, over which the columns are divided.
        positions: (U,) int64, the indices of the rows to copy, or None for all.

    Raises:
        ValueError: the rows are not contiguous.
    """
    require_contiguous("pack_columns", rows=rows)
    count = rows.shape[0] if positions is None else positions.numel()
    flat = rows.new_empty((count * rows.shape[1],))
    _launch_tiles(rows, positions, flat, count, group_size, pack=True)
    return flat


@on_tensor_device
def unpack_columns(flat: Tensor, out: Tensor, group_size: int, positions: Tensor | None = None) -> Tensor:
    """Copies the blocks of columns received from each rank back into rows. Returns `out`. This is the inverse of
    `pack_columns`.

    Args:
        flat: (U * D,), contiguous, the blocks in rank order.
        out: (U', D), contiguous, written in place.
        group_size: the number of ranks, over which the columns are divided.
        positions: (U,) int64, unique: the index in `out` of each row, or None for all rows in order.

    Raises:
        ValueError: `flat` or `out` is not contiguous.
    """
    require_contiguous("unpack_columns", flat=flat, out=out)
    count = out.shape[0] if positions is None else positions.numel()
    _launch_tiles(out, positions, flat, count, group_size, pack=False)
    return out
