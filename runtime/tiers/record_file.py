"""Stores records, each a row's weights and optimizer state, in a file, or in host memory for a device.

Contract
    The file has no name. It disappears with its process and cannot be mistaken for a checkpoint. Its length covers all
    records, but only written ones use disk space. A read returns the written bytes or raises an error that names the
    row: a record has a checksum of its bytes, which include the row id. In host memory, a record's number is its row
    id, and it uses memory once written. A thread gathers records into pinned memory, from which the device copies them.

Shape legend: K records of B bytes, as `records.py` packs them, with numbers (K,) in the file.
"""

from __future__ import annotations

import errno
import os
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from embrace_fx.runtime.tiers.records import Records


class TierError(RuntimeError):
    """Raised if a row cannot be read from its file or written to it."""


class RecordFile:
    """Stores this rank's rows of a table in a file. A record has one row's weights and optimizer state.

    Args:
        directory: the folder for the file. Raises `TierError` if the file cannot be created there.
        count: the maximum number of records.
        records: the format of a record.
        pinned: whether reads return pinned memory, from which a device can copy.
    """

    def __init__(
        self, directory: str | Path, table: str, count: int, records: Records, *, pinned: bool = False
    ) -> None:
        self._directory, self._table, self._records, self._pinned = str(directory), table, records, pinned
        try:
            self.descriptor, path = tempfile.mkstemp(dir=directory)
            os.unlink(path)
            weakref.finalize(self, os.close, self.descriptor)
            os.ftruncate(self.descriptor, count * records.nbytes)
        except OSError as error:
            raise TierError(
                f"spill_to: cannot create a file of {count * records.nbytes:,} bytes in {self._directory!r}: {error}. "
                "Create the directory, or pass another one."
            ) from error
        os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def write(self, numbers: Tensor, records: Tensor) -> None:
        """Writes records (K, B), uint8, at the numbers (K,), with one write for each run of consecutive numbers. Raises
        `TierError` if a write fails.
        """
        try:
            for at, run in self._runs(numbers, records):
                done = 0
                while done < len(run):
                    more = os.pwrite(self.descriptor, run[done:], at + done)
                    if more == 0:
                        raise OSError(errno.ENOSPC, f"only {done} of {len(run)} bytes were written")
                    done += more
        except OSError as error:
            raise TierError(
                f"writing {records.numel():,} bytes of rows of {self._table} to {self._directory} failed: {error}. "
                "The last checkpoint is intact. Free some disk space, pass another directory as spill_to, "
                "or raise table_memory."
            ) from error

    def read(self, numbers: Tensor, rows: Tensor | None = None, into: Tensor | None = None) -> Tensor:
        """Reads the records `numbers` (K,), in ascending order, all of which must have been written. Returns records
        (K, B).

        Args:
            rows: (K,) the row ids that the records must have, or None to accept any.
            into: memory for at least K records, or None to allocate it.

        Raises `TierError` if a read failed, or if a record differs from what was written.
        """
        records = self._output_buffer(numbers, into)
        try:
            for at, run in self._runs(numbers, records):
                done = 0
                while done < len(run):
                    more = os.preadv(self.descriptor, [run[done:]], at + done)
                    if more == 0:
                        there = os.fstat(self.descriptor).st_size
                        raise OSError(f"the file has only {there:,} of {at + len(run):,} bytes")
                    done += more
        except OSError as error:
            raise TierError(
                f"rows of {self._table} cannot be read from their file in {self._directory}: {error}. Check the disk, "
                "and continue from the last checkpoint, which is intact."
            ) from error
        expected = self._records.rows(records) if rows is None else rows
        wrong = self._find_wrong(records, expected)
        if bool(wrong.any()):
            raise TierError(
                f"row {int(expected[wrong][0])} of {self._table} has changed in its file in {self._directory} "
                f"({int(wrong.sum())} of {numbers.numel()} records have a wrong checksum). The disk may be faulty. "
                "Load the last checkpoint, and pass a directory on another disk as spill_to."
            )
        return records

    def read_cached(self, numbers: Tensor, rows: Tensor | None = None, into: Tensor | None = None) -> Tensor | None:
        """Reads records as `read` does, from the page cache. Returns None if a record is not there or is damaged."""
        records = self._output_buffer(numbers, into)
        try:
            for at, run in self._runs(numbers, records):
                if os.preadv(self.descriptor, [run], at, os.RWF_NOWAIT) < len(run):
                    return None
        except OSError:
            return None
        return None if bool(self._find_wrong(records, rows).any()) else records

    def _output_buffer(self, numbers: Tensor, into: Tensor | None) -> Tensor:
        """Returns memory for the records that are read: the head of `into`, or new memory."""
        if into is not None:
            return into[: numbers.numel()]
        size = numbers.numel(), self._records.nbytes
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self._pinned)

    def _runs(self, numbers: Tensor, records: Tensor) -> Iterator[tuple[int, memoryview]]:
        """Yields (offset in the file, bytes in `records`) for each run of consecutive record numbers."""
        nbytes, data, found = self._records.nbytes, records.numpy().data.cast("B"), numbers.numpy()
        starts = np.flatnonzero(np.diff(found) != 1) + 1
        firsts = [0, *starts.tolist()]
        for first, stop in zip(firsts, [*firsts[1:], len(found)], strict=True):
            yield int(found[first]) * nbytes, data[first * nbytes : stop * nbytes]

    def _find_wrong(self, records: Tensor, rows: Tensor | None) -> Tensor:
        """Returns a mask (K,) that is True for records whose checksum or row id is wrong."""
        wrong = self._records.wrong(records)
        return wrong if rows is None else wrong.logical_or_(self._records.rows(records) != rows)


class HostRecords:
    """Stores this rank's rows of a table in host memory. A record has one row's weights and optimizer state."""

    def __init__(self, count: int, records: Records) -> None:
        self._all = torch.empty((count, records.nbytes), dtype=torch.uint8, device="cpu")

    @property
    def nbytes(self) -> int:
        """The bytes of memory once every row has been written."""
        return self._all.nbytes

    def write(self, numbers: Tensor, records: Tensor) -> None:
        self._all.index_copy_(0, numbers.to(torch.int64), records)

    def read(self, numbers: Tensor, rows: Tensor | None = None, into: Tensor | None = None) -> Tensor:
        """Reads records into new pinned memory. Ignores `rows` and `into`."""
        into = torch.empty((numbers.numel(), self._all.shape[1]), dtype=torch.uint8, device="cpu", pin_memory=True)
        return torch.index_select(self._all, 0, numbers, out=into)

    # -- record numbers, as in `RecordLog` -----------------------------------------------------------------------------

    def take_numbers(self, rows: Tensor) -> Tensor:
        return rows.to(torch.int32)

    def free_numbers(self, numbers: Tensor) -> None:
        """Does nothing, because each row keeps its record number."""

    def needs_empty_block(self, count: int) -> bool:
        return False
