"""Blocks: tensors cut into pieces of equal length, of which only the non-zero ones are kept.

The pieces of a dense tensor are elements (length 1), rows, or the blocks of OmniReduce (SIGCOMM 2021). Each `*_blocks`
has its inverse beside it. `block_bitmap` is the one kernel: a single pass over the tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from embrace_fx.runtime.exchanges.gradient import RowSet
from embrace_fx.runtime.kernels import gpu

SHORT_BLOCK = 32
"""Elements, below which torch's reductions of a row are not vectorised on CPUs."""


def block_bitmap(blocks: Tensor) -> Tensor:
    """(B,) bool: which of `blocks` (B, s) have a non-zero element. NaN is non-zero; -0.0 is zero."""
    if blocks.is_cuda and gpu.takes(blocks):
        return gpu.block_bitmap(blocks)
    if blocks.shape[1] < SHORT_BLOCK:
        return (blocks != 0).any(dim=1)
    # Two passes that write next to nothing: four times as fast as one that first writes a bool for each element.
    return (blocks.amax(dim=1) != 0) | (blocks.amin(dim=1) != 0)


def cut_blocks(dense: Tensor, block_size: int) -> RowSet:
    """The non-zero blocks of `block_size` consecutive elements; zeros fill up the last one."""
    flat = dense.reshape(-1)
    if missing := -flat.numel() % block_size:
        flat = F.pad(flat, (0, missing))
    blocks = flat.view(-1, block_size)
    ids = block_bitmap(blocks).nonzero().view(-1)
    kept = gpu.lookup_pack(blocks, ids) if blocks.is_cuda and gpu.takes(blocks) else blocks.index_select(0, ids)
    return RowSet(ids, kept, blocks.shape[0])


def join_blocks(blocks: RowSet, shape: Sequence[int]) -> Tensor:
    """Inverse of `cut_blocks`: a dense tensor of that shape."""
    flat = blocks.rows.new_zeros((blocks.num_rows, blocks.width)).index_copy_(0, blocks.ids, blocks.rows).view(-1)
    return flat[: torch.Size(shape).numel()].view(torch.Size(shape))


def write_blocks_(dense: Tensor, blocks: RowSet) -> None:
    """Writes blocks into a contiguous tensor that they are cut from; the others keep what they have.

    So a mean replaces the gradient that it is the mean of, for what no rank has is zero there already: `join_blocks`
    would make a whole tensor of zeros first.
    """
    flat = dense.view(-1)
    ids, rows = blocks.ids, blocks.rows
    whole, left_over = divmod(flat.numel(), blocks.width)
    if left_over:  # zeros fill up the last block
        last = ids == whole
        flat[-left_over:] = torch.cat([flat[-left_over:].view(1, -1), rows[last, :left_over]])[-1]
        ids, rows = ids[~last], rows[~last]
    flat[: whole * blocks.width].view(whole, blocks.width).index_copy_(0, ids, rows)


def cut_row_blocks(rows: RowSet, rows_per_block: int) -> RowSet:
    """Blocks of `rows_per_block` consecutive rows, those that have any of `rows`.

    Where a block has several rows, each gets one more column: 1 for a row that is present, so that a present row of
    zeros can be told from an absent one, also after summation. With one row per block the set is its own blocks.
    """
    if rows_per_block == 1:
        return rows
    ids, block_of = torch.unique_consecutive(rows.ids // rows_per_block, return_inverse=True)
    blocks = rows.rows.new_zeros((ids.numel() * rows_per_block, rows.width + 1))
    at = block_of * rows_per_block + rows.ids % rows_per_block
    blocks[at] = F.pad(rows.rows, (0, 1), value=1.0)
    num_blocks = -(-rows.num_rows // rows_per_block)
    return RowSet(ids, blocks.view(-1, rows_per_block * (rows.width + 1)), num_blocks)


def join_row_blocks(blocks: RowSet, rows_per_block: int, num_rows: int) -> RowSet:
    """Inverse of `cut_row_blocks`."""
    if rows_per_block == 1:
        return blocks
    rows = blocks.rows.view(-1, blocks.width // rows_per_block)
    offsets = torch.arange(rows_per_block, device=rows.device)
    ids = (blocks.ids.unsqueeze(1) * rows_per_block + offsets).view(-1)
    present = rows[:, -1] > 0
    return RowSet(ids[present], rows[present, :-1], num_rows)
