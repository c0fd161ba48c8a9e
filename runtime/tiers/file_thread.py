"""Records of a file, read ahead and written behind by a thread of their own, in the order in which they are asked for.

Contract
    What is read sees what was written before it was asked for. Maps of rows are the caller's alone: the thread moves
    bytes. An error comes to whoever waits for what has failed, or asks for anything after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from torch import Tensor

from embrace_fx.runtime.tiers.record_file import RecordFile
from embrace_fx.runtime.tiers.records import Records

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
    """The thread of one file."""

    def __init__(self, file: RecordFile, records: Records) -> None:
        self._file, self._records = file, records
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="embrace_fx rows")
        self._writes: deque[Future[None]] = deque()

    def write(self, rows: Tensor, values: Mapping[str, Tensor]) -> None:
        """Begins to write rows (K,), ascending, with their columns (K, ...)."""
        self._writes.append(self._thread.submit(lambda: self._file.write(rows, self._records.pack(rows, values))))
        while len(self._writes) > _WRITES:
            self._writes.popleft().result()

    def read(self, rows: Tensor, due: int) -> ReadAhead:
        """Begins to read rows (K,), ascending."""
        return ReadAhead(rows, due, self._thread.submit(lambda: self._records.unpack(self._file.read(rows))))

    def land(self) -> None:
        """Waits for what is being written."""
        while self._writes:
            self._writes.popleft().result()
