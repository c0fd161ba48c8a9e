"""The rows of a table that are in memory: which they are, and where; all others are at rest, or as they began.

Contract
    Rows have *slots*. A slot holds what the table and its optimizer have of a row, in one tensor for each of them.
    A row that has never been written takes no room anywhere: its values are computed again.
    `places` returns slots that hold good until the next call of it, or of `read_ahead`: nothing else moves a row.
    A thread reads and writes. Maps of rows are the caller's alone: a row has its slot as soon as it begins to come.
    They are the host's. Slots may be a device's, which then has a copy of where rows are: whoever has ids there alone
    tells among which rows of the host they are (`places`).

Shape legend: V' rows; S slots; K ids, in any order, some the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embrace_fx.runtime.launch.recorder import Recorder
from embrace_fx.runtime.launch.streams import streams_of
from embrace_fx.runtime.tiers.budget import least_bytes
from embrace_fx.runtime.tiers.counts import Counts
from embrace_fx.runtime.tiers.file_thread import Come, FileThread
from embrace_fx.runtime.tiers.host_records import HostRecords
from embrace_fx.runtime.tiers.initial import FirstOfTables
from embrace_fx.runtime.tiers.record_file import RecordFile, TierError
from embrace_fx.runtime.tiers.record_log import RecordLog, block_size, numbers_of
from embrace_fx.runtime.tiers.records import Column, Records
from embrace_fx.runtime.tiers.slots import DeviceSlots, Leaving, Slots

_FREE = torch.iinfo(torch.int64).max
_SOON = _FREE // 2
"""A slot's mark, less the number of its next known step: the farthest is evicted first, after slots without one."""
_KNOWN = _SOON // 2
"""Marks above this: slots whose next step is known."""
_AHEAD, _BESIDE = 4, 12
"""Of all slots, so many parts: as many rows as one of them has are read ahead at once; into a device, where rows that
come are beside their slots until they are put there."""
_SHARE = 64
"""Slots emptied at a time, those least recently used: a 64th of all."""
ROWS_AT_ONCE = 1 << 16
"""Of all, as they are written one after the other."""


