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
    """Triton kernel: computes one tile of the scaled sums of groups of rows.

    Args:
        rows: (R, d), the rows to sum.
        order: (R,), a permutation of row indices in which the rows of each group are consecutive.
        starts, ends: (K,), where each group starts and ends in `order`.
        out: (K, d), the sums, written.
        count: the number of groups (K).
        width: the number of columns of a row (d).
        scale: the factor by which every sum is multiplied.
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
    """Groups rows by id, so that the rows of each group can be summed. The host synchronizes with the GPU once, to get
    the number of groups (K).

    Args:
        ids: (R,) int64, the id of each row.
        padding_rows: ids to leave out.

    Returns:
        (unique ids (K,), sorted; the permutation (R,) that sorts the rows by id; the index in the permutation at which
            each group starts (K,); the index at which it ends (K,)).
    """
    in_order, order = ids.sort(stable=True)
    first = in_order.diff(prepend=in_order.new_full((1,), -1)) != 0
    if padding_rows:
        first &= ~isin(in_order, tuple(padding_rows))
    starts = first.nonzero().view(-1)
    unique = in_order[starts]
    return unique, order, starts, torch.searchsorted(in_order, unique, right=True)


def known_segments(ids: Tensor, number: Tensor) -> Segments:
    """Groups rows like `find_segments`, and returns the same tuple, if each row's group is already known.

    Args:
        ids: (K,), the id of each group.
        number: (R,), the index of the group to which each row belongs.
    """
    in_order, order = number.sort(stable=True)
    bounds = torch.searchsorted(in_order, torch.arange(len(ids) + 1, device=ids.device))
    return ids, order, bounds[:-1], bounds[1:]


@on_tensor_device
def sum_segments(flat: Tensor, found: Segments, columns: int, scale: float) -> list[Tensor]:
    """Sums the rows of each group and multiplies the sums by `scale`. Returns [ids of the groups (K,), sums (K, d)].

    Args:
        flat: (R * d,), contiguous: the rows, in the order in which they were grouped.
        found: the groups, returned by `find_segments` or `known_segments`.
        columns: the number of columns of a row (d).

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
