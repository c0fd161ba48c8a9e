"""Records of a file, read ahead and written behind by a thread of their own, in the order in which they are asked for.

Contract
    What is read sees what was written before it was asked for. Maps of rows are the caller's alone: the thread moves
    bytes. An error comes to whoever waits for what has failed, or asks for anything after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from torch import Tensor

from embrace_fx.runtime.launch.recorder import Recorder, Watch
from embrace_fx.runtime.tiers.record_file import RecordFile
from embrace_fx.runtime.tiers.records import Records
from embrace_fx.vocabulary.operation_id import OperationId, storage_id

_WRITES = 4
"""Batches of rows that may wait to be written."""


@dataclass(frozen=True)
class ReadAhead:
    """Rows (K,), ascending, on their way from the file.

    Attributes:
        due: the number of the step that reads them.
        coming: their columns (K, ...).
    """

    rows: Tensor
    due: int
    coming: Future[dict[str, Tensor]]


class FileThread:
    """The thread of one file.

    Args:
        table: its name.
        recorder: is told of reads, writes, and waits for them; asked for each time.
    """

    def __init__(self, table: str, file: RecordFile, records: Records, recorder: Callable[[], Recorder]) -> None:
        self._file, self._records, self._recorder = file, records, recorder
        self._reading, self._writing = storage_id("read", table), storage_id("write", table)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="embrace_fx rows")
        self._writes: deque[Future[None]] = deque()

    def write(self, rows: Tensor, values: Mapping[str, Tensor]) -> None:
        """Begins to write rows (K,), ascending, with their columns (K, ...)."""
        watch = self._watch(self._writing, rows)

        def write() -> None:
            with watch:
                self._file.write(rows, self._records.pack(rows, values))

        self._writes.append(self._thread.submit(write))
        self._await_writes(_WRITES)

    def read(self, rows: Tensor, due: int) -> ReadAhead:
        """Begins to read rows (K,), ascending."""
        return ReadAhead(rows, due, self._thread.submit(self._read, rows, self._watch(self._reading, rows)))

    def read_now(self, rows: Tensor) -> dict[str, Tensor]:
        """Reads rows (K,), ascending, of which none is being written, while the caller waits."""
        with self._recorder().waiting(self._reading):
            return self._read(rows, self._watch(self._reading, rows))

    def await_read(self, ahead: ReadAhead) -> dict[str, Tensor]:
        """The columns of rows that have been read ahead."""
        with self._recorder().waiting(self._reading):
            return ahead.coming.result()

    def land(self) -> None:
        """Waits for what is being written."""
        self._await_writes(0)

    def _await_writes(self, most: int) -> None:
        """Waits until no more batches of rows are being written."""
        if len(self._writes) > most:
            with self._recorder().waiting(self._writing):
                while len(self._writes) > most:
                    self._writes.popleft().result()

    def _read(self, rows: Tensor, watch: Watch) -> dict[str, Tensor]:
        with watch:
            return self._records.unpack(self._file.read(rows))

    def _watch(self, launch: OperationId, rows: Tensor) -> Watch:
        return Watch(launch, rows.numel() * self._records.nbytes, self._recorder(), on_host=True)
