"""Stores records, each a row's values and optimizer state, in a file, or in host memory for a device.

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
    """A row cannot be read from its file or written to it."""


class RecordFile:
    """The records of a table on this rank, in a file.

    Args:
        directory: of the file.
        table: its name, for errors.
        count: the maximum number of records.
        records: their columns.
        pinned: whether reads return pinned memory, from which a device copies.

    Raises:
        TierError: the file cannot be created.
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
        """Writes records (K, B) uint8 at numbers (K,), with one write per run of consecutive numbers.

        Raises:
            TierError: a write failed.
        """
        try:
            for at, run in self._runs(numbers, records):
                done = 0
                while done < len(run):
                    more = os.pwrite(self.descriptor, run[done:], at + done)
                    if more == 0:
                        raise OSError(errno.ENOSPC, f"{done} of {len(run)} bytes written")
                    done += more
        except OSError as error:
            raise TierError(
                f"writing {records.numel():,} bytes of rows of {self._table} to {self._directory} failed: {error}. "
                "The last checkpoint is intact. Free some space, pass another directory as spill_to, "
                "or raise table_memory."
            ) from error

    def read(self, numbers: Tensor, rows: Tensor | None = None, into: Tensor | None = None) -> Tensor:
        """Reads records (K, B) at ascending numbers (K,), all of which have been written.

        Args:
            rows: (K,) the expected row ids; None accepts any.
            into: memory for at least K records; None allocates it.

        Raises:
            TierError: a read failed, or a record differs from what was written.
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
                f"({int(wrong.sum())} of {numbers.numel()} records have a wrong checksum). The disk may be faulty: "
                "continue from the last checkpoint, on another disk."
            )
        return records

    def read_cached(self, numbers: Tensor, rows: Tensor | None = None, into: Tensor | None = None) -> Tensor | None:
        """Reads records without waiting for the disk. Returns None if one needs the disk or is wrong.

        Args:
            numbers, rows, into: as for `read`.
        """
        records = self._output_buffer(numbers, into)
        try:
            for at, run in self._runs(numbers, records):
                if os.preadv(self.descriptor, [run], at, os.RWF_NOWAIT) < len(run):
                    return None
        except OSError:
            return None
        return None if bool(self._find_wrong(records, rows).any()) else records

    def _output_buffer(self, numbers: Tensor, into: Tensor | None) -> Tensor:
        """Returns memory for the records: the head of `into`, or newly allocated memory."""
        if into is not None:
            return into[: numbers.numel()]
        size = numbers.numel(), self._records.nbytes
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self._pinned)

    def _runs(self, numbers: Tensor, records: Tensor) -> Iterator[tuple[int, memoryview]]:
        """Yields, for each run of consecutive record numbers, its offset in the file and its bytes in `records`."""
        nbytes, data, found = self._records.nbytes, records.numpy().data.cast("B"), numbers.numpy()
        starts = np.flatnonzero(np.diff(found) != 1) + 1
        firsts = [0, *starts.tolist()]
        for first, stop in zip(firsts, [*firsts[1:], len(found)], strict=True):
            yield int(found[first]) * nbytes, data[first * nbytes : stop * nbytes]

    def _find_wrong(self, records: Tensor, rows: Tensor | None) -> Tensor:
        """Returns a mask of records whose checksum or row id is wrong."""
        wrong = self._records.wrong(records)
        return wrong if rows is None else wrong.logical_or_(self._records.rows(records) != rows)


class HostRecords:
    """The records of a table on this rank, in host memory.

    Args:
        count: the number of rows.
        records: their columns.
    """

    def __init__(self, count: int, records: Records) -> None:
        self._all = torch.empty((count, records.nbytes), dtype=torch.uint8, device="cpu")

    @property
    def nbytes(self) -> int:
        """Returns the bytes of memory once every row has been written."""
        return self._all.nbytes

    def write(self, numbers: Tensor, records: Tensor) -> None:
        """Writes records (K, B) uint8 at numbers (K,)."""
        self._all.index_copy_(0, numbers.to(torch.int64), records)

    def read(self, numbers: Tensor, rows: Tensor | None = None, into: Tensor | None = None) -> Tensor:
        """Reads records (K, B) at numbers (K,) into new memory, without a check of their rows."""
        into = torch.empty((numbers.numel(), self._all.shape[1]), dtype=torch.uint8, device="cpu", pin_memory=True)
        return torch.index_select(self._all, 0, numbers, out=into)

    # -- record numbers, as in `RecordLog` -----------------------------------------------------------------------------

    def take_numbers(self, rows: Tensor) -> Tensor:
        """Returns the record numbers (K,) of rows (K,), which are the row ids."""
        return rows.to(torch.int32)

    def free_numbers(self, numbers: Tensor) -> None:
        """Does nothing, because a row keeps its number."""

    def needs_empty_block(self, count: int) -> bool:
        """Returns False, because each row has its own record."""
        return False
