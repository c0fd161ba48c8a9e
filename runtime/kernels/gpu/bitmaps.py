"""Marks the blocks that are not zero (OmniReduce, SIGCOMM 2021)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from embrace_fx.runtime.kernels.gpu.tiles import on_its_device, refuse_strided, sum_type, tile_of


# Bound by reading the tensor once: whole tiles of 128-bit loads, reduced within the program that owns the block, so
# that no two programs write one bit.
@triton.jit(do_not_specialize=["count"])
def _block_bitmap(
    blocks, out, count, width: tl.constexpr, SUM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    found = tl.zeros((ROWS, COLUMNS), tl.int1)
    for first in range(0, width, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = (block < count)[:, None] & (column < width)[None, :]
        values = tl.load(blocks + block[:, None] * width + column[None, :], mask=inside, other=0.0)
        found = found | (values.to(SUM) != 0)
    tl.store(out + block, tl.max(found.to(tl.int32), axis=1) != 0, mask=block < count)


@on_its_device
def block_bitmap(blocks: Tensor) -> Tensor:
    """(B,) bool: which of `blocks` (B, s), contiguous, have a non-zero element. NaN is non-zero; -0.0 is zero.

    Raises:
        ValueError: the blocks are not contiguous.
    """
    refuse_strided("block_bitmap", blocks=blocks)
    count, width = blocks.shape
    if blocks.numel() == 0:
        return torch.zeros((count,), dtype=torch.bool, device=blocks.device)
    out = torch.empty((count,), dtype=torch.bool, device=blocks.device)
    tile = tile_of(width, blocks.itemsize)
    _block_bitmap[(triton.cdiv(count, tile.rows),)](
        blocks,
        out,
        count,
        width,
        SUM=sum_type(blocks.dtype),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
    )
    return out
