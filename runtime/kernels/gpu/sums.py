"""Triton kernels that sum rows with equal ids.

`find_segments` sorts the ids. `sum_segments` gives each sum to one program, which adds its rows in the order in which
they came: rank after rank, so that the bits do not depend on timing. A hash of the ids instead of the sort would still
have to sort the rows of each sum to keep that order, and would gain little: a rank sends no id twice, so at least R / N
of R rows are sums, and most bytes are in the rows, not the ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from embrace_fx.runtime.kernels.gpu.tiles import choose_tile, on_tensor_device, require_contiguous, sum_type
from embrace_fx.runtime.kernels.membership import isin


# One program computes each tile of sums, without atomics, and stores each sum once. It runs as many rounds as the
# tile's longest sum has rows, at most one per rank. Shorter sums are masked in the last rounds, which costs no memory
# traffic.
@triton.jit(do_not_specialize=["count"])
def _sum_segments(
    rows, order, starts, ends, out, count, width: tl.constexpr, scale: tl.float64,
    SUM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Triton kernel: writes one tile of the scaled sums of rows.

    Args:
        rows: the rows (R, d).
        order, starts, ends: as in `Segments`.
        out: the sums (K, d), written.
        count: the number of sums (K).
        width: the columns of a row (d).
        scale: the factor of all sums.
        SUM: the dtype in which to add.
        ROWS, COLUMNS: the size of a tile.
    """
    segment = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    start = tl.load(starts + segment, mask=segment < count, other=0)
    length = tl.load(ends + segment, mask=segment < count, other=0) - start
    factor = tl.full((1, 1), scale, SUM)
    total = tl.zeros((ROWS, COLUMNS), SUM)
    longest = tl.max(length)
    k = 0
    while k < longest:  # not range(longest), at which the interpreter of Triton 3.6 fails
        member = tl.load(order + start + k, mask=k < length, other=0)
        inside = (k < length)[:, None] & (column < width)[None, :]
        total += factor * tl.load(rows + member[:, None] * width + column[None, :], mask=inside, other=0.0).to(SUM)
        k += 1
    inside = (segment < count)[:, None] & (column < width)[None, :]
    tl.store(out + segment[:, None] * width + column[None, :], total.to(out.dtype.element_ty), mask=inside)


Segments = tuple[Tensor, Tensor, Tensor, Tensor]
"""Ids (K,) of sums, sorted; the order (R,) that sorts the rows; where in it each sum's rows start and end, (K,)."""


def find_segments(ids: Tensor, padding_rows: Sequence[int]) -> Segments:
    """Finds which rows are summed (those with equal ids). The host waits once, for the number of sums.

    Args:
        ids: (R,) int64, the id of each row.
        padding_rows: ids to leave out.
    """
    in_order, order = ids.sort(stable=True)
    first = in_order.diff(prepend=in_order.new_full((1,), -1)) != 0
    if padding_rows:
        first &= ~isin(in_order, tuple(padding_rows))
    starts = first.nonzero().view(-1)
    unique = in_order[starts]
    return unique, order, starts, torch.searchsorted(in_order, unique, right=True)


def known_segments(ids: Tensor, number: Tensor) -> Segments:
    """Finds which rows are summed, if the ids of the sums are known.

    Args:
        ids: (K,) the ids of the sums.
        number: (R,) the number of the sum to which each row is added.
    """
    in_order, order = number.sort(stable=True)
    bounds = torch.searchsorted(in_order, torch.arange(len(ids) + 1, device=ids.device))
    return ids, order, bounds[:-1], bounds[1:]


@on_tensor_device
def sum_segments(flat: Tensor, found: Segments, columns: int, scale: float) -> list[Tensor]:
    """Sums rows and multiplies them by `scale`. Returns sorted ids (K,) and sums (K, d).

    Args:
        flat: (R * d,), contiguous: the rows, in the order of their ids.
        columns: the width d of a row.
        found: the result of `find_segments` or `known_segments`.

    Raises:
        ValueError: `flat` is not contiguous.
    """
    require_contiguous("sum_segments", flat=flat)
    unique, order, starts, ends = found
    out = flat.new_empty((unique.numel(), columns))
    if out.numel():
        tile = choose_tile(columns, flat.itemsize)
        _sum_segments[tile.grid(*out.shape)](
            flat, order, starts, ends, out, out.shape[0], columns, scale,
            SUM=sum_type(flat.dtype), ROWS=tile.rows, COLUMNS=tile.columns,
        )  # fmt: skip
    return [unique, out]
