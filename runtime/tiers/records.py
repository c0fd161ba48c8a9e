"""Records: what there is of a row in columns, as bytes with a checksum.

Shape legend: K records of B bytes, B a multiple of 8. The first 8 are the checksum's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_GOLDEN = 0x1E3779B97F4A7C15
"""An odd number whose multiples are spread over all words."""
_CHECK_BYTES = 8


@dataclass(frozen=True)
class Column:
    """What a row has in one tensor.

    Attributes:
        size: of one row.
        fill: what it begins with.
    """

    size: tuple[int, ...]
    dtype: torch.dtype
    fill: float = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of a row."""
        return torch.Size(self.size).numel() * self.dtype.itemsize

    def filled(self, count: int) -> Tensor:
        """The column of (count,) rows as they begin."""
        return torch.full((count, *self.size), self.fill, dtype=self.dtype, device="cpu")


class Records:
    """The records of rows with these columns."""

    def __init__(self, columns: Mapping[str, Column]) -> None:
        self.columns = dict(columns)
        self.nbytes = -(-(_CHECK_BYTES + sum(c.nbytes for c in columns.values())) // 8) * 8
        words = torch.arange(1, self.nbytes // 8, dtype=torch.int64, device="cpu")
        self._factors = (words * _GOLDEN).bitwise_or_(1)

    def pack(self, rows: Tensor, values: Mapping[str, Tensor]) -> Tensor:
        """Records (K, B) uint8 of rows (K,) whose columns have these values (K, ...)."""
        count = rows.numel()
        records = torch.zeros((count, self.nbytes), dtype=torch.uint8, device="cpu")
        at = _CHECK_BYTES
        for key, column in self.columns.items():
            if column.nbytes and count:
                value = values[key].contiguous().view(count, -1)
                records[:, at : at + column.nbytes] = value.view(torch.uint8)
            at += column.nbytes
        words = records.view(torch.int64)
        words[:, 0] = self._sums(rows, words)
        return records

    def unpack(self, records: Tensor) -> dict[str, Tensor]:
        """The columns (K, ...) of records."""
        found, at = {}, _CHECK_BYTES
        for key, column in self.columns.items():
            of_column = records[:, at : at + column.nbytes].clone(memory_format=torch.contiguous_format)
            found[key] = of_column.view(column.dtype).view(records.shape[0], *column.size)
            at += column.nbytes
        return found

    def wrong(self, rows: Tensor, records: Tensor) -> Tensor:
        """Tells of each record (K,) whether it is another one than was packed for its row."""
        words = records.view(torch.int64)
        return words[:, 0] != self._sums(rows, words)

    def _sums(self, rows: Tensor, words: Tensor) -> Tensor:
        """Checksums (K,): each word has a factor of its own, so that no single word can change unseen; never 0."""
        sums: Tensor = (words[:, 1:] * self._factors).sum(1).add_((rows + 1) * _GOLDEN).bitwise_or_(1)
        return sums
