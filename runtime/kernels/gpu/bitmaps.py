"""Bitmaps: of the blocks that are not zero (OmniReduce, SIGCOMM 2021), of the ids a server has (Zen, OSDI 2025).

A bit is 1 of 8 in a byte, the lowest first: id p of an index set is bit p % 8 of byte p // 8.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from embrace_fx.runtime.kernels.gpu.tiles import on_its_device, refuse_strided, sum_type, tile_of

_BYTES = 128
"""Bytes of a bitmap that one program makes or reads: 1,024 ids."""


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


# One program makes whole bytes, each bit by a search among the sorted ids: no atomics, no bit array in between. The
# steps of the searches of a program go to neighbouring ids, which the caches hold.
@triton.jit(do_not_specialize=["size", "count", "steps"])
def _hash_bitmap(ids, index_set, bitmap, size, count, steps, BYTES: tl.constexpr):
    byte = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    bit = tl.arange(0, 8)
    at = byte[:, None] * 8 + bit[None, :]
    wanted = tl.load(index_set + at, mask=at < size, other=-1)
    low = tl.zeros((BYTES, 8), tl.int64)
    high = tl.zeros((BYTES, 8), tl.int64) + count
    step = 0
    while step < steps:  # not range(steps), which the interpreter of Triton 3.6 fails at
        open_ = low < high
        middle = (low + high) // 2
        less = tl.load(ids + middle, mask=open_, other=0) < wanted
        low = tl.where(open_ & less, middle + 1, low)
        high = tl.where(open_ & (less == 0), middle, high)
        step += 1
    has = (tl.load(ids + low, mask=(at < size) & (low < count), other=-2) == wanted).to(tl.int32)
    tl.store(bitmap + byte, tl.sum(has << bit[None, :], axis=1).to(tl.uint8), mask=byte * 8 < size)


@on_its_device
def hash_bitmap(ids: Tensor, index_set: Tensor) -> Tensor:
    """(ceil(I / 8),) uint8: bit p % 8 of byte p // 8 is set where `ids` has the p-th of `index_set`.

    Args:
        ids: (K,) int64, contiguous, some of the index set, ascending.
        index_set: (I,) int64, contiguous, from 0, ascending.

    Raises:
        ValueError: an argument is not contiguous.
    """
    refuse_strided("hash_bitmap", ids=ids, index_set=index_set)
    bitmap = torch.empty((triton.cdiv(index_set.numel(), 8),), dtype=torch.uint8, device=ids.device)
    if bitmap.numel():
        _hash_bitmap[(triton.cdiv(bitmap.numel(), _BYTES),)](
            ids, index_set, bitmap, index_set.numel(), ids.numel(), ids.numel().bit_length(), BYTES=_BYTES
        )
    return bitmap


@triton.jit
def _set_bits(bitmap, size, BYTES: tl.constexpr):
    """Returns the positions a program reads, and which of them are set."""
    at = tl.program_id(0).to(tl.int64) * (BYTES * 8) + tl.arange(0, BYTES * 8)
    byte = tl.load(bitmap + at // 8, mask=at < size, other=0).to(tl.int32)
    return at, (byte >> (at % 8).to(tl.int32)) & 1


# Two passes over the bitmap, which is a 64th of the ids it stands for: how many each program finds, then, from the
# running sum, where it writes them. A single pass would have programs wait for each other.
@triton.jit(do_not_specialize=["size"])
def _count_bits(bitmap, counts, size, BYTES: tl.constexpr):
    _, bits = _set_bits(bitmap, size, BYTES)
    tl.store(counts + tl.program_id(0), tl.sum(bits, axis=0).to(tl.int64))


@triton.jit(do_not_specialize=["size"])
def _ids_of_bitmap(bitmap, index_set, ends, out, size, BYTES: tl.constexpr):
    at, bits = _set_bits(bitmap, size, BYTES)
    found = tl.load(index_set + at, mask=bits != 0, other=0)
    start = tl.load(ends + tl.program_id(0)) - tl.sum(bits, axis=0)
    tl.store(out + start + tl.cumsum(bits, axis=0) - 1, found, mask=bits != 0)


@on_its_device
def ids_of_bitmap(bitmap: Tensor, index_set: Tensor) -> Tensor:
    """Inverse of `hash_bitmap`; bytes beyond the index set are padding and not read. The host waits once, for K.

    Raises:
        ValueError: an argument is not contiguous.
    """
    refuse_strided("ids_of_bitmap", bitmap=bitmap, index_set=index_set)
    size = index_set.numel()
    if size == 0:
        return index_set[:0]
    programs = triton.cdiv(size, 8 * _BYTES)
    counts = torch.empty((programs,), dtype=torch.int64, device=bitmap.device)
    _count_bits[(programs,)](bitmap, counts, size, BYTES=_BYTES)
    ends = counts.cumsum(0)
    out = index_set.new_empty((int(ends[-1]),))
    _ids_of_bitmap[(programs,)](bitmap, index_set, ends, out, size, BYTES=_BYTES)
    return out
