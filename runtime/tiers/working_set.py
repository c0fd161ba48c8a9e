"""The rows of a table that are in memory: which they are, and where; all others lie in a file, or are as they began.

Contract
    Rows have *slots*. A slot holds what the table and its optimizer have of a row, in one tensor for each of them.
    A row that has never been written takes no room anywhere: its values are computed again.
    `places` returns slots that hold good until the next call of it: nothing else moves a row.

Shape legend: V' rows; S slots; K ids, in any order, some the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from embrace_fx.runtime.tiers.record_file import CHECK_BYTES, RecordFile, TierError

WEIGHTS, TAKEN = "weights", "steps taken"
"""Columns that every table has."""
_FREE = torch.iinfo(torch.int64).max
_SHARE = 64
"""Of all slots, so many parts: one of them is emptied at a time, those used least lately."""
ROW_BYTES = 4
"""Of a row in memory that has no slot: where it is."""
SLOT_BYTES = 8 + 8 + 2
"""Of a slot, besides its columns."""


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


@dataclass
class Counts:
    """What a working set has done: rows asked for, found in memory, read, written, begun anew."""

    asked: int = 0
    missed: int = 0
    read: int = 0
    written: int = 0


class WorkingSet:
    """The rows of a table's part that are in memory.

    Args:
        table: its name.
        rows: of the part.
        slots: of rows in memory.
        columns: what there is of a row; `WEIGHTS` begin as `initial` says.
        initial: ids (K,) -> their first values (K, d).
        directory: where the file is made.

    Attributes:
        columns: name -> (S, ...), the slots' values.
        row_of: (S,) which row is in a slot; -1: none.
    """

    def __init__(
        self,
        table: str,
        rows: int,
        slots: int,
        columns: Mapping[str, Column],
        initial: Callable[[Tensor], Tensor],
        directory: str | Path,
    ) -> None:
        self._table, self.slots, self._of, self._initial = table, slots, columns, initial
        self.record_bytes = -(-(CHECK_BYTES + sum(c.nbytes for c in columns.values())) // 8) * 8
        self.file = RecordFile(directory, table, rows, self.record_bytes)
        self.columns = {key: torch.full((slots, *c.size), c.fill, dtype=c.dtype) for key, c in columns.items()}
        self.counts = Counts()
        self.row_of = torch.full((slots,), -1, dtype=torch.int64)
        self._where = torch.zeros(rows, dtype=torch.int32)  # 0: as it began; -1: in the file; s + 1: in slot s
        self._used = torch.full((slots,), _FREE, dtype=torch.int64)  # when a slot was last asked for
        self._dirty = torch.zeros(slots, dtype=torch.bool)
        self._stored = torch.zeros(slots, dtype=torch.bool)  # the file has a record of the row
        self._free = torch.arange(slots)
        self._clock = 0

    def places(self, ids: Tensor, *, to_write: bool = False) -> Tensor:
        """The slots (K,) of rows, which are brought there where they are not yet.

        Raises:
            TierError: a row cannot be read, or another one written; or there are too few slots.
        """
        where = self._where.index_select(0, ids)
        self._clock += 1
        self.counts.asked += ids.numel()
        missing = where <= 0
        if bool(missing.any()):
            self._used.index_fill_(0, where[~missing].to(torch.int64).sub_(1), self._clock)
            new = ids[missing].unique()
            self.counts.missed += new.numel()
            room = self._room(new.numel(), ids)
            try:
                self._load(new, room)
            except TierError:
                self._free = torch.cat([self._free, room])
                raise
            where = self._where.index_select(0, ids)
        slots = where.to(torch.int64).sub_(1)
        self._used.index_fill_(0, slots, self._clock)
        if to_write:
            self._dirty.index_fill_(0, slots, True)
        return slots

    def wrote(self, slots: Tensor) -> None:
        """Notes that what is in slots differs from what the file has of it."""
        self._dirty.index_fill_(0, slots, True)

    def store(self, first: int, values: Mapping[str, Tensor]) -> None:
        """Writes rows from `first` on, none of which has a slot, into the file: columns (K, ...), or what they fill."""
        count = values[WEIGHTS].shape[0]
        rows = torch.arange(first, first + count)
        filled = {
            key: values[key] if key in values else torch.full((count, *c.size), c.fill, dtype=c.dtype)
            for key, c in self._of.items()
        }
        self.file.write(rows, self._packed(filled))
        self._where[first : first + count] = -1

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes."""
        own = (self.row_of, self._where, self._used, self._dirty, self._stored)
        return sum(each.nbytes for each in (*own, *self.columns.values()))

    # -- moving rows ---------------------------------------------------------------------------------------------------

    def _room(self, count: int, ids: Tensor) -> Tensor:
        """Takes (count,) free slots."""
        short = count - self._free.numel()
        if short > 0:
            wanted = min(self.slots, max(short, self.slots // _SHARE))
            last, oldest = self._used.topk(wanted, largest=False)
            oldest = oldest[last < self._clock]  # no slot that this call has asked for, and no free one
            if oldest.numel() < short:
                raise TierError(
                    f"expected a working set of {self._table} that holds the rows which a step reads or writes at "
                    f"once, found {self.slots:,} rows of memory for {ids.unique().numel():,}. Raise table_memory, or "
                    "make batches smaller."
                )
            self._evict(oldest)
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def _evict(self, slots: Tensor) -> None:
        """Empties slots; rows that have been written go to the file first."""
        rows, order = self.row_of.index_select(0, slots).sort()
        slots = slots.index_select(0, order)
        dirty = self._dirty.index_select(0, slots)
        if bool(dirty.any()):
            written = slots[dirty]
            self.file.write(
                rows[dirty], self._packed({key: c.index_select(0, written) for key, c in self.columns.items()})
            )
            self.counts.written += written.numel()
            self._stored.index_fill_(0, written, True)
        self._where.index_copy_(0, rows, self._stored.index_select(0, slots).to(torch.int32).neg_())
        self.row_of.index_fill_(0, slots, -1)
        self._used.index_fill_(0, slots, _FREE)
        self._free = torch.cat([self._free, slots])

    def _load(self, rows: Tensor, slots: Tensor) -> None:
        """Brings rows, ascending, into free slots."""
        stored = self._where.index_select(0, rows) < 0
        if bool(stored.any()):
            records = self.file.read(rows[stored])
            self._unpack(records, slots[stored])
            self.counts.read += records.shape[0]
        fresh = slots[~stored]
        if fresh.numel():
            for key, column in self.columns.items():
                if key == WEIGHTS:
                    column.index_copy_(0, fresh, self._initial(rows[~stored]))
                else:
                    column.index_fill_(0, fresh, self._of[key].fill)
        self._where.index_copy_(0, rows, (slots + 1).to(torch.int32))
        self.row_of.index_copy_(0, slots, rows)
        self._dirty.index_fill_(0, slots, False)
        self._stored.index_copy_(0, slots, stored)

    def _packed(self, values: Mapping[str, Tensor]) -> Tensor:
        """Records (K, B) of columns (K, ...)."""
        count = values[WEIGHTS].shape[0]
        records = torch.zeros((count, self.record_bytes), dtype=torch.uint8)
        at = CHECK_BYTES
        for key, column in self._of.items():
            value = values[key].contiguous().view(count, -1)
            if column.nbytes:
                records[:, at : at + column.nbytes] = value.view(torch.uint8)
            at += column.nbytes
        return records

    def _unpack(self, records: Tensor, slots: Tensor) -> None:
        at = CHECK_BYTES
        for key, column in self._of.items():
            if column.nbytes:
                value = (
                    records[:, at : at + column.nbytes].clone(memory_format=torch.contiguous_format).view(column.dtype)
                )
                self.columns[key].index_copy_(0, slots, value.view(-1, *column.size))
            at += column.nbytes
