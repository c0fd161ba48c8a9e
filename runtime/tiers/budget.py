"""Computes how much memory a table larger than memory needs. A slot is the place of one row in memory.

Besides the slots, only fixed buffers hold records. With slots in 32 parts, three parts may wait to be written, two be
read by two threads, one be initialized, two apply deferred steps, and one stay with the allocator. On a device, four
parts may wait to be written, and a twelfth of the slots may be arriving.

In all functions, `columns` maps the name of each column of a row (weights or optimizer state) to its format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from embrace_fx.cost.storage import Draws, RowMemory, StorageTier
from embrace_fx.runtime.tiers.record_file import NUMBER_BYTES, block_size
from embrace_fx.runtime.tiers.records import Column, Records

PLACE_BYTES = 4
"""Bytes per row, for its location."""
SLOT_BYTES = 2 * 8 + 3 * 4 + 1 + 24 + 8 + 7 + 24
"""Bytes per slot besides its columns: bookkeeping, temporaries of evictions, a row waiting to be read, numbers of
arriving rows (at most a quarter of the slots), and temporaries of a lookup of as many rows."""
LEAVING, OTHERS = 3, 6
"""Parts of the slots whose records may wait to be written, and parts in other buffers."""
_PARTS, _FEWEST, _MOST = 32, 8, 1 << 12
"""The number of parts of the slots, and the minimum and maximum rows of a part."""


def transfer_rows(slots: int) -> int:
    """Returns how many rows are read or written at once, if memory has room for `slots` rows."""
    return min(max(slots // _PARTS, _FEWEST), _MOST)


def row_bytes(rows: int, columns: Mapping[str, Column]) -> float:
    """Returns the bytes of bookkeeping for each of a table's `rows` rows, whether or not it is in memory."""
    return PLACE_BYTES + NUMBER_BYTES / block_size(Records(columns).nbytes, rows)


def slot_bytes(columns: Mapping[str, Column]) -> float:
    """Returns the bytes of memory for each row that is in memory, including its share of transfer buffers."""
    of_columns = sum(column.nbytes for column in columns.values())
    return of_columns + SLOT_BYTES + Records(columns).nbytes * (LEAVING + OTHERS) / _PARTS


def fixed_bytes(columns: Mapping[str, Column]) -> int:
    """Returns the bytes of transfer buffers that do not depend on the number of rows in memory."""
    return Records(columns).nbytes * (LEAVING + OTHERS) * _FEWEST + 128


def memory_bytes(rows: int, slots: int, columns: Mapping[str, Column]) -> int:
    """Returns the maximum bytes of memory that a table of `rows` rows needs, of which `slots` are in memory."""
    return ceil(rows * row_bytes(rows, columns) + slots * slot_bytes(columns)) + fixed_bytes(columns)


@dataclass(frozen=True)
class Tier:
    """The memory limit of one table that is larger than memory, and the columns of its rows on this rank.

    Attributes:
        memory: bytes of memory for the table's rows; if below 1, the share of the rows to keep in memory.
        whole: the limit that the user gave, which several tables may share.
    """

    memory: float
    whole: float
    columns: Mapping[str, Column]

    def slots(self, rows: int, table: str) -> int:
        """Returns how many of a table's `rows` rows the limit allows in memory. Raises `ValueError` if none."""
        if self.memory < 1:
            return max(1, min(rows, ceil(self.memory * rows)))
        each = row_bytes(rows, self.columns)
        found = int((self.memory - rows * each - fixed_bytes(self.columns)) // slot_bytes(self.columns))
        if found < 1:
            raise ValueError(
                f"table_memory: {int(self.whole):,} bytes are too few for {table}. The table needs at least "
                f"{self.table_memory_text(1, rows)}: one row, and an index of {each:.1f} bytes for each of its "
                f"{rows:,} rows. Raise table_memory, or train on more ranks."
            )
        return min(rows, found)

    def table_memory_text(self, slots: int, rows: int) -> str:
        """Returns the value of the option `table_memory` that would keep `slots` of the table's `rows` rows."""
        if self.memory < 1:
            return f"{ceil(slots / rows * 1e4) / 1e4:g}"
        return f"{ceil(memory_bytes(rows, slots, self.columns) * self.whole / self.memory):,} bytes"

    def row_memory(
        self, table: str, rows: int, at_once: int, draws: Draws, storage: tuple[StorageTier, ...]
    ) -> RowMemory:
        """Predicts how many of the table's `rows` rows each step reads from storage and writes back.

        Args:
            at_once: how many rows all ranks together read in a step.
            draws: how often each row is looked up.
            storage: the storage tiers for rows that are not in memory, fastest first.
        """
        sizes = slot_bytes(self.columns), row_bytes(rows, self.columns), fixed_bytes(self.columns)
        return RowMemory(rows, self.slots(rows, table), *sizes, Records(self.columns).nbytes, at_once, draws, storage)
