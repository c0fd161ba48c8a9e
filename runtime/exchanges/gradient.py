"""Sparse sets of rows, in which strategies exchange gradients: rows of a gradient, or its blocks (`blocks.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class RowSet:
    """Some rows of a tensor, with their ids. The tensor's other rows are zero.

    A row in the set may also be zero. An optimizer that updates by rows still updates it.

    Attributes:
        ids: (K,) int64, unique and ascending, from 0 to num_rows - 1.
        rows: (K, d).
        num_rows: the number of rows of the whole tensor.
    """

    ids: Tensor
    rows: Tensor
    num_rows: int

    def __post_init__(self) -> None:
        if self.ids.dtype != torch.int64 or self.ids.ndim != 1 or self.rows.shape[:-1] != self.ids.shape:
            raise ValueError(
                "RowSet: ids must be an int64 tensor of shape (K,), and rows a tensor of shape (K, d). Got ids of "
                f"dtype {self.ids.dtype} and shape {tuple(self.ids.shape)}, and rows of shape {tuple(self.rows.shape)}."
            )

    @property
    def width(self) -> int:
        """The number of columns."""
        return self.rows.shape[1]


MARKED_ROWS_PER_ID = 32
"""Maximum rows of the tensor per id for which unique ids are found by marking rows instead of sorting."""


def sum_by_position(positions: Tensor, rows: Tensor, counts: Sequence[int], size: int) -> Tensor:
    """Sums rows with the same position. Adds them in rank order, so that sums are reproducible bit for bit. Returns
    (size, d).

    Sums are at least float32, because 16-bit sums would lose one bit each time the number of ranks doubles.

    Args:
        positions: (K,) from 0 to size - 1, in rank order; unique within a rank.
        rows: (K, d).
        counts: for each rank, how many of the K rows are from it.
        size: the number of positions.
    """
    total = rows.new_zeros((size, rows.shape[1]), dtype=torch.promote_types(rows.dtype, torch.float32))
    for of_rank, summand in zip(positions.split(list(counts)), rows.split(list(counts)), strict=True):
        # Make rows contiguous: copying one rank's records is five times cheaper than a strided sum.
        total.index_add_(0, of_rank, summand.contiguous().to(total.dtype))
    return total


def mean_by_id(ids: Tensor, rows: Tensor, counts: Sequence[int], num_rows: int, divisor: int) -> RowSet:
    """Averages rows with the same id. Returns one row for each id that any rank has.

    Args:
        ids: (K,) int64, in rank order; unique within a rank, but not sorted.
        rows: (K, d).
        counts: for each rank, how many of the K rows are from it.
        num_rows: the number of rows of the whole tensor.
        divisor: the number of ranks, or 1 to compute the sum.
    """
    union, positions = _unique_ids(ids, num_rows)
    total = sum_by_position(positions, rows, counts, union.numel())
    return RowSet(union, total.div_(divisor).to(rows.dtype), num_rows)


def _unique_ids(ids: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Returns the unique ids in ascending order, and for each of `ids` its position among them. All ids must be below
    `num_rows`.
    """
    if num_rows > MARKED_ROWS_PER_ID * ids.numel():
        union, positions = torch.unique(ids, return_inverse=True)
        return union, positions
    present = torch.zeros(num_rows, dtype=torch.bool, device=ids.device)
    present[ids] = True
    return present.nonzero().view(-1), (present.cumsum(0) - 1).index_select(0, ids)


def join_parts(parts: Sequence[RowSet], num_rows: int) -> RowSet:
    """Combines disjoint sets of rows of a tensor into one set. Returns a single set unchanged.

    Args:
        parts: the sets of rows.
        num_rows: the number of rows of the whole tensor.
    """
    if len(parts) == 1:
        return parts[0]
    ids, order = torch.cat([part.ids for part in parts]).sort()
    return RowSet(ids, torch.cat([part.rows for part in parts]).index_select(0, order), num_rows)
