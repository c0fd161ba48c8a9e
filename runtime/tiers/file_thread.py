"""Reads and writes a table's records (a row's weights and optimizer state) in threads, in the order of the calls.

Contract
    A read sees all earlier writes. No other code accesses a slot while a read fills it. After a write has failed, every
    later call raises its error.
    For slots on the host, the thread handles reads that need the disk. Reads and writes that the page cache serves run
    in the calling thread, because a thread would hold the GIL and a core just as long. After a write that had to wait,
    the thread handles the next writes. For slots on a device, a second thread waits for the copies from the device, and
    reads wait only for writes of the same records.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from embrace_fx.runtime.launch.recorder import RecordedCopy, Recorder
from embrace_fx.runtime.launch.spans import span
from embrace_fx.runtime.tiers.budget import LEAVING, transfer_rows
from embrace_fx.runtime.tiers.initial import InitialValuesOfTables
from embrace_fx.runtime.tiers.record_file import HostRecords, RecordFile
from embrace_fx.runtime.tiers.records import TAKEN, WEIGHTS, Records
from embrace_fx.runtime.tiers.slots import Leave, Slots
from embrace_fx.vocabulary.operation_id import OperationId, storage_id

_LEAVING = 8
"""Divisor of a device's slots: the maximum share that may wait to be written."""
_LATE_S, _BY_THREAD = 4e-3, 32
"""Seconds after which a write counts as having waited, and the number of following writes for the thread."""
_FIRST_BYTES = 64
"""Bytes of temporary memory per element of first values."""
_ALL = torch.iinfo(torch.int64).max
"""The steps that no rows have applied, at the least."""


class ReadResult(NamedTuple):
    """The result of reading rows into memory slots.

    Attributes:
        arrivals: the started copies into slots, each to be completed by `Slots.arrive`.
        taken: every row in the result has applied at least this number of optimizer steps.
    """

    arrivals: Sequence[Any]
    taken: int


