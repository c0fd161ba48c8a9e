"""Places of records in a file that is written in order: a batch of rows takes few runs, and one write for each.

Contract
    A record is never written where it was: it takes a new number, and the old one is given back. Numbers lie in blocks;
    one that has none in use is taken again. A block with few is emptied by whoever moves them elsewhere (`sparsest`),
    while fewer than half of the numbers up to the highest are in use, or none is left.

    block 0  [a . . d]   block 1  [. f . .]   block 2  [i j       take(3) -> 10, 11 and, block 1 emptied, 4
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_SPARE = 1.25
"""Of all records, how many the file has room for: then some block has a fifth of its numbers free."""
_FEW = 16
"""Blocks of which nobody minds that they are not half in use."""


class RecordLog:
    """The numbers of a file's records.

    Args:
        records: at most in use.
        at_once: at most taken together.
        block: numbers of a block.
    """

    def __init__(self, records: int, at_once: int, block: int) -> None:
        self.block = block
        self._blocks = int(_SPARE * records) // block + at_once // block + 4
        self._in_use = torch.zeros(self._blocks, dtype=torch.int32, device="cpu")
        self._full = torch.zeros(self._blocks, dtype=torch.bool, device="cpu")
        self._count = 0  # of numbers in use
        self._begun = 0  # blocks that have ever been written
        self._empty: list[int] = []
        self._next, self._end = 0, 0  # of the block that is being written

    @property
    def size(self) -> int:
        """Records that the file has room for."""
        return self._blocks * self.block

    def lacks(self, count: int) -> bool:
        """Whether a block is to be emptied before so many numbers are taken; one more is kept for what it holds."""
        short = count - (self._end - self._next) - (len(self._empty) - 1) * self.block
        begins = -(-short // self.block)
        if begins <= 0:
            return False
        begun = self._begun + begins
        return begun > self._blocks or (begun > _FEW and begun * self.block > 2 * (self._count + count))

    def take(self, rows: Tensor) -> Tensor:
        """Takes numbers (K,) for rows (K,), in runs."""
        found: list[range] = []
        count = rows.numel()
        self._count += count
        while count:
            if self._next == self._end:
                self._open()
            run = range(self._next, min(self._end, self._next + count))
            self._in_use[run.start // self.block] += len(run)
            self._next, count = run.stop, count - len(run)
            found.append(run)
        return numbers_of(found)

    def give_back(self, numbers: Tensor) -> None:
        """Has numbers (K,) in use no more."""
        if not numbers.numel():
            return
        blocks, counts = (numbers // self.block).unique(return_counts=True)
        self._in_use[blocks] -= counts.to(torch.int32)
        self._count -= numbers.numel()
        empty = blocks[(self._in_use[blocks] == 0) & self._full[blocks]]
        self._full[empty] = False
        self._empty += empty.tolist()

    def sparsest(self) -> range:
        """The numbers of the full block of which the fewest are in use."""
        in_use = self._in_use[: self._begun].masked_fill(~self._full[: self._begun], self.block + 1)
        first = int(in_use.argmin()) * self.block
        return range(first, first + self.block)

    def _open(self) -> None:
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


def numbers_of(runs: Sequence[range]) -> Tensor:
    """The numbers (K,) of runs, as maps of rows have them."""
    return torch.cat([torch.arange(r.start, r.stop, dtype=torch.int32, device="cpu") for r in (range(0), *runs)])
