"""Sums rows of equal ids.

`coalesce` sorts the ids and assigns every sum to one program, which adds its rows in rank order, so that the bits do
not depend on timing. Hashing the ids instead would still need a sort of each sum's members to keep that order, and
would gain
little: a rank sends no id twice, so at least R / N of R rows are sums, and most bytes are rows, not ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from embrace_fx.runtime.kernels.among import among
from embrace_fx.runtime.kernels.gpu.tiles import on_its_device, refuse_strided, sum_type, tile_of


# One program per tile of sums: no atomics, each sum stored once. Sums of a tile are as long as its longest, at most one
# row per rank; what a shorter one lacks is masked and costs no traffic.
@triton.jit(do_not_specialize=["count"])
def _sum_segments(
    rows, order, starts, ends, out, count, width: tl.constexpr, scale: tl.float64,
    SUM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    segment = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    start = tl.load(starts + segment, mask=segment < count, other=0)
    length = tl.load(ends + segment, mask=segment < count, other=0) - start
    factor = tl.full((1, 1), scale, SUM)
    total = tl.zeros((ROWS, COLUMNS), SUM)
    longest = tl.max(length)
    k = 0
    while k < longest:  # not range(longest), which the interpreter of Triton 3.6 fails at
        member = tl.load(order + start + k, mask=k < length, other=0)
        inside = (k < length)[:, None] & (column < width)[None, :]
        total += factor * tl.load(rows + member[:, None] * width + column[None, :], mask=inside, other=0.0).to(SUM)
        k += 1
    inside = (segment < count)[:, None] & (column < width)[None, :]
    tl.store(out + segment[:, None] * width + column[None, :], total.to(out.dtype.element_ty), mask=inside)


@on_its_device
def coalesce(ids: Tensor, flat: Tensor, columns: int, padding_rows: Sequence[int], scale: float) -> list[Tensor]:
    """Sums the rows of equal ids, times `scale`: [ids (K,) sorted, rows (K, d)]. Leaves out padding rows.

    The host waits once, for the number K. The sort is torch's stable sort.

    Args:
        ids: (R,) int64, from 0.
        flat: (R * d,), contiguous: the rows in the order of the ids.
        columns: d.
        padding_rows: the ids to leave out.

    Raises:
        ValueError: `flat` is not contiguous.
    """
    refuse_strided("coalesce", flat=flat)
    in_order, order = ids.sort(stable=True)
    first = in_order.diff(prepend=in_order.new_full((1,), -1)) != 0
    if padding_rows:
        first &= ~among(in_order, tuple(padding_rows))
    starts = first.nonzero().view(-1)
    unique = in_order[starts]
    ends = torch.searchsorted(in_order, unique, right=True)
    out = flat.new_empty((unique.numel(), columns))
    if out.numel():
        tile = tile_of(columns, flat.itemsize)
        _sum_segments[tile.grid(*out.shape)](
            flat, order, starts, ends, out, out.shape[0], columns, scale,
            SUM=sum_type(flat.dtype), ROWS=tile.rows, COLUMNS=tile.columns,
        )  # fmt: skip
    return [unique, out]
