"""Assigns record numbers (places in a log-structured file), so that a batch of rows needs few writes.

Contract
    A record is never overwritten: it gets a new number, and its old one is freed. Numbers are grouped in blocks, and a
    block without used numbers is reused. If fewer than a quarter of the numbers up to the highest are in use, or no
    block is free, the caller empties the block with the fewest records (`emptiest_block`) by moving them.

    block 0  [a . . d]   block 1  [. f . .]   block 2  [i j       take(3) -> 10, 11 and, block 1 emptied, 4
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

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
    """Assigns record numbers (places in a file), and keeps track of which numbers are in use.

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
