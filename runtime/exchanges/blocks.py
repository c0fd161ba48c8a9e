"""Splits tensors into blocks of equal length, and keeps only the non-zero ones.

The pieces are rows, or the blocks of OmniReduce (SIGCOMM 2021).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from embrace_fx.cost.links import Cluster
from embrace_fx.runtime.exchanges.gradient import RowSet

SHORT_BLOCK = 32
"""Minimum elements of a row for which torch's reductions are vectorized on CPUs."""


def block_bitmap(blocks: Tensor) -> Tensor:
    """Returns a mask (B,) of the blocks (B, s) that have a non-zero element. NaN counts as non-zero, and -0.0 as
    zero.
    """
    if blocks.is_cuda:
        counts: Tensor = torch.linalg.vector_norm(blocks, 0, dim=1)  # a single pass, which writes only the result
        return counts != 0
    if blocks.shape[1] < SHORT_BLOCK:
        return (blocks != 0).any(dim=1)
    # Two passes with few writes are four times as fast as one that writes a bool per element.
    return (blocks.amax(dim=1) != 0) | (blocks.amin(dim=1) != 0)


def cut_rows(dense: Tensor, _cluster: Cluster) -> RowSet:
    """Returns the non-zero rows of a dense gradient (rows, width). Ignores the cluster."""
    return cut_blocks(dense, max(1, dense.shape[1]))


def cut_blocks(dense: Tensor, block_size: int) -> RowSet:
    """Splits a dense gradient into blocks of `block_size` consecutive elements, and returns the non-zero blocks. The
    last block is padded with zeros.
    """
    flat = dense.reshape(-1)
    if missing := -flat.numel() % block_size:
        flat = F.pad(flat, (0, missing))
    blocks = flat.view(-1, block_size)
    ids = block_bitmap(blocks).nonzero().view(-1)
    return RowSet(ids, blocks.index_select(0, ids), blocks.shape[0])


def write_blocks_(dense: Tensor, blocks: RowSet) -> None:
    """Writes blocks back to the contiguous tensor `dense` from which they were cut. Other blocks do not change.

    If `blocks` is a mean over ranks, all other blocks are already zero, so the mean replaces the gradient completely.
    """
    flat = dense.view(-1)
    ids, rows = blocks.ids, blocks.rows
    whole, left_over = divmod(flat.numel(), blocks.width)
    if left_over:  # the last block is padded with zeros
        last = ids == whole
        flat[-left_over:] = torch.cat([flat[-left_over:].view(1, -1), rows[last, :left_over]])[-1]
        ids, rows = ids[~last], rows[~last]
    flat[: whole * blocks.width].view(whole, blocks.width).index_copy_(0, ids, rows)
