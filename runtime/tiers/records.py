"""Packs a row's number and its columns as bytes with a checksum: a record.

Shape legend: K records of B bytes, B a multiple of 8: the checksum, the row, and each column in whole words of 8 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_GOLDEN = 0x1E3779B97F4A7C15
"""An odd number whose multiples are spread over all words."""
WEIGHTS, TAKEN = "weights", "steps taken"
"""Columns that every table has."""
_WORD = 8
_HEAD = 2 * _WORD


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

    def filled(self, count: int, device: torch.device | str = "cpu") -> Tensor:
        """Returns the column of (count,) rows as they begin."""
        return torch.full((count, *self.size), self.fill, dtype=self.dtype, device=device)


class Records:
    """The records of rows with these columns."""

    def __init__(self, columns: Mapping[str, Column]) -> None:
        self.columns = dict(columns)
        self._at: dict[str, int] = {}
        at = _HEAD
        for key, column in columns.items():
            self._at[key] = at
            at += -(-column.nbytes // _WORD) * _WORD
        self.nbytes = at
        words = torch.arange(1, self.nbytes // _WORD, dtype=torch.int64, device="cpu")
        self._factors = (words * _GOLDEN).bitwise_or_(1)

    def pack(self, rows: Tensor, values: Mapping[str, Tensor]) -> Tensor:
        """Packs records (K, B) uint8 of rows (K,) whose columns have these values (K, ...)."""
        return self.sign(self.place(values), rows)

    def place(self, values: Mapping[str, Tensor], into: Tensor | None = None) -> Tensor:
        """The same on the values' device, without rows and checksums; in memory for records, if that is given."""
        like = next(iter(values.values()))
        records = torch.zeros((len(like), self.nbytes), dtype=torch.uint8, device=like.device) if into is None else into
        for key, of_column in self.unpack(records).items():
            of_column.copy_(values[key])
        return records

    def sign(self, records: Tensor, rows: Tensor) -> Tensor:
        """Puts rows (K,) and checksums into records, in place."""
        words = records.view(torch.int64)
        words[:, 1] = rows
        words[:, 0] = self._sums(words)
        return records

    def unpack(self, records: Tensor) -> dict[str, Tensor]:
        """Returns views (K, ...) of the columns of records."""
        found = {}
        for key, column in self.columns.items():
            of_column = records[:, self._at[key] : self._at[key] + column.nbytes]
            found[key] = of_column.view(column.dtype).view(records.shape[0], *column.size)
        return found

    def rows(self, records: Tensor) -> Tensor:
        """Returns the rows (K,) of records."""
        return records.view(torch.int64)[:, 1]

    def wrong(self, records: Tensor) -> Tensor:
        """Tells, (K,), which records differ from what was packed."""
        words = records.view(torch.int64)
        return words[:, 0] != self._sums(words)

    def _sums(self, words: Tensor) -> Tensor:
        """Computes checksums (K,), never 0; each word has its own factor, so that any change of one word is seen."""
        return words[:, 1:].mv(self._factors).bitwise_or_(1)
