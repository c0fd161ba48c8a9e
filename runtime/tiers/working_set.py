"""The rows of a table that are in memory: which they are, and where; all others lie in a file, or are as they began.

Contract
    Rows have *slots*. A slot holds what the table and its optimizer have of a row, in one tensor for each of them.
    A row that has never been written takes no room anywhere: its values are computed again.
    `places` returns slots that hold good until the next call of it: nothing else moves a row.

Shape legend: V' rows; S slots; K ids, in any order, some the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path

import torch
from torch import Tensor

from embrace_fx.runtime.launch.recorder import Recorder
from embrace_fx.runtime.tiers.file_thread import FileThread, ReadAhead
from embrace_fx.runtime.tiers.initial import FirstValues
from embrace_fx.runtime.tiers.record_file import RecordFile, TierError
from embrace_fx.runtime.tiers.records import Column, Records

WEIGHTS, TAKEN = "weights", "steps taken"
"""Columns that every table has."""
_STORED, _WRITTEN, _READ = -1, -2, -3
"""Of a row that has no slot: it is in the file, on its way there, or on its way from there."""
_FREE = torch.iinfo(torch.int64).max
_SOON = _FREE // 2
"""Less the number of the step that asks for a row next: the farthest goes first, after all that none is known to."""
_AHEAD = 8
"""Of all slots, so many parts: as many rows as one of them has may be on their way."""
_SHARE = 64
"""Of all slots, so many parts: one of them is emptied at a time, those used least lately."""
ROWS_AT_ONCE = 1 << 16
"""Of all, as they are written one after the other."""
ROW_BYTES = 4
"""Of a row in memory that has no slot: where it is."""
SLOT_BYTES = 4 * 8 + 2
"""Of a slot, besides its columns."""
ON_THEIR_WAY = 1.25
"""Times the memory of slots: that of slots and of rows on their way."""


def slot_bytes(columns: Mapping[str, Column]) -> float:
    """Bytes of memory for a row that is there, and for its share of what is on its way."""
    return (sum(column.nbytes for column in columns.values()) + SLOT_BYTES) * ON_THEIR_WAY


def least_bytes(rows: int, slots: int, columns: Mapping[str, Column]) -> int:
    """Bytes of memory that slots of a table take at most."""
    return rows * ROW_BYTES + ceil(slots * slot_bytes(columns))


@dataclass
class Counts:
    """What a working set has done: steps; rows looked up, brought there, waited for, read and written; most at once."""

    steps: int = 0
    asked: int = 0
    brought: int = 0
    missed: int = 0
    read: int = 0
    written: int = 0
    most: int = 0


class WorkingSet:
    """The rows of a table's part that are in memory.

    Args:
        table: its name.
        rows: of the part.
        slots: of rows in memory.
        columns: what there is of a row; `WEIGHTS` begin as `initial` says.
        initial: ids (K,) -> their first values (K, d).
        directory: where the file is made.
        recorder: as of `FileThread`.

    Attributes:
        initial: as given; another one after a checkpoint has been loaded.
        columns: name -> (S, ...), the slots' values.
        row_of: (S,) which row is in a slot; -1: none.
    """

    def __init__(
        self,
        table: str,
        rows: int,
        slots: int,
        columns: Mapping[str, Column],
        initial: FirstValues,
        directory: str | Path,
        recorder: Callable[[], Recorder] = Recorder,
    ) -> None:
        self._table, self.slots, self.initial = table, slots, initial
        self.records = Records(columns)
        self.file = RecordFile(directory, table, rows, self.records)
        self.columns = {key: column.filled(slots) for key, column in columns.items()}
        self.counts = Counts()
        self.row_of = torch.full((slots,), -1, dtype=torch.int64, device="cpu")
        # Of a row, 0: as it began; s + 1: in slot s; or one of those below.
        self._where = torch.zeros(rows, dtype=torch.int32, device="cpu")
        # When a slot was last asked for, or will be next.
        self._used = torch.full((slots,), _FREE, dtype=torch.int64, device="cpu")
        self._due = torch.zeros(slots, dtype=torch.int64, device="cpu")  # the last step known to read what is there
        self._asked = torch.zeros(slots, dtype=torch.int64, device="cpu")  # the last call that has asked for it
        self._thread = FileThread(table, self.file, self.records, recorder)
        self._ahead: deque[ReadAhead] = deque()
        self._step = 0
        self._dirty = torch.zeros(slots, dtype=torch.bool, device="cpu")
        self._stored = torch.zeros(slots, dtype=torch.bool, device="cpu")  # the file has a record of the row
        self._free = torch.arange(slots, device="cpu")
        self._clock = 0

    def places(self, ids: Tensor, *, to_write: bool = False) -> Tensor:
        """The slots (K,) of rows, which are brought there where they are not yet.

        Raises:
            TierError: a row cannot be read, or another one written; or there are too few slots.
        """
        where = self._where.index_select(0, ids)
        self._clock += 1
        missing = where <= 0
        if bool(missing.any()):
            self._asked.index_fill_(0, where[~missing].to(torch.int64).sub_(1), self._clock)
            if bool((where == _READ).any()):
                self._land(ids)
                where = self._where.index_select(0, ids)
                missing = where <= 0
                self._asked.index_fill_(0, where[~missing].to(torch.int64).sub_(1), self._clock)
        if bool(missing.any()):
            new = ids[missing].unique()
            self.counts.missed += int(missing.sum())
            self.counts.most = max(self.counts.most, new.numel())
            room = self._room(new.numel(), ids)
            try:
                self._load(new, room)
            except TierError:
                self._free = torch.cat([self._free, room])
                raise
            where = self._where.index_select(0, ids)
        slots = where.to(torch.int64).sub_(1)
        self._asked.index_fill_(0, slots, self._clock)
        due = self._due.index_select(0, slots)
        self._used.index_copy_(0, slots, torch.where(due > self._step, _SOON - due, self._clock))
        if to_write:
            self._dirty.index_fill_(0, slots, True)
        return slots

    def read_ahead(self, ids: Tensor, due: int) -> None:
        """Begins to read rows (K,) that the step of number `due` will ask for, and keeps those that are in memory."""
        where = self._where.index_select(0, ids)
        slots = where[where > 0].to(torch.int64).sub_(1)
        self._due.index_fill_(0, slots, due)
        self._used.index_fill_(0, slots, _SOON - due)
        rows = ids[(where == _STORED) | (where == _WRITTEN)].unique()
        waiting = sum(each.rows.numel() for each in self._ahead)
        if rows.numel() and waiting + rows.numel() <= self.slots // _AHEAD:
            self._where.index_fill_(0, rows, _READ)
            self._ahead.append(self._thread.read(rows, due))

    def begin_step(self, number: int) -> None:
        """Begins a step; what has been read for earlier ones, and not been asked for, is forgotten."""
        self._step = number
        while self._ahead and self._ahead[0].due < number:
            self._where.index_fill_(0, self._ahead.popleft().rows, _STORED)

    def _land(self, ids: Tensor) -> None:
        """Puts rows that have been read ahead into slots, until none of `ids` (K,) is among those under way."""
        while self._ahead and bool((self._where.index_select(0, ids) == _READ).any()):
            ahead = self._ahead.popleft()
            self._where.index_fill_(0, ahead.rows, _STORED)
            values = self._thread.await_read(ahead)
            may_go = (self._asked < self._clock) & (self.row_of >= 0)
            if ahead.rows.numel() <= self._free.numel() + int(may_go.sum()):
                slots = self._room(ahead.rows.numel(), ahead.rows)
                self._load(ahead.rows, slots, values)
                self._due.index_fill_(0, slots, ahead.due)
                self._used.index_fill_(0, slots, _SOON - ahead.due)

    def wrote(self, slots: Tensor) -> None:
        """Notes that what is in slots differs from what the file has of it."""
        self._dirty.index_fill_(0, slots, True)

    def store(self, rows: Tensor, values: Mapping[str, Tensor]) -> None:
        """Writes rows (K,), ascending, that have no slot into the file: columns (K, ...), or what they begin with."""
        of = self.records.columns
        filled = {key: values[key] if key in values else of[key].filled(rows.numel()) for key in of}
        self.file.write(rows, self.records.pack(rows, filled))
        self._where.index_fill_(0, rows, -1)

    def moved(self) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Yields rows (K,), ascending, that differ from their first values, with their columns (K, ...)."""
        self._land_writes()
        kept = self._dirty | self._stored
        for begin in range(0, self._where.numel(), ROWS_AT_ONCE):
            where = self._where[begin : begin + ROWS_AT_ONCE].to(torch.int64)
            stored = where < 0
            in_slots = (where > 0) & kept[(where - 1).clamp_(min=0)]
            found = (stored | in_slots).nonzero().view(-1)
            if not found.numel():
                continue
            slots, from_file = (where.index_select(0, found) - 1).clamp_(min=0), stored.index_select(0, found)
            values = {key: column.index_select(0, slots) for key, column in self.columns.items()}
            if bool(from_file.any()):
                read = self.records.unpack(self.file.read(found[from_file] + begin))
                for key, value in read.items():
                    values[key][from_file] = value
            yield found + begin, values

    def forget(self) -> None:
        """Makes all rows what they began as."""
        self._land_writes()
        self._ahead.clear()
        self.row_of.fill_(-1)
        self._where.zero_()
        self._due.zero_()
        self._used.fill_(_FREE)
        self._free = torch.arange(self.slots, device="cpu")

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes."""
        own = (self.row_of, self._where, self._used, self._due, self._asked, self._dirty, self._stored)
        return sum(each.nbytes for each in (*own, *self.columns.values()))

    @property
    def told(self) -> str:
        """What it has done, for a report."""
        counts, steps = self.counts, max(self.counts.steps, 1)
        found, waited = (n / max(counts.asked, 1) for n in (counts.asked - counts.brought, counts.missed))
        read, written = (n * self.records.nbytes / steps / 2**20 for n in (counts.read, counts.written))
        return (
            f"{self._table}: {self.slots:,} of {self._where.numel():,} rows in memory, {self.nbytes / 2**20:,.2f} MiB; "
            f"{found:.1%} of the rows looked up were there, {waited:.1%} were waited for; {read:,.3f} MiB read and "
            f"{written:,.3f} written a step"
        )

    # -- moving rows ---------------------------------------------------------------------------------------------------

    def _room(self, count: int, ids: Tensor) -> Tensor:
        """Takes (count,) free slots."""
        short = count - self._free.numel()
        if short > 0:
            wanted = min(self.slots, max(short, self.slots // _SHARE))
            may_go = torch.where(self._asked < self._clock, self._used, _FREE)
            last, oldest = may_go.topk(wanted, largest=False)
            oldest = oldest[last < _FREE]
            if oldest.numel() < short:
                needed = ids.unique().numel()
                nbytes = least_bytes(self._where.numel(), needed, self.records.columns)
                raise TierError(
                    f"expected a working set of {self._table} that holds the rows which a step reads or writes at "
                    f"once, found {self.slots:,} rows of memory for {needed:,}, which take {nbytes:,} bytes. Raise "
                    "table_memory, or make batches smaller."
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
            values = {key: column.index_select(0, written) for key, column in self.columns.items()}
            self._thread.write(rows[dirty], values)
            self.counts.written += written.numel()
            self._stored.index_fill_(0, written, True)
        stored = self._stored.index_select(0, slots)
        self._where.index_copy_(0, rows, torch.where(dirty, _WRITTEN, torch.where(stored, _STORED, 0)).to(torch.int32))
        self._due.index_fill_(0, slots, 0)
        self.row_of.index_fill_(0, slots, -1)
        self._used.index_fill_(0, slots, _FREE)
        self._free = torch.cat([self._free, slots])

    def _land_writes(self) -> None:
        self._thread.land()
        self._where[self._where == _WRITTEN] = _STORED

    def _load(self, rows: Tensor, slots: Tensor, read: Mapping[str, Tensor] | None = None) -> None:
        """Brings rows, ascending, into free slots.

        Args:
            read: their columns (K, ...), where the file has been read.
        """
        where = self._where.index_select(0, rows)
        self.counts.brought += rows.numel()
        stored = where < 0
        if bool(stored.any()):
            if read is None:
                if bool((where == _WRITTEN).any()):
                    self._thread.land()
                read = self._thread.read_now(rows[stored])
            for key, value in read.items():
                self.columns[key].index_copy_(0, slots[stored], value)
            self.counts.read += int(stored.sum())
        fresh = slots[~stored]
        if fresh.numel():
            for key, column in self.columns.items():
                if key == WEIGHTS:
                    column.index_copy_(0, fresh, self.initial(rows[~stored]))
                else:
                    column.index_fill_(0, fresh, self.records.columns[key].fill)
        self._where.index_copy_(0, rows, (slots + 1).to(torch.int32))
        self.row_of.index_copy_(0, slots, rows)
        self._used.index_fill_(0, slots, self._clock)
        self._dirty.index_fill_(0, slots, False)
        self._stored.index_copy_(0, slots, stored)
