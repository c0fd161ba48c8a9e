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
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from embrace_fx.runtime.tiers.many_reads import ManyReads, Numbers
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

    Attributes:
        reads, cached_reads: each used by one thread at a time. `cached_reads` never waits for the disk.

    Raises:
        TierError: the file cannot be created.
    """

    def __init__(
        self, directory: str | Path, table: str, count: int, records: Records, *, pinned: bool = False
    ) -> None:
        self._directory, self._table, self._records, self._pinned = str(directory), table, records, pinned
        self.reads, self.cached_reads = ManyReads(), ManyReads(waits=False)
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
        """Writes records (K, B) uint8 at numbers (K,), K > 0, with one write per run of consecutive numbers.

        Raises:
            TierError: a write failed.
        """
        cuts = (numbers.diff() != 1).nonzero().view(-1).add_(1).tolist()
        for first, run in zip(numbers[[0, *cuts]].tolist(), records.tensor_split(cuts), strict=True):
            self._write_run(first, run)

    def _write_run(self, first: int, records: Tensor) -> None:
        """Writes `records` one after another into the file, from record `first` on."""
        data, at, done = records.numpy().data.cast("B"), first * self._records.nbytes, 0
        try:
            while done < len(data):
                more = os.pwrite(self.descriptor, data[done:], at + done)
                if more == 0:
                    raise OSError(errno.ENOSPC, f"{done} of {len(data)} bytes written")
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
        records = self._room(numbers, into)
        data, (at, places, lengths) = records.numpy().data.cast("B"), self._runs(numbers)
        try:
            done = self.reads(self.descriptor, at, lengths, records.data_ptr() + places)
            for run in np.flatnonzero(done < lengths).tolist():
                self._read_rest(data[places[run] : places[run] + lengths[run]], int(at[run]), int(done[run]))
        except OSError as error:
            raise TierError(
                f"rows of {self._table} cannot be read from their file in {self._directory}: {error}. Check the disk, "
                "and continue from the last checkpoint, which is intact."
            ) from error
        expected = self._records.rows(records) if rows is None else rows
        wrong = self._wrong(records, expected)
        if bool(wrong.any()):
            raise TierError(
                f"row {int(expected[wrong][0])} of {self._table} has changed in its file in {self._directory} "
                f"({int(wrong.sum())} of {numbers.numel()} records have a wrong checksum). The disk may be faulty: "
                "continue from the last checkpoint, on another disk."
            )
        return records

    def read_cached(
        self, numbers: Tensor, rows: Tensor | None = None, into: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Reads records without waiting for the disk. Returns them and a mask (K,) of those that were read.

        Args:
            numbers, rows, into: as for `read`.
        """
        records, (at, places, lengths) = self._room(numbers, into), self._runs(numbers)
        try:
            done = self.cached_reads(self.descriptor, at, lengths, records.data_ptr() + places)
        except OSError:
            done = np.zeros_like(lengths)
        there = torch.from_numpy((done == lengths).repeat(lengths // self._records.nbytes))
        return records, there.logical_and_(self._wrong(records, rows).logical_not_())

    def _room(self, numbers: Tensor, into: Tensor | None) -> Tensor:
        """Returns memory for the records: the first of `into`, or new memory."""
        if into is not None:
            return into[: numbers.numel()]
        size = numbers.numel(), self._records.nbytes
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self._pinned)

    def _runs(self, numbers: Tensor) -> tuple[Numbers, Numbers, Numbers]:
        """Returns the runs of ascending numbers (K,): offsets in the file, offsets in memory, and lengths in bytes."""
        nbytes, found = self._records.nbytes, numbers.numpy().astype(np.int64)
        starts = np.flatnonzero(np.diff(found, prepend=found[:1] - 2) != 1)
        return found[starts] * nbytes, starts * nbytes, np.diff(starts, append=len(found)) * nbytes

    def _wrong(self, records: Tensor, rows: Tensor | None) -> Tensor:
        """Returns a mask of records with a wrong checksum or a wrong row."""
        wrong = self._records.wrong(records)
        return wrong if rows is None else wrong.logical_or_(self._records.rows(records) != rows)

    def _read_rest(self, run: memoryview, at: int, done: int) -> None:
        """Reads until `run` is full; the file gave only its first `done` bytes."""
        while done < len(run):
            more = os.preadv(self.descriptor, [run[done:]], at + done)
            if more == 0:
                there = os.fstat(self.descriptor).st_size
                raise OSError(f"the file has only {there:,} of {at + len(run):,} bytes")
            done += more


class HostRecords:
    """The records of a table on this rank, in host memory.

    Args:
        count: the number of rows.
        records: their columns.
    """

    def __init__(self, count: int, records: Records) -> None:
        self._all = torch.empty((count, records.nbytes), dtype=torch.uint8, device="cpu")
        self.size = count

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

    def take(self, rows: Tensor) -> Tensor:
        """Returns the record numbers (K,) of rows (K,), which are the row ids."""
        return rows.to(torch.int32)

    def give_back(self, numbers: Tensor) -> None:
        """Does nothing, because a row keeps its number."""

    def lacks(self, count: int) -> bool:
        """Returns False, because each row has its own record."""
        return False
