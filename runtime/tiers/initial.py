"""Computes the initial values of rows that were never written, from a seed, the row and the column.

Each value is the sum of twelve uniform 16-bit numbers minus its mean, scaled to variance 1, which is nearly normal. The
sums are integers, so that the bits do not depend on the machine, or on the order and grouping of rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Words = NDArray[np.uint64]

_FIELDS = 12
_WORDS = _FIELDS // 4


@dataclass(frozen=True)
class InitialValues:
    """Computes the initial values of an embedding's rows from seed, row and column: normally distributed; the padding
    row is zero.

    Attributes:
        columns: the columns that this rank has, out of `width`.
    """

    columns: range
    width: int
    dtype: torch.dtype
    seed: int = 0
    padding: int | None = None

    def __call__(self, rows: Tensor) -> Tensor:
        """Computes the values (K, d) of rows (K,)."""
        found = normal_rows(rows, self.columns, self.width, self.seed, self.dtype)
        return found if self.padding is None else found.masked_fill_((rows == self.padding).unsqueeze(1), 0.0)


class InitialValuesOfTables:
    """Computes the initial values of several tables, given by their first rows in one numbering of all rows."""

    def __init__(self, tables: Mapping[int, InitialValues]) -> None:
        self.tables = dict(sorted(tables.items()))
        self._bounds = torch.tensor([*self.tables][1:], dtype=torch.int64, device="cpu")

    def __call__(self, rows: Tensor) -> Tensor:
        """Computes the values (K, d) of rows (K,)."""
        if len(self.tables) == 1:
            return next(iter(self.tables.values()))(rows)
        of, tables = torch.bucketize(rows, self._bounds, right=True), list(self.tables.items())
        found = torch.empty((len(rows), len(tables[0][1].columns)), dtype=tables[0][1].dtype, device="cpu")
        for k in of.unique().tolist():
            (first, values), own = tables[k], of == k
            found[own] = values(rows[own] - first)
        return found


def normal_rows(rows: Tensor, columns: range, width: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Computes normally distributed values (K, d) for rows (K,) and d columns of a table that is `width` columns wide.
    A value depends only on its row, its column and the seed.
    """
    along = np.arange(columns.start, columns.stop, dtype=np.uint64)
    element: Words = rows.numpy().astype(np.uint64)[:, None] * np.uint64(width) + along
    total = np.zeros(element.shape, dtype=np.int64)
    with np.errstate(over="ignore"):
        for word in range(_WORDS):
            mixed = _mix(element * np.uint64(_WORDS) + np.uint64(word + 1) + np.uint64(seed) * _STEP)
            for field in range(4):
                total += ((mixed >> np.uint64(16 * field)) & np.uint64(0xFFFF)).astype(np.int64)
    middle = _FIELDS * 0xFFFF // 2
    return torch.from_numpy((total - middle).astype(np.float64) / 65536.0).to(dtype)


_STEP = np.uint64(0x9E3779B97F4A7C15)


def _mix(counter: Words) -> Words:
    """Mixes the bits of counters with the output function of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    mixed = counter * _STEP
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
