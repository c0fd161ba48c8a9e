"""Records of a file, read and written by a thread of their own, in the order in which they are asked for.

Contract
    What is read sees what was written before it was asked for. The thread writes rows that it has read into slots which
    nobody else touches meanwhile. An error comes to whoever waits for what has failed, or asks for anything after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial

from torch import Tensor

from embrace_fx.runtime.launch.recorder import Recorder, Watch
from embrace_fx.runtime.launch.spans import span
from embrace_fx.runtime.tiers.initial import FirstValues
from embrace_fx.runtime.tiers.record_file import RecordFile
from embrace_fx.runtime.tiers.records import WEIGHTS, Records
from embrace_fx.vocabulary.operation_id import OperationId, storage_id

_PARTS, _FEWEST, _MOST = 32, 8, 1 << 12
"""Of all slots, so many parts, of at least and at most so many rows: as many are read at once, for they are in memory
twice, and written at once; two wait to be."""


class FileThread:
    """The thread of one file.

    Args:
        table: its name.
        columns: the slots' values, into which rows are read.
        recorder: is told of reads, writes, and waits for them; asked for each time.
    """

    def __init__(
        self,
        table: str,
        file: RecordFile,
        records: Records,
        columns: Mapping[str, Tensor],
        recorder: Callable[[], Recorder],
    ) -> None:
        self._file, self._records, self._columns, self._recorder = file, records, columns, recorder
        self._reading, self._writing = storage_id("read", table), storage_id("write", table)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="embrace_fx rows")
        self._writes: deque[tuple[Future[None], int]] = deque()
        slots = next(iter(columns.values())).shape[0]
        self.part = min(max(slots // _PARTS, _FEWEST), _MOST)

    @property
    def waiting(self) -> int:
        """Rows that wait to be written, or are being."""
        return sum(rows for _, rows in self._writes)

    def write(self, runs: Sequence[range], rows: Tensor, values: Mapping[str, Tensor]) -> None:
        """Begins to write rows (K,) with their columns (K, ...) into runs of numbers."""
        watch = self._watch(self._writing, rows.numel())

        def write() -> None:
            with watch:
                self._write(runs, self._records.pack(rows, values))

        with span("submit", self._writing):
            self._begin_write(write, rows.numel())

    def move(self, runs: Sequence[range], records: Tensor) -> None:
        """Begins to write records (K, B) that have been read elsewhere."""
        self._begin_write(partial(self._write, runs, records), len(records))

    def read(self, numbers: Tensor) -> Tensor:
        """Reads the records (K, B) at numbers (K,), ascending, whatever their rows."""
        return self._thread.submit(self._file.read, numbers).result()

    def bring(self, rows: Tensor, numbers: Tensor, slots: Tensor, initial: FirstValues) -> Future[None]:
        """Begins to bring rows (K,) into slots (K,).

        Args:
            numbers: (K,) of their records; -1: they begin.
        """
        watch = self._watch(self._reading, int((numbers >= 0).sum()))
        with span("submit", self._reading):
            return self._thread.submit(self._bring, rows, numbers, slots, initial, watch)

    def await_rows(self, coming: Future[None]) -> None:
        """Waits for rows that are being brought."""
        with self._recorder().waiting(self._reading) if not coming.done() else nullcontext():
            coming.result()

    def land(self) -> None:
        """Waits for what is being written."""
        self._await_writes(0)

    def _begin_write(self, write: Callable[[], None], rows: int) -> None:
        self._await_writes(2 * self.part - rows)
        self._writes.append((self._thread.submit(write), rows))

    def _await_writes(self, most: int) -> None:
        """Waits until no more rows are being written."""
        while self._writes and self._writes[0][0].done():
            self._writes.popleft()[0].result()
        if self._writes and self.waiting > most:
            with self._recorder().waiting(self._writing):
                while self._writes and self.waiting > most:
                    self._writes.popleft()[0].result()

    def _watch(self, launch: OperationId, rows: int) -> Watch:
        return Watch(launch, rows * self._records.nbytes, self._recorder(), on_host=True)

    def _write(self, runs: Sequence[range], records: Tensor) -> None:
        for run, some in zip(runs, records.split([len(run) for run in runs]), strict=True):
            self._file.write(run.start, some)

    def _bring(self, rows: Tensor, numbers: Tensor, slots: Tensor, initial: FirstValues, watch: Watch) -> None:
        numbers, order = numbers.sort()
        rows, slots = rows.index_select(0, order), slots.index_select(0, order)
        begin = int((numbers < 0).sum())
        with watch if begin < len(rows) else nullcontext():
            for first in range(begin, len(rows), self.part):
                part = slice(first, first + self.part)
                read = self._records.unpack(self._file.read(numbers[part], rows[part]))
                for key, column in self._columns.items():
                    column.index_copy_(0, slots[part], read[key])
        if begin:
            for key, column in self._columns.items():
                if key == WEIGHTS:
                    column.index_copy_(0, slots[:begin], initial(rows[:begin]))
                else:
                    column.index_fill_(0, slots[:begin], self._records.columns[key].fill)