class WorkingSet:
    """The rows of a table's part that are in memory.

    Args:
        table: its name, or that of a stack, whose rows are numbered one table after the other.
        rows: of the part.
        slots: of rows in memory.
        columns: what there is of a row; weights begin as `initial` says.
        initial: what rows begin with, by the tables that they are of.
        directory: where the file is made; None: rows are at rest in the host's memory.
        recorder: as of `FileThread`.
        device: where slots are.

    Attributes:
        initial: as given; another one after a checkpoint has been loaded.
        failure: what has gone wrong with its file; "": nothing.
        columns: name -> (S, ...), the slots' values.
        step: the number of the one that has begun.
        arrived: told of slots (K,) into which rows have come, and how many steps any of them has taken at least.
        row_of: (S,) which row is in a slot; -1: none.
    """

    def __init__(
        self,
        table: str,
        rows: int,
        slots: int,
        columns: Mapping[str, Column],
        initial: FirstOfTables,
        directory: str | Path | None,
        recorder: Callable[[], Recorder] = Recorder,
        device: torch.device | str = "cpu",
    ) -> None:
        self._table, self.slots, self.initial, self.failure = table, slots, initial, ""
        self.records = Records(columns)
        device = torch.device(device)
        streams = streams_of(device)
        self.file: RecordFile | HostRecords
        self._log: RecordLog | HostRecords
        if directory is None:
            self._log = self.file = HostRecords(rows, self.records)
        else:
            self._log = RecordLog(rows, max(slots, ROWS_AT_ONCE), block_size(self.records.nbytes, slots))
            self.file = RecordFile(directory, table, self._log.size, self.records, pinned=streams is not None)
        self._slots = (
            Slots(slots, self.records) if streams is None else DeviceSlots(slots, self.records, device, streams)
        )
        self.columns = self._slots.columns
        self.counts = Counts()
        self.arrived: Callable[[Tensor, int], None] = lambda slots, taken: None
        self.row_of = torch.full((slots,), -1, dtype=torch.int64, device="cpu")
        # For each row, 0: first values; s + 1: in slot s; -n - 1: at number n of the file.
        self._where = torch.zeros(rows, dtype=torch.int32, device="cpu")
        # Of a row, on the device, s + 1: in slot s; 0: in none.
        self._on_device = None if streams is None else torch.zeros(rows, dtype=torch.int32, device=device)
        # For each slot, the last call that used it or, from _KNOWN on, _SOON less its next known step.
        self._used = torch.full((slots,), _FREE, dtype=torch.int64, device="cpu")
        self._number = torch.full((slots,), -1, dtype=torch.int32, device="cpu")  # of the record of what was read
        self._dirty = torch.zeros(slots, dtype=torch.bool, device="cpu")
        self._job = torch.zeros(slots, dtype=torch.int64, device="cpu")  # the number of the read that fills a slot
        self._free = torch.arange(slots, device="cpu")
        self._thread = FileThread(table, self.file, self.records, self._slots, slots, recorder, streams)
        self._coming: deque[tuple[Future[Come], Tensor]] = deque()  # with the slots into which rows come
        self._jobs = 0  # number of reads begun
        self.step = 0
        self._at_once = max(1, slots // (_AHEAD if streams is None else _BESIDE))
        self._clock = 0
        self._before, self._began = 0, 0  # the last calls before the step before this one, and before this one
        self._waiting: list[tuple[Tensor, int]] = []  # rows to read ahead, and their step

    def places(self, ids: Tensor, *, among: Tensor | None = None, to_write: bool = False) -> Tensor:
        """Returns the slots (K,) of rows, after bringing missing ones into memory.

        Args:
            among: rows of the host, of which ids (K,) are some, where these are a device's.

        Raises:
            TierError: a row cannot be read, or an evicted one written; or there are too few slots.
        """
        slots = self._hold(ids if among is None else among, to_write=to_write)
        if self._on_device is None:
            return slots
        return self._on_device.index_select(0, ids).to(torch.int64).sub_(1)

    def _hold(self, ids: Tensor, *, to_write: bool) -> Tensor:
        where = self._where.index_select(0, ids)
        self._clock += 1
        missing = where <= 0
        if bool(missing.any()):
            self._bring_missing(ids, where, missing)
            where = self._where.index_select(0, ids)
        slots = where.to(torch.int64).sub_(1)
        self._await(slots)
        used = self._used.index_select(0, slots)
        known = (used > _KNOWN) & (used < _SOON - self.step)
        self._used.index_copy_(0, slots, torch.where(known, used, self._clock))
        if to_write:
            self._dirty.index_fill_(0, slots, True)
        return slots

    def read_ahead(self, ids: Tensor, due: int) -> None:
        """Begins to read rows (K,) that step number `due` will look up, and keeps those in memory. What finds no room
        beside rows whose gradients may be still to come is read at a later call, that of nearer steps first."""
        waiting, self._waiting = sorted([*self._waiting, (ids, due)], key=itemgetter(1)), []
        for rows, step in waiting:
            if step > self.step:
                left = rows if self._waiting else self._read_some(rows, step)
                self._waiting += [(left, step)] if left.numel() else []

    def _read_some(self, ids: Tensor, due: int) -> Tensor:
        """Begins to read those of rows (K,) for which there is room; returns the others."""
        where = self._where.index_select(0, ids)
        missing = where <= 0
        self._used.index_fill_(0, where[~missing].to(torch.int64).sub_(1), _SOON - due)
        rows: Tensor = ids[missing].unique()
        count = min(rows.numel(), self._at_once)
        if count:
            self._make_room(count, _SOON - due, self._before)
            count = min(count, self._free.numel())
            self._begin(rows[:count], self._take(count), _SOON - due)
        return rows[count:]

    def begin_step(self, number: int) -> None:
        """Begins a step: what has been read for earlier ones may go."""
        self.step = number
        self._before, self._began = self._began, self._clock
        while self._coming and self._thread.has_come(self._coming[0][0]):
            self._await_jobs(self._jobs - len(self._coming) + 1)

    def unless_failed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A call that yields None once the file has failed: nobody would be told of an error in it."""

        def guarded(*args: Any) -> Any:
            if self.failure:
                return None
            try:
                return call(*args)
            except TierError as error:
                self.failure = str(error)
                return None

        return guarded

    def wrote(self, slots: Tensor) -> None:
        """Notes that what is in slots differs from what is at rest of it."""
        self._dirty.index_fill_(0, slots, True)

    def in_use(self, of: range) -> Tensor:
        """The slots (K,) of rows of a table that have come."""
        come = self._job <= self._jobs - len(self._coming)
        return (come & (self.row_of >= of.start) & (self.row_of < of.stop)).nonzero().view(-1)

    def to_index(self, slots: Tensor) -> Tensor:
        """Slots (K,) as the columns' ops take them."""
        return self._slots.to_index(slots)

    def store(self, rows: Tensor, values: Mapping[str, Tensor]) -> None:
        """Writes rows (K,) that have no slot into the file: columns (K, ...), or what they begin with."""
        of = self.records.columns
        filled = {key: values[key] if key in values else of[key].filled(rows.numel()) for key in of}
        self._write(rows, partial(self.records.place, filled))
        self._thread.land()

    def moved(self, of: range) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Yields rows (K,) of a table, ascending, that differ from their first values, with their columns (K, ...)."""
        self._land()
        kept = self._dirty | (self._number >= 0)
        for begin in range(of.start, of.stop, ROWS_AT_ONCE):
            where = self._where[begin : min(begin + ROWS_AT_ONCE, of.stop)].to(torch.int64)
            stored = where < 0
            in_slots = (where > 0) & kept[(where - 1).clamp_(min=0)]
            found = (stored | in_slots).nonzero().view(-1)
            if not found.numel():
                continue
            where, stored = where.index_select(0, found), stored.index_select(0, found)
            slots = (where - 1).clamp_(min=0)
            values = self.records.unpack(self._slots.leave(slots)())
            numbers, order = (-where[stored] - 1).sort()
            if numbers.numel():
                at = stored.nonzero().view(-1).index_select(0, order)
                read = self.records.unpack(self.file.read(numbers, found.index_select(0, at) + begin))
                for key, value in read.items():
                    values[key].index_copy_(0, at, value)
            yield found + begin, values

    def forget(self, of: range) -> None:
        """Makes rows of a table what they began as."""
        while self._coming:
            with suppress(TierError):  # of rows that are forgotten
                self._land()
        with suppress(TierError):
            self._thread.land()
        self.failure = ""
        where = self._where[of.start : of.stop]
        slots = where[where > 0].to(torch.int64).sub_(1)
        numbers = torch.cat([-where[where < 0] - 1, self._number.index_select(0, slots)])
        self._log.give_back(numbers[numbers >= 0])
        where.zero_()
        if self._on_device is not None:
            self._on_device[of.start : of.stop].zero_()
        self._vacate(slots)

    @property
    def num_rows(self) -> int:
        """Rows of all its tables."""
        return self._where.numel()

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes where slots are."""
        maps = [self.row_of, self._where, self._used, self._job, self._number, self._dirty]
        own = maps if self._on_device is None else [self._on_device]
        return sum(each.nbytes for each in (*own, *self.columns.values()))

    @property
    def told(self) -> str:
        """What it has done, for a report."""
        rest = ""
        if isinstance(self.file, HostRecords):
            rest = f", others in the host's, {self.file.nbytes / 2**20:,.2f} MiB once all have moved"
        return (
            f"{self._table}: {self.slots:,} of {self._where.numel():,} rows in memory, {self.nbytes / 2**20:,.2f} MiB"
            f"{rest}; {self.counts.told(self.records.nbytes)}"
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
        if self._on_device is None:
            self._begin(new, self._take(new.numel()), self._clock)
            return
        for some in new.split(self._at_once):  # a device has them twice
            self._begin(some, self._take(some.numel()), self._clock)
            self._await_jobs(self._jobs)

    def _make_room(self, count: int, before: int, last_call: int = _KNOWN) -> None:
        """Empties slots until so many are free, or none is left that is used `before`, and not since `last_call`."""
        short = count - self._free.numel()
        if short <= 0:
            return
        # Of an earlier step: their gradients may be still to come, so that they go when others do that were used then.
        self._used.masked_fill_((self._used > _SOON - self.step) & (self._used < _FREE), self._clock)
        last, oldest = self._used.topk(min(self.slots, max(short, self.slots // _SHARE)), largest=False)
        may_go = (last < before) & ((last <= last_call) | (last > _KNOWN))
        for some in oldest[may_go].split(self._thread.part):
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
        if self._on_device is not None:
            self._on_device.index_fill_(0, self._slots.to_index(rows), 0)
        if bool(dirty.any()):
            written, before = slots[dirty], number[dirty]
            self._log.give_back(before[before >= 0])
            self._where.index_fill_(0, rows[dirty], 0)
            self._write(rows[dirty], self._slots.leave(written))
            self.counts.written += written.numel()
        self._vacate(slots)

    def _vacate(self, slots: Tensor) -> None:
        """Has nobody's rows in slots."""
        self.row_of.index_fill_(0, slots, -1)
        self._used.index_fill_(0, slots, _FREE)
        self._free = torch.cat([self._free, slots])

    def _write(self, rows: Tensor, leaving: Leaving) -> None:
        """Begins to write rows (K,), whose records, if they had any, have been given back."""
        while self._log.lacks(rows.numel()):
            self._empty_block()
        numbers = self._log.take(rows)
        self._where.index_copy_(0, rows, -numbers - 1)
        self._thread.write(numbers, rows, leaving)

    def _empty_block(self) -> None:
        """Moves the records of a block elsewhere, where they are the only ones of their rows."""
        assert isinstance(self._log, RecordLog)
        numbers = numbers_of([self._log.sparsest()])
        records = self._thread.read(numbers.to(torch.int64))
        rows = self.records.rows(records)
        where = self._where.index_select(0, rows)
        only = where == -numbers - 1
        slots = where.to(torch.int64).sub_(1).clamp_(min=0)
        copied = (where > 0) & (self._number.index_select(0, slots) == numbers)
        self._log.give_back(numbers[only | copied])
        self._number.index_fill_(0, slots[copied], -1)
        self._dirty.index_fill_(0, slots[copied], True)
        moved = self._log.take(rows[only])
        self._where.index_copy_(0, rows[only], -moved - 1)
        self._thread.move(moved, records[only])

    def _begin(self, rows: Tensor, slots: Tensor, used: int) -> None:
        """Begins to bring rows (K,) into free slots."""
        number = -self._where.index_select(0, rows) - 1
        self.counts.brought += rows.numel()
        self.counts.read += int((number >= 0).sum())
        self._jobs += 1
        self._coming.append((self._thread.bring(rows, number, slots, self.initial), slots))
        if self._on_device is not None:
            self._on_device.index_copy_(0, *map(self._slots.to_index, (rows, (slots + 1).to(torch.int32))))
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
            coming, slots = self._coming.popleft()
            self.arrived(slots, self._thread.await_rows(coming).taken)

    def _land(self) -> None:
        """Waits for all that is on its way."""
        self._await_jobs(self._jobs)
        self._thread.land()
