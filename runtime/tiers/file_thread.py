"""Reads and writes a table's records in threads, in the order of the calls.

Contract
    A read sees all earlier writes. No other code accesses a slot while a read fills it. An error is raised when the
    caller waits for the failed operation or calls any later one.
    For slots on the host, the thread handles reads that need the disk. Reads and writes that the page cache serves run
    in the calling thread, because a thread would hold the GIL and a core just as long. After a write that had to wait,
    the thread handles the next writes. For slots on a device, a second thread waits for the copies from the device, and
    reads wait only for writes of the same records.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from embrace_fx.runtime.launch.recorder import Recorder, Watch
from embrace_fx.runtime.launch.spans import span
from embrace_fx.runtime.launch.streams import Streams
from embrace_fx.runtime.tiers.budget import LEAVING, part_of
from embrace_fx.runtime.tiers.initial import FirstOfTables
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


class Come(NamedTuple):
    """The result of reading rows into slots.

    Attributes:
        arrivals: arguments for the slots' `arrive`.
        taken: the minimum of the rows' applied steps.
    """

    arrivals: Sequence[Any]
    taken: int


class FileThread:
    """The thread that reads and writes a table's records. For a device, a second thread handles writes.

    Args:
        table: its name.
        slots: the slots to fill.
        count: the number of slots.
        recorder: returns the recorder of reads, writes and waits.
        streams: the device's streams, or None if the slots are on the host.
    """

    def __init__(
        self,
        table: str,
        file: RecordFile | HostRecords,
        records: Records,
        slots: Slots,
        count: int,
        recorder: Callable[[], Recorder],
        streams: Streams | None = None,
    ) -> None:
        self._file, self._records, self._slots, self._recorder = file, records, slots, recorder
        self._reading, self._writing = storage_id("read", table), storage_id("write", table)
        start: Callable[[], None] = streams.use_device if streams is not None else _nothing
        self._reader = self._writer = ThreadPoolExecutor(1, "embrace_fx rows", start)
        if streams is not None:
            self._writer = ThreadPoolExecutor(1, "embrace_fx rows leave", start)
        # With record numbers, and positions in the buffer.
        self._writes: deque[tuple[Future[None], Tensor, range]] = deque()
        self.part = part_of(count)
        self._cached = file.read_cached if streams is None and isinstance(file, RecordFile) else None
        self._most_waiting = self.part * LEAVING if streams is None else max(self.part, count // _LEAVING)
        self._next = 0  # position of the next record in the buffer
        self._by_thread = 0.0 if streams is None else inf  # the number of following writes for the thread
        self._leaving = self._to_read = self._to_read_here = None
        self._first = self.part
        if streams is None:
            rows = (self._most_waiting, self.part, self.part)
            rooms = [torch.zeros((n, records.nbytes), dtype=torch.uint8, device="cpu") for n in rows]
            self._leaving, self._to_read, self._to_read_here = rooms
            row_bytes = _FIRST_BYTES * max(1, *records.columns[WEIGHTS].size)
            self._first = max(1, self.part * records.nbytes // row_bytes)  # rows to initialize at once

    @property
    def waiting(self) -> int:
        """Returns the number of rows that wait to be written or are being written."""
        return sum(numbers.numel() for _, numbers, _ in self._writes)

    @property
    def nbytes(self) -> int:
        """Returns the bytes of host memory for records."""
        rooms = (self._leaving, self._to_read, self._to_read_here)
        return sum(each.nbytes for each in rooms if each is not None)

    def write(self, numbers: Tensor, rows: Tensor, leave: Leave) -> None:
        """Starts writing rows (K,), at most a part, at record numbers (K,)."""
        watch = self._watch(self._writing, rows.numel())
        with span("submit", self._writing):
            at, into = self._room(numbers.numel())
            leaving = leave(into)

            def write() -> None:
                """Writes the records that leave memory."""
                with watch:
                    self._file.write(numbers, self._records.sign(leaving(), rows))

            self._writes.append((self._begin_write(write), numbers, at))

    def move(self, numbers: Tensor, records: Tensor, only: Tensor) -> None:
        """Starts writing some of the records (K, B), at most a part, at other numbers (L,)."""
        if numbers.numel():
            at, into = self._room(numbers.numel())
            into = torch.index_select(records, 0, only.nonzero().view(-1), out=into)
            self._writes.append((self._begin_write(partial(self._file.write, numbers, into)), numbers, at))

    def _begin_write(self, write: Callable[[], None]) -> Future[None]:
        """Writes immediately, or in the thread if it has pending writes or a recent write had to wait."""
        if self._by_thread or not all(written.done() for written, _, _ in self._writes):
            self._by_thread = max(self._by_thread - 1, 0)
            return self._writer.submit(write)
        written: Future[None] = Future()
        began = time.perf_counter()
        try:
            write()
        except Exception as error:  # raised by a later wait, as for the thread's writes
            written.set_exception(error)
        else:
            written.set_result(None)
        self._by_thread = _BY_THREAD if time.perf_counter() - began > _LATE_S else 0
        return written

    def read(self, numbers: Tensor, rows: Tensor | None = None) -> Tensor:
        """Reads the records (K, B) at ascending numbers (K,), at most a part, and checks that they are of rows (K,) if
        given.

        On the host, the result is valid until the next call or the next `bring`.
        """
        behind, here = self._behind(numbers), self._to_read_here
        if self._cached is not None and not behind:
            records, there = self._cached(numbers, rows, here)
            if bool(there.all()):
                return records

        def read() -> Tensor:
            """Reads records, after the writes to the same place."""
            _end(behind)
            return self._file.read(numbers, rows, here)

        return self._reader.submit(read).result()

    def copy(self, count: int, leave: Leave) -> Tensor:
        """Copies `count` records, at most a part. On the host, the result is valid until the next write."""
        return leave(self._room(count)[1])()

    def bring(self, rows: Tensor, numbers: Tensor, slots: Tensor, initial: FirstOfTables) -> Future[Come]:
        """Starts reading rows (K,) into slots (K,).

        Args:
            numbers: (K,) the numbers of their records, or -1 for rows with their first values.
        """
        numbers, order = numbers.sort()
        rows, slots = rows.index_select(0, order), slots.index_select(0, order)
        begin, taken = int((numbers < 0).sum()), torch.iinfo(torch.int64).max
        with span("submit", self._reading):
            behind = self._behind(numbers[begin:])
            if self._cached is not None and not behind and not begin:
                left, taken = self._bring_cached(rows, numbers, slots, self._cached)
                if not left.numel():
                    come: Future[Come] = Future()
                    come.set_result(Come((), taken))
                    return come
                rows, numbers, slots = (each.index_select(0, left) for each in (rows, numbers, slots))
            watch = self._watch(self._reading, len(rows) - begin)
            return self._reader.submit(self._bring, rows, numbers, slots, initial, begin, taken, watch, behind)

    def has_come(self, coming: Future[Come]) -> bool:
        """Returns whether the rows have arrived without an error, so that no wait is needed."""
        if not coming.done() or coming.exception() is not None:
            return False
        return all(map(self._slots.has_come, coming.result().arrivals))

    def await_rows(self, coming: Future[Come]) -> Come:
        """Waits for rows that are being read."""
        with self._recorder().waiting(self._reading) if not coming.done() else nullcontext():
            come = coming.result()
            for arrival in come.arrivals:
                self._slots.arrive(arrival)
        return come

    def await_writes(self) -> None:
        """Waits until all submitted rows are written."""
        self._await_writes(range(self._most_waiting))

    def _room(self, count: int) -> tuple[range, Tensor | None]:
        """Waits for buffer space for so many records to write. Returns the positions and, on the host, the memory."""
        assert count <= self._most_waiting
        first = self._next if self._next + count <= self._most_waiting else 0
        at, self._next = range(first, first + count), first + count
        self._await_writes(at)
        return at, None if self._leaving is None else self._leaving[first : first + count]

    def _await_writes(self, at: range) -> None:
        """Waits until no record at these buffer positions is waiting to be written."""
        while self._writes and self._writes[0][0].done():
            self._writes.popleft()[0].result()
        if self._is_taken(at):
            with self._recorder().waiting(self._writing):
                while self._is_taken(at):
                    self._writes.popleft()[0].result()

    def _is_taken(self, at: range) -> bool:
        """Returns whether a pending write overlaps a range."""
        return any(each.start < at.stop and at.start < each.stop for _, _, each in self._writes)

    def _behind(self, numbers: Tensor) -> list[Future[None]]:
        """Returns the pending writes of any of these ascending record numbers (K,), which a read must wait for."""
        pending = [each for each in self._writes if not each[0].done()] if numbers.numel() else []
        found = []
        for written, at, _ in pending:
            places = torch.searchsorted(numbers, at.to(numbers.dtype)).clamp_(max=len(numbers) - 1)
            if bool((numbers.index_select(0, places) == at).any()):
                found.append(written)
        return found

    def _bring_cached(
        self, rows: Tensor, numbers: Tensor, slots: Tensor, read: Callable[..., tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, int]:
        """Reads the rows (K,) that are in the page cache. Returns the indices of the others, and the minimum of the
        read rows' applied steps.
        """
        left, taken = [], torch.iinfo(torch.int64).max
        with self._watch(self._reading, len(rows)):
            for first in range(0, len(rows), self.part):
                part = slice(first, first + self.part)
                records, there = read(numbers[part], rows[part], self._to_read_here)
                steps = self._records.unpack(records)[TAKEN]
                if not bool(there.all()):  # slots of the missing rows stay empty for now
                    left.append(there.logical_not().nonzero().view(-1) + first)
                    steps = steps[there]
                if len(steps):
                    taken = min(taken, int(steps.min()))
                    self._slots.come(slots[part], records)
        return torch.cat([rows[:0], *left]), taken

    def _watch(self, launch: OperationId, rows: int) -> Watch:
        """Returns a watch over the read or write of rows."""
        return Watch(launch, rows * self._records.nbytes, self._recorder(), on_host=True)

    def _bring(
        self,
        rows: Tensor,
        numbers: Tensor,
        slots: Tensor,
        initial: FirstOfTables,
        begin: int,
        taken: int,
        watch: Watch,
        behind: Sequence[Future[None]],
    ) -> Come:
        """Reads rows (K,), sorted by record number, of which the first `begin` have their first values.

        Args:
            taken: an upper bound for the minimum of applied steps.
            behind: pending writes to wait for first.
        """
        _end(behind)
        arrivals = []
        reads: AbstractContextManager[object] = watch if begin < len(rows) else nullcontext()
        with reads:
            for first in range(begin, len(rows), self.part):
                part = slice(first, first + self.part)
                read = self._file.read(numbers[part], rows[part], self._to_read)
                taken = min(taken, int(self._records.unpack(read)[TAKEN].min()))
                arrivals.append(self._slots.come(slots[part], read))
        for first in range(0, begin, self._first):
            some, taken = slice(first, min(first + self._first, begin)), 0
            arrivals.append(self._slots.begin(slots[some], initial(rows[some])))
        return Come(arrivals, taken)


def _nothing() -> None:
    pass


def _end(writes: Sequence[Future[None]]) -> None:
    """Waits for writes, and raises their first error."""
    for each in writes:
        each.result()
