"""Stores records, each a row's weights and optimizer state, in a file, or in host memory for a device. Measures both.

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
import time
import weakref
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from embrace_fx.runtime.tiers.records import WEIGHTS, Records


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


# -- speed -------------------------------------------------------------------------------------------------------------

READ_ROWS, APART_BYTES, WRITTEN_BYTES = 128, 1 << 20, 1 << 20
"""The number of rows to read; their distance, so that no two share a page; the bytes of one write."""


def measure_disk(directory: str | Path, records: Records) -> tuple[float, float]:
    """Measures the disk of a folder without the kernel's page cache, for records of this format. Returns (milliseconds
    to read a row, milliseconds to write a row). Raises `TierError` if rows cannot be written or read.
    """
    apart, run = -(-APART_BYTES // records.nbytes), max(1, WRITTEN_BYTES // records.nbytes)
    file = RecordFile(directory, "a probe", READ_ROWS * apart + run, records)
    rows = torch.arange(0, READ_ROWS * apart, apart, device="cpu")
    file.write(rows, _sample_records(rows, records))
    os.fdatasync(file.descriptor)
    written = torch.arange(run, device="cpu")
    packed, written = _sample_records(written, records), written + READ_ROWS * apart
    began = time.perf_counter()
    file.write(written, packed)
    os.fdatasync(file.descriptor)
    write_ms = (time.perf_counter() - began) * 1e3 / run
    os.posix_fadvise(file.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    began = time.perf_counter()
    file.read(rows)
    return (time.perf_counter() - began) * 1e3 / READ_ROWS, write_ms


def measure_host(records: Records) -> tuple[float, float]:
    """Returns (milliseconds to gather a row from host memory into pinned memory, milliseconds to write a row back)."""
    apart = -(-APART_BYTES // records.nbytes)
    rest, rows = HostRecords(READ_ROWS * apart, records), torch.arange(0, READ_ROWS * apart, apart, device="cpu")
    packed, took_ms = _sample_records(rows, records), (0.0, 0.0)
    for _ in range(2):  # the first run also allocates memory
        began = time.perf_counter()
        rest.write(rows, packed)
        written = time.perf_counter()
        rest.read(rows)
        took_ms = (time.perf_counter() - written) * 1e3 / READ_ROWS, (written - began) * 1e3 / READ_ROWS
    return took_ms


def _sample_records(rows: Tensor, records: Records) -> Tensor:
    """Returns records with the ids `rows` (K,) and initial values, for a measurement."""
    return records.pack(rows, {WEIGHTS: records.columns[WEIGHTS].filled(rows.numel())})


# -- record numbers ----------------------------------------------------------------------------------------------------


_SPARE = 1.5
"""Capacity of the file as a multiple of the records, so that some block has a third of its numbers free."""
_FEW = 16
"""Number of blocks below which less than a quarter may be in use."""

_BLOCK_BYTES, _BLOCKS = 1 << 18, 64
"""Maximum bytes of a block, and minimum number of blocks unless the file is small."""
_FEWEST = 8
"""Minimum records of a block."""
NUMBER_BYTES = 14 * _SPARE
"""Bytes of bookkeeping per block: its numbers in use, whether it is full, its place in the list of empty blocks, and a
temporary of the search for the sparsest."""


def block_size(record_bytes: int, records: int) -> int:
    """Returns the number of records per block of a file with `records` records."""
    return max(_FEWEST, min(_BLOCK_BYTES // record_bytes, records // _BLOCKS))


class RecordLog:
    """Assigns record numbers (places in a log-structured file), so that a batch of rows needs few writes.

    A record is never overwritten: it gets a new number, and its old one is freed. Numbers are grouped in blocks, and a
    block without used numbers is reused. If fewer than a quarter of the numbers up to the highest are in use, or no
    block is free, the caller empties the block with the fewest records (`emptiest_block`) by moving them.

        block 0  [a . . d]   block 1  [. f . .]   block 2  [i j       take(3) -> 10, 11 and, block 1 emptied, 4

    Args:
        records: the maximum number of records in use.
        at_once: the maximum number of record numbers assigned at once.
        block: the number of records per block.
    """

    def __init__(self, records: int, at_once: int, block: int) -> None:
        self.block = block
        self._blocks = int(_SPARE * records) // block + at_once // block + 4
        self._in_use = torch.zeros(self._blocks, dtype=torch.int32, device="cpu")
        self._full = torch.zeros(self._blocks, dtype=torch.bool, device="cpu")
        self._count = 0  # how many record numbers are in use
        self._begun = 0  # how many blocks have been used so far
        self._empty = array("i")
        self._next, self._end = 0, 0  # the next number in the current block, and the block's end

    @property
    def nbytes(self) -> int:
        """The bytes of memory for bookkeeping."""
        return self._in_use.nbytes + self._full.nbytes + self._blocks * self._empty.itemsize

    @property
    def size(self) -> int:
        """The number of records that the file can hold."""
        return self._blocks * self.block

    def needs_empty_block(self, count: int) -> bool:
        """Returns whether a block must be emptied before `count` record numbers can be assigned."""
        short = count - (self._end - self._next) - (len(self._empty) - 1) * self.block
        begins = -(-short // self.block)
        if begins <= 0:
            return False
        begun = self._begun + begins
        return begun > self._blocks or (begun > _FEW and begun * self.block > 4 * (self._count + count))

    def take_numbers(self, rows: Tensor) -> Tensor:
        """Assigns a free record number to each of rows (K,), consecutive where possible. Returns the numbers (K,)."""
        found: list[range] = []
        count = rows.numel()
        self._count += count
        while count:
            if self._next == self._end:
                self._open_block()
            run = range(self._next, min(self._end, self._next + count))
            self._in_use[run.start // self.block] += len(run)
            self._next, count = run.stop, count - len(run)
            found.append(run)
        return concatenate_runs(found)

    def free_numbers(self, numbers: Tensor) -> None:
        """Makes record numbers (K,) free again."""
        if not numbers.numel():
            return
        blocks, counts = (numbers // self.block).unique(return_counts=True)
        self._in_use[blocks] -= counts.to(torch.int32)
        self._count -= numbers.numel()
        empty = blocks[(self._in_use[blocks] == 0) & self._full[blocks]]
        self._full[empty] = False
        self._empty.extend(empty.tolist())

    def emptiest_block(self) -> range:
        """Returns the record numbers of the full block with the fewest records in use."""
        in_use = self._in_use[: self._begun].masked_fill(~self._full[: self._begun], self.block + 1)
        first = int(in_use.argmin()) * self.block
        return range(first, first + self.block)

    def _open_block(self) -> None:
        """Chooses an empty block, or adds a new one, for the next records."""
        if self._end:
            last = (self._end - 1) // self.block
            if int(self._in_use[last]):
                self._full[last] = True
            else:
                self._empty.append(last)
        if self._empty:
            opened = self._empty.pop()
        else:
            opened, self._begun = self._begun, self._begun + 1
        self._next, self._end = opened * self.block, (opened + 1) * self.block


def concatenate_runs(runs: Sequence[range]) -> Tensor:
    """Returns the numbers in several ranges as one tensor (K,)."""
    return torch.cat([torch.arange(r.start, r.stop, dtype=torch.int32, device="cpu") for r in (range(0), *runs)])
