"""The rows of a table that are in memory: which they are, and where; all others lie in a file, or are as they began.

Contract
    Rows have *slots*. A slot holds what the table and its optimizer have of a row, in one tensor for each of them.
    A row that has never been written takes no room anywhere: its values are computed again.
    `places` returns slots that hold good until the next call of it, or of `read_ahead`: nothing else moves a row.
    A thread reads and writes. Maps of rows are the caller's alone: a row has its slot as soon as it begins to come.

Shape legend: V' rows; S slots; K ids, in any order, some the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path

import torch
from torch import Tensor

from embrace_fx.runtime.launch.recorder import Recorder
from embrace_fx.runtime.tiers.file_thread import FileThread
from embrace_fx.runtime.tiers.initial import FirstValues
from embrace_fx.runtime.tiers.record_file import RecordFile, TierError
from embrace_fx.runtime.tiers.record_log import RecordLog
from embrace_fx.runtime.tiers.records import Column, Records

_FREE = torch.iinfo(torch.int64).max
_SOON = _FREE // 2
"""Less the number of the step that asks for a row next: the farthest goes first, after all that none is known to."""
_KNOWN = _SOON // 2
"""Above: slots whose next step is known."""
_AHEAD = 4
"""Of all slots, so many parts: as many rows as one of them has are read ahead at once."""
_SHARE = 64
"""Of all slots, so many parts: one of them is emptied at a time, those used least lately."""
_BLOCK_BYTES, _BLOCKS = 1 << 18, 16
"""Of the file's blocks: bytes at most, and how many of them have at least as many records as there are slots."""
_FEWEST = 8
"""Records of a block."""
ROWS_AT_ONCE = 1 << 16
"""Of all, as they are written one after the other."""
ROW_BYTES = 4
"""Of a row in memory that has no slot: where it is."""
SLOT_BYTES = 3 * 8 + 4 + 1
"""Of a slot, besides its columns."""


ON_THEIR_WAY = 1.25
"""Times the memory of slots: that of slots and of rows on their way. These are no more than a quarter: of 32 parts two
wait to be written, one is packed, two are read, two are moved in the file (`file_thread.py`)."""


def slot_bytes(columns: Mapping[str, Column]) -> float:
    """Bytes of memory for a row that is there, and for its share of what is on its way."""
    return (sum(column.nbytes for column in columns.values()) + SLOT_BYTES) * ON_THEIR_WAY


def least_bytes(rows: int, slots: int, columns: Mapping[str, Column]) -> int:
    """Bytes of memory that slots of a table take at most."""
    return rows * ROW_BYTES + ceil(slots * slot_bytes(columns))


