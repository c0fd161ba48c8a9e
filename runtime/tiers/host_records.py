"""Records in the memory of a device's host: what a file's are on a disk, each at the number of its row.

Contract
    A row takes memory once its record has been written: pages that nobody has written are not there. A thread gathers
    what is read into pinned memory, from which the device copies it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from embrace_fx.runtime.tiers.records import Records


class HostRecords:
    """The records of one table on this rank.

    Args:
        count: how many rows there are.
        records: their columns.
    """

    def __init__(self, count: int, records: Records) -> None:
        self._all = torch.empty((count, records.nbytes), dtype=torch.uint8, device="cpu")
        self.size = count

    @property
    def nbytes(self) -> int:
        """Bytes that they take once every row has moved."""
        return self._all.nbytes

    def write(self, numbers: Tensor, records: Tensor) -> None:
        """Writes records (K, B) uint8 at numbers (K,)."""
        self._all.index_copy_(0, numbers.to(torch.int64), records)

    def read(self, numbers: Tensor, rows: Tensor | None = None, into: Tensor | None = None) -> Tensor:
        """Reads records (K, B) at numbers (K,), whichever rows they are of, into memory of their own."""
        into = torch.empty((numbers.numel(), self._all.shape[1]), dtype=torch.uint8, device="cpu", pin_memory=True)
        return torch.index_select(self._all, 0, numbers, out=into)

    # -- numbers, as of `RecordLog` ------------------------------------------------------------------------------------

    def take(self, rows: Tensor) -> Tensor:
        """Returns the numbers (K,) of rows (K,): their own."""
        return rows.to(torch.int32)

    def give_back(self, numbers: Tensor) -> None:
        """Does nothing: a row keeps its number."""

    def lacks(self, count: int) -> bool:
        """Tells that there is room: each row has its own."""
        return False