class FileThread:
    """Reads and writes a table's records (a row's weights and optimizer state) in the background, in the order of the
    calls.

    Args:
        slots: the places in memory into which rows are read.
        count: the number of slots.
        recorder: function that returns the recorder of reads, writes and waits.

    Attributes:
        part: the maximum number of records in one read or write.
        nbytes: bytes of host memory for buffers.
        error: the error of a failed write, or None.
    """

    def __init__(
        self,
        table: str,
        file: RecordFile | HostRecords,
        records: Records,
        slots: Slots,
        count: int,
        recorder: Callable[[], Recorder],
    ) -> None:
        self._file, self._records, self._slots, self._recorder = file, records, slots, recorder
        self._reading, self._writing = storage_id("read", table), storage_id("write", table)
        self.part = transfer_rows(count)
        self.error: Exception | None = None
        rooms: list[Tensor | None]
        self._reader = self._writer = ThreadPoolExecutor(1, "embrace_fx rows", slots.use_device)
        self._cached = file.read_cached if isinstance(file, RecordFile) and not slots.pinned else None
        self._by_thread = 0.0  # how many of the next writes the thread should make
        if slots.pinned:
            self._writer = ThreadPoolExecutor(1, "embrace_fx rows leave", slots.use_device)
            self._by_thread = inf
            rooms = [None] * (max(1, count // (_LEAVING * self.part)) + 2)
        else:
            size = self.part, records.nbytes
            rooms = [torch.zeros(size, dtype=torch.uint8, device="cpu") for _ in range(LEAVING + 2)]
        self.nbytes = sum(room.nbytes for room in rooms if room is not None)
        self._to_read, self._to_read_here, *leaving = rooms
        # The last writes, the oldest first, with their record numbers and memory.
        self._writes = deque((_WRITTEN, torch.empty(0, dtype=torch.int32, device="cpu"), room) for room in leaving)

    def write(self, numbers: Tensor, rows: Tensor, leave: Leave) -> None:
        """Starts writing rows (K,) to the records `numbers` (K,). At most `part` rows.

        Args:
            leave: function that starts copying the rows out of their slots into the given memory.
        """
        watch = self._watch(self._writing, rows.numel())
        with span("submit", self._writing):
            room = self._free_buffer()
            leaving = leave(None if room is None else room[: rows.numel()])

            def write() -> None:
                """Writes the records. If that fails, a later call raises the error."""
                try:
                    with watch:
                        self._file.write(numbers, self._records.sign(leaving(), rows))
                except Exception as error:
                    self.error = self.error or error

            self._writes[-1] = self._begin_write(write), numbers, room

    def _begin_write(self, write: Callable[[], None]) -> Future[None]:
        """Calls `write` immediately, or in the thread if other writes are pending or a recent write was slow."""
        if self._by_thread or not self._has_written():
            self._by_thread = max(self._by_thread - 1, 0)
            return self._writer.submit(write)
        began = time.perf_counter()
        write()
        self._by_thread = _BY_THREAD if time.perf_counter() - began > _LATE_S else 0
        return _WRITTEN

    def read(self, numbers: Tensor, rows: Tensor | None = None) -> Tensor:
        """Reads the records `numbers` (K,), at most `part` and in ascending order, which must be of `rows` (K,) if
        given. Returns records (K, B), of B bytes each, valid on the host until the next call of `read` or
        `read_into_slots`.
        """
        self._raise_write_error()
        behind = self._pending_writes_of(numbers)
        if self._cached is not None and not behind:
            records = self._cached(numbers, rows, self._to_read_here)
            if records is not None:
                return records
        return self._reader.submit(self._read, numbers, rows, self._to_read_here, behind).result()

    def copy(self, count: int, leave: Leave) -> Tensor:
        """Copies `count` rows, at most `part`, into records. On the host, the records are valid until the next write.
        `leave` is as for `write`.
        """
        room = self._free_buffer()
        return leave(None if room is None else room[:count])()

    def read_into_slots(
        self, rows: Tensor, numbers: Tensor, slots: Tensor, initial: InitialValuesOfTables
    ) -> Future[ReadResult]:
        """Starts reading rows (K,) into memory slots (K,). Returns the future of the read.

        Args:
            numbers: (K,) the numbers of the rows' records, or -1 for rows that were never written.
            initial: the initial values of rows that were never written.
        """
        self._raise_write_error()
        numbers, order = numbers.sort()
        rows, slots = rows.index_select(0, order), slots.index_select(0, order)
        begin, taken = int((numbers < 0).sum()), _ALL
        with span("submit", self._reading):
            behind = self._pending_writes_of(numbers[begin:])
            if self._cached is not None and not behind and not begin:
                count, taken = self._read_cached_rows(rows, numbers, slots, self._cached)
                rows, numbers, slots = rows[count:], numbers[count:], slots[count:]
                if not len(rows):
                    come: Future[ReadResult] = Future()
                    come.set_result(ReadResult((), taken))
                    return come
            watch = self._watch(self._reading, len(rows) - begin)
            return self._reader.submit(self._read_rows, rows, numbers, slots, initial, taken, watch, behind)

    def has_arrived(self, future: Future[ReadResult]) -> bool:
        """Returns whether a read of rows into memory slots has ended without an error."""
        if not future.done() or future.exception() is not None:
            return False
        return all(map(self._slots.has_arrived, future.result().arrivals))

    def await_rows(self, future: Future[ReadResult]) -> ReadResult:
        """Waits for a read of rows into memory slots, and returns its result."""
        with self._recorder().waiting(self._reading) if not future.done() else nullcontext():
            come = future.result()
            for arrival in come.arrivals:
                self._slots.arrive(arrival)
        return come

    def await_writes(self) -> None:
        """Waits until all pending writes have ended."""
        if not self._has_written():
            with self._recorder().waiting(self._writing):
                wait([written for written, _, _ in self._writes])
        self._raise_write_error()

    def _free_buffer(self) -> Tensor | None:
        """Waits for the oldest write, and returns its buffer for reuse: None for slots on a device."""
        self._writes.rotate(-1)
        written, _, room = self._writes[-1]
        if not written.done():
            with self._recorder().waiting(self._writing):
                written.result()
        self._raise_write_error()
        return room

    def _raise_write_error(self) -> None:
        """Raises the error of an earlier write that failed."""
        if self.error is not None:
            raise self.error

    def _has_written(self) -> bool:
        """Returns whether all writes have ended."""
        return all(written.done() for written, _, _ in self._writes)

    def _pending_writes_of(self, numbers: Tensor) -> list[Future[None]]:
        """Returns the pending writes that must end before these records (K,) can be read."""
        pending = [(written, at) for written, at, _ in self._writes if not written.done()]
        return [written for written, at in pending if bool(torch.isin(at, numbers).any())]

    def _read(
        self, numbers: Tensor, rows: Tensor | None, into: Tensor | None, writes: Sequence[Future[None]]
    ) -> Tensor:
        """Reads records as `RecordFile.read` does, after these pending writes of them have ended."""
        wait(writes)
        self._raise_write_error()
        return self._file.read(numbers, rows, into)

    def _read_cached_rows(
        self, rows: Tensor, numbers: Tensor, slots: Tensor, read: Callable[..., Tensor | None]
    ) -> tuple[int, int]:
        """Reads rows (K,) from the page cache into memory slots (K,), in parts, up to the first part that is not there.

        Returns (the number of rows read, a number of optimizer steps that all of these rows have applied).
        """
        taken = _ALL
        with self._watch(self._reading, len(rows)):
            for first in range(0, len(rows), self.part):
                part = slice(first, first + self.part)
                records = read(numbers[part], rows[part], self._to_read_here)
                if records is None:
                    return first, taken
                taken = min(taken, int(self._records.unpack(records)[TAKEN].min()))
                self._slots.copy_in(slots[part], records)
        return len(rows), taken

    def _read_rows(
        self,
        rows: Tensor,
        numbers: Tensor,
        slots: Tensor,
        initial: InitialValuesOfTables,
        taken: int,
        watch: RecordedCopy,
        writes: Sequence[Future[None]],
    ) -> ReadResult:
        """Reads rows (K,), sorted by record number, into memory slots (K,). Rows that were never written, with the
        number -1, get their initial values.

        Args:
            taken: an upper bound of the result's `taken`.
            watch: records the time of the read.
            writes: pending writes to wait for first.
        """
        arrivals, begin = [], int((numbers < 0).sum())
        reads: AbstractContextManager[object] = watch if begin < len(rows) else nullcontext()
        with reads:
            for first in range(begin, len(rows), self.part):
                part = slice(first, first + self.part)
                read = self._read(numbers[part], rows[part], self._to_read, writes)
                taken = min(taken, int(self._records.unpack(read)[TAKEN].min()))
                arrivals.append(self._slots.copy_in(slots[part], read))
        row_bytes = _FIRST_BYTES * max(1, *self._records.columns[WEIGHTS].size)
        at_once = max(1, self.part * self._records.nbytes // row_bytes)
        for first in range(0, begin, at_once):
            some, taken = slice(first, min(first + at_once, begin)), 0
            into = None if self._to_read is None else self._to_read[: some.stop - first]
            arrivals.append(self._slots.copy_in(slots[some], self._records.place({WEIGHTS: initial(rows[some])}, into)))
        return ReadResult(arrivals, taken)

    def _watch(self, launch: OperationId, rows: int) -> RecordedCopy:
        """Returns an object that records the time of one read or write of `rows` rows."""
        return RecordedCopy(launch, rows * self._records.nbytes, self._recorder(), on_host=True)


_WRITTEN: Future[None] = Future()
_WRITTEN.set_result(None)