@dataclass
class Counts:
    """Counts of a working set: steps; rows looked up, brought there, waited for, read and written; most at once."""

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
        columns: what there is of a row; weights begin as `initial` says.
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
        block = max(_FEWEST, min(_BLOCK_BYTES // self.records.nbytes, slots // _BLOCKS))
        self._make_log = partial(RecordLog, rows, max(slots, ROWS_AT_ONCE), block)
        self._log = self._make_log()
        self.file = RecordFile(directory, table, self._log.size, self.records)
        self.columns = {key: column.filled(slots) for key, column in columns.items()}
        self.counts = Counts()
        self.row_of = torch.full((slots,), -1, dtype=torch.int64, device="cpu")
        # Of a row, 0: as it began; s + 1: in slot s; -n - 1: at number n of the file.
        self._where = torch.zeros(rows, dtype=torch.int32, device="cpu")
        # The call that asked for a slot last, or, from _KNOWN on, _SOON less the step that will next.
        self._used = torch.full((slots,), _FREE, dtype=torch.int64, device="cpu")
        self._number = torch.full((slots,), -1, dtype=torch.int32, device="cpu")  # of the record of what was read
        self._dirty = torch.zeros(slots, dtype=torch.bool, device="cpu")
        self._job = torch.zeros(slots, dtype=torch.int64, device="cpu")  # which brings what is in a slot
        self._free = torch.arange(slots, device="cpu")
        self._thread = FileThread(table, self.file, self.records, self.columns, recorder)
        self._coming: deque[Future[None]] = deque()
        self._jobs = 0  # so many have begun; those that have ended are not among the coming ones
        self._step = 0
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
            self._bring_missing(ids, where, missing)
            where = self._where.index_select(0, ids)
        slots = where.to(torch.int64).sub_(1)
        self._await(slots)
        used = self._used.index_select(0, slots)
        known = (used > _KNOWN) & (used < _SOON - self._step)
        self._used.index_copy_(0, slots, torch.where(known, used, self._clock))
        if to_write:
            self._dirty.index_fill_(0, slots, True)
        return slots

    def read_ahead(self, ids: Tensor, due: int) -> None:
        """Begins to read rows (K,) that the step of number `due` will ask for, and keeps those that are in memory."""
        where = self._where.index_select(0, ids)
        missing = where <= 0
        self._used.index_fill_(0, where[~missing].to(torch.int64).sub_(1), _SOON - due)
        rows = ids[missing].unique()[: self.slots // _AHEAD]
        if rows.numel():
            self._make_room(rows.numel(), _SOON - due)
            rows = rows[: self._free.numel()]
            self._begin(rows, self._take(rows.numel()), _SOON - due)

    def begin_step(self, number: int) -> None:
        """Begins a step: what has been read for earlier ones may go."""
        self._step = number

    def wrote(self, slots: Tensor) -> None:
        """Notes that what is in slots differs from what the file has of it."""
        self._dirty.index_fill_(0, slots, True)

    def store(self, rows: Tensor, values: Mapping[str, Tensor]) -> None:
        """Writes rows (K,) that have no slot into the file: columns (K, ...), or what they begin with."""
        of = self.records.columns
        filled = {key: values[key] if key in values else of[key].filled(rows.numel()) for key in of}
        self._write(rows, filled)
        self._thread.land()

    def moved(self) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Yields rows (K,), ascending, that differ from their first values, with their columns (K, ...)."""
        self._land()
        kept = self._dirty | (self._number >= 0)
        for begin in range(0, self._where.numel(), ROWS_AT_ONCE):
            where = self._where[begin : begin + ROWS_AT_ONCE].to(torch.int64)
            stored = where < 0
            in_slots = (where > 0) & kept[(where - 1).clamp_(min=0)]
            found = (stored | in_slots).nonzero().view(-1)
            if not found.numel():
                continue
            where, stored = where.index_select(0, found), stored.index_select(0, found)
            slots = (where - 1).clamp_(min=0)
            values = {key: column.index_select(0, slots) for key, column in self.columns.items()}
            numbers, order = (-where[stored] - 1).sort()
            if numbers.numel():
                at = stored.nonzero().view(-1).index_select(0, order)
                read = self.records.unpack(self.file.read(numbers, found.index_select(0, at) + begin))
                for key, value in read.items():
                    values[key].index_copy_(0, at, value)
            yield found + begin, values

    def forget(self) -> None:
        """Makes all rows what they began as."""
        with suppress(TierError):  # of rows that are forgotten
            self._land()
        self.row_of.fill_(-1)
        self._where.zero_()
        self._used.fill_(_FREE)
        self._log = self._make_log()
        self._free = torch.arange(self.slots, device="cpu")

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes."""
        own = (self.row_of, self._where, self._used, self._job, self._number, self._dirty)
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

    def _bring_missing(self, ids: Tensor, where: Tensor, missing: Tensor) -> None:
        """Begins to bring rows (K,) that are missing, where others stay that are in slots."""
        new = ids[missing].unique()
        self.counts.missed += int(missing.sum())
        self.counts.most = max(self.counts.most, new.numel())
        stays = where[~missing].to(torch.int64).sub_(1)
        used = self._used.index_select(0, stays)
        self._used.index_fill_(0, stays, _FREE)
        self._make_room(new.numel(), _FREE)
        self._used.index_copy_(0, stays, used)
        if self._free.numel() < new.numel():
            needed = ids.unique().numel()
            nbytes = least_bytes(self._where.numel(), needed, self.records.columns)
            raise TierError(
                f"expected a working set of {self._table} that holds the rows which a step reads or writes at "
                f"once, found {self.slots:,} rows of memory for {needed:,}, which take {nbytes:,} bytes. Raise "
                "table_memory, or make batches smaller."
            )
        self._begin(new, self._take(new.numel()), self._clock)

    def _make_room(self, count: int, before: int) -> None:
        """Empties slots until so many are free, or none is left of those that are used `before`."""
        short = count - self._free.numel()
        if short <= 0:
            return
        # Of an earlier step: their gradients may be still to come, so that they go when others do that were used then.
        self._used.masked_fill_((self._used > _SOON - self._step) & (self._used < _FREE), self._clock)
        last, oldest = self._used.topk(min(self.slots, max(short, self.slots // _SHARE)), largest=False)
        for some in oldest[last < before].split(self._thread.part):
            self._evict(some)

    def _take(self, count: int) -> Tensor:
        """Takes (count,) free slots."""
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def _evict(self, slots: Tensor) -> None:
        """Empties slots; rows that have been written go to the file first."""
        self._await(slots)
        rows, number = self.row_of.index_select(0, slots), self._number.index_select(0, slots)
        dirty = self._dirty.index_select(0, slots)
        self._where.index_copy_(0, rows, -number - 1)  # 0: as it began
        if bool(dirty.any()):
            written, before = slots[dirty], number[dirty]
            self._log.give_back(before[before >= 0])
            self._where.index_fill_(0, rows[dirty], 0)
            self._write(rows[dirty], {key: column.index_select(0, written) for key, column in self.columns.items()})
            self.counts.written += written.numel()
        self.row_of.index_fill_(0, slots, -1)
        self._used.index_fill_(0, slots, _FREE)
        self._free = torch.cat([self._free, slots])

    def _write(self, rows: Tensor, values: Mapping[str, Tensor]) -> None:
        """Begins to write rows (K,), whose records, if they had any, have been given back."""
        while self._log.lacks(rows.numel()):
            self._empty_block()
        runs = self._log.take(rows.numel())
        self._where.index_copy_(0, rows, -_numbers(runs) - 1)
        self._thread.write(runs, rows, values)

    def _empty_block(self) -> None:
        """Moves the records of a block elsewhere, where they are the only ones of their rows."""
        numbers = _numbers([self._log.sparsest()])
        records = self._thread.read(numbers.to(torch.int64))
        rows = self.records.rows(records)
        where = self._where.index_select(0, rows)
        only = where == -numbers - 1
        slots = where.to(torch.int64).sub_(1).clamp_(min=0)
        copied = (where > 0) & (self._number.index_select(0, slots) == numbers)
        self._log.give_back(numbers[only | copied])
        self._number.index_fill_(0, slots[copied], -1)
        self._dirty.index_fill_(0, slots[copied], True)
        runs = self._log.take(int(only.sum()))
        self._where.index_copy_(0, rows[only], -_numbers(runs) - 1)
        self._thread.move(runs, records[only])

    def _begin(self, rows: Tensor, slots: Tensor, used: int) -> None:
        """Begins to bring rows (K,) into free slots."""
        number = -self._where.index_select(0, rows) - 1
        self.counts.brought += rows.numel()
        self.counts.read += int((number >= 0).sum())
        self._jobs += 1
        self._coming.append(self._thread.bring(rows, number, slots, self.initial))
        self._where.index_copy_(0, rows, (slots + 1).to(torch.int32))
        self.row_of.index_copy_(0, slots, rows)
        self._used.index_fill_(0, slots, used)
        self._dirty.index_fill_(0, slots, False)
        self._number.index_copy_(0, slots, number)
        self._job.index_fill_(0, slots, self._jobs)

    def _await(self, slots: Tensor) -> None:
        """Waits for what is coming into slots (K,)."""
        if self._coming and slots.numel():
            self._await_jobs(int(self._job.index_select(0, slots).max()))

    def _await_jobs(self, last: int) -> None:
        while self._coming and self._jobs - len(self._coming) < last:
            self._thread.await_rows(self._coming.popleft())

    def _land(self) -> None:
        """Waits for all that is on its way."""
        self._await_jobs(self._jobs)
        self._thread.land()


def _numbers(runs: Sequence[range]) -> Tensor:
    """The numbers (K,) of runs, as the maps of rows have them."""
    return torch.cat([torch.arange(r.start, r.stop, dtype=torch.int32, device="cpu") for r in (range(0), *runs)])
