"""Packs a row's id, weights and optimizer state as a record: bytes with a checksum.

Shape legend: K records of B bytes, B a multiple of 8: the checksum, the row id, and each column padded to 8 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_GOLDEN = 0x1E3779B97F4A7C15
"""An odd number whose multiples are spread over all 64-bit words."""
WEIGHTS, TAKEN = "weights", "steps taken"
"""Columns that every table has."""
_WORD = 8
_HEAD = 2 * _WORD


@dataclass(frozen=True)
class Column:
    """Describes a tensor with one entry per row (weights or optimizer state), by an entry's shape and initial value."""

    size: tuple[int, ...]
    dtype: torch.dtype
    fill: float = 0.0

    @property
    def nbytes(self) -> int:
        """The bytes of one row's entry."""
        return torch.Size(self.size).numel() * self.dtype.itemsize

    def filled(self, count: int, device: torch.device | str = "cpu") -> Tensor:
        """Returns the initial values (`count`, ...) of the entries of `count` rows."""
        return torch.full((count, *self.size), self.fill, dtype=self.dtype, device=device)


class Records:
    """The format of a record: the bytes of a row's id, of its columns and of a checksum."""

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
        """Packs rows (K,) with these columns' values (K, ...) as records (K, B), uint8."""
        return self.sign(self.place(values), rows)

    def place(self, values: Mapping[str, Tensor], into: Tensor | None = None) -> Tensor:
        """Packs columns' values (K, ...) as records (K, B), on the columns' device, without row ids and checksums,
        which `sign` adds. Missing columns get their initial values. Fills `into` if given.
        """
        like = next(iter(values.values()))
        records = torch.zeros((len(like), self.nbytes), dtype=torch.uint8, device=like.device) if into is None else into
        for key, of_column in self.unpack(records).items():
            if key in values:
                of_column.copy_(values[key])
            else:
                of_column.fill_(self.columns[key].fill)
        return records

    def sign(self, records: Tensor, rows: Tensor) -> Tensor:
        """Writes row ids (K,) and checksums into records (K, B), in place, and returns the records."""
        words = records.view(torch.int64)
        words[:, 1] = rows
        words[:, 0] = self._sums(words)
        return records

    def unpack(self, records: Tensor) -> dict[str, Tensor]:
        """Returns the columns of records as views (K, ...)."""
        found = {}
        for key, column in self.columns.items():
            of_column = records[:, self._at[key] : self._at[key] + column.nbytes]
            found[key] = of_column.view(column.dtype).view(records.shape[0], *column.size)
        return found

    def rows(self, records: Tensor) -> Tensor:
        """Returns the row ids (K,) of records."""
        return records.view(torch.int64)[:, 1]

    def wrong(self, records: Tensor) -> Tensor:
        """Returns a mask (K,) that is True for records whose checksum is wrong."""
        words = records.view(torch.int64)
        return words[:, 0] != self._sums(words)

    def _sums(self, words: Tensor) -> Tensor:
        """Computes the checksums (K,) of 64-bit words: never 0, and different after a change of any one word."""
        return words[:, 1:].mv(self._factors).bitwise_or_(1)
