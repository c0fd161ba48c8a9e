"""Records of a table's rows in a file: a row's values and optimizer state together, so that a row is one read.

Contract
    The file has no name: it goes with its process, and nothing takes it for a checkpoint. It is as long as all records,
    but takes room on disk only for those that have been written. What is read is what was written, or an error that
    names the row: a record carries a checksum of its bytes and its number.

Shape legend: K records of B bytes, B a multiple of 8. The first 8 are the checksum's.
"""

from __future__ import annotations

import errno
import os
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

_GOLDEN = 0x1E3779B97F4A7C15
"""An odd number whose multiples are spread over all words."""
CHECK_BYTES = 8


class TierError(RuntimeError):
    """A row that cannot be read from its file, or written there."""


class RecordFile:
    """The records of one table on this rank.

    Args:
        directory: in which the file lies.
        table: its name, for errors.
        rows: how many records it has room for.
        record_bytes: of each.

    Raises:
        TierError: no such file can be made.
    """

    def __init__(self, directory: str | Path, table: str, rows: int, record_bytes: int) -> None:
        self._directory, self._table, self.record_bytes = str(directory), table, record_bytes
        self.read_bytes = self.written_bytes = 0
        try:
            self.descriptor, path = tempfile.mkstemp(dir=directory)
            os.unlink(path)
            weakref.finalize(self, os.close, self.descriptor)
            os.ftruncate(self.descriptor, rows * record_bytes)
        except OSError as error:
            raise TierError(
                f"expected a directory in which a file of {rows * record_bytes:,} bytes can be made, as tables_in, "
                f"found {self._directory!r}: {error}. It takes room for rows that have moved alone. Make the "
                "directory, or name another one."
            ) from error
        os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        words = torch.arange(1, record_bytes // 8, dtype=torch.int64)
        self._factors = (words * _GOLDEN).bitwise_or_(1)

    def write(self, rows: Tensor, records: Tensor) -> None:
        """Writes records (K, B) uint8 of rows (K,), ascending, and their checksums.

        Raises:
            TierError: some cannot be written.
        """
        words = records.view(torch.int64)
        words[:, 0] = self._sums(rows, words)
        data = records.numpy().data.cast("B")
        try:
            for first, begin, end in self._runs(rows):
                self._write_run(data[begin:end], first * self.record_bytes)
        except OSError as error:
            raise TierError(
                f"expected room for {records.numel():,} bytes more in {self._directory}, where rows of {self._table} "
                f"lie, found {error}. The last checkpoint is whole. Free some, name another directory in tables_in, "
                "or raise table_memory."
            ) from error
        self.written_bytes += records.numel()

    def read(self, rows: Tensor) -> Tensor:
        """Reads the records (K, B) of rows (K,), ascending, each of which has been written.

        Raises:
            TierError: some cannot be read, or are not as they were written.
        """
        records = torch.empty((rows.numel(), self.record_bytes), dtype=torch.uint8)
        data = records.numpy().data.cast("B")
        try:
            for first, begin, end in self._runs(rows):
                self._read_run(data[begin:end], first * self.record_bytes)
        except OSError as error:
            raise TierError(
                f"expected rows of {self._table} in their file in {self._directory}, found {error}. Look after that "
                "disk, and go on from the last checkpoint, which is whole."
            ) from error
        words = records.view(torch.int64)
        wrong = words[:, 0] != self._sums(rows, words)
        if bool(wrong.any()):
            raise TierError(
                f"expected row {int(rows[wrong][0])} of {self._table} as it was written to its file in "
                f"{self._directory}, found other bytes ({int(wrong.sum())} of {rows.numel()} records that were read). "
                "The disk, or whoever wrote there, has changed it: go on from the last checkpoint, on another disk."
            )
        self.read_bytes += records.numel()
        return records

    def _sums(self, rows: Tensor, words: Tensor) -> Tensor:
        """Checksums (K,): each word has a factor of its own, so that no single word can change unseen; never 0."""
        sums: Tensor = (words[:, 1:] * self._factors).sum(1).add_((rows + 1) * _GOLDEN).bitwise_or_(1)
        return sums

    def _runs(self, rows: Tensor) -> Iterator[tuple[int, int, int]]:
        """Yields (first row, first byte, end) of records whose rows follow each other."""
        if not rows.numel():
            return
        cuts = (rows.diff() != 1).nonzero().view(-1).add_(1).tolist()
        firsts = [0, *cuts]
        for start, end, row in zip(firsts, [*cuts, rows.numel()], rows[firsts].tolist(), strict=True):
            yield row, start * self.record_bytes, end * self.record_bytes

    def _write_run(self, data: memoryview, at: int) -> None:
        done = os.pwrite(self.descriptor, data, at)
        while done < len(data):
            more = os.pwrite(self.descriptor, data[done:], at + done)
            if more == 0:
                raise OSError(errno.ENOSPC, f"{done} of {len(data)} bytes written")
            done += more

    def _read_run(self, data: memoryview, at: int) -> None:
        done = os.preadv(self.descriptor, [data], at)
        while done < len(data):
            more = os.preadv(self.descriptor, [data[done:]], at + done)
            if more == 0:
                there = os.fstat(self.descriptor).st_size
                raise OSError(f"a file of {there:,} bytes, cut off before byte {at + len(data):,}")
            done += more
