"""Computes the maximum memory of a table beyond memory from its rows and slots.

Besides the slots, only fixed buffers hold records. With slots in 32 parts, three parts may wait to be written, two be
read by two threads, one be initialized, two apply deferred steps, and one stay with the allocator. On a device, four
parts may wait to be written, and a twelfth of the slots may be arriving.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from embrace_fx.cost.storage import Draws, RowMemory, StorageTier
from embrace_fx.runtime.tiers.record_log import NUMBER_BYTES, block_size
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
    """Returns how many rows are read, written or moved at once, for this number of slots."""
    return min(max(slots // _PARTS, _FEWEST), _MOST)


def row_bytes(rows: int, columns: Mapping[str, Column]) -> float:
    """Returns the bytes of memory per row of the table."""
    return PLACE_BYTES + NUMBER_BYTES / block_size(Records(columns).nbytes, rows)


def slot_bytes(columns: Mapping[str, Column]) -> float:
    """Returns the bytes of memory per slot, including its share of buffers."""
    of_columns = sum(column.nbytes for column in columns.values())
    return of_columns + SLOT_BYTES + Records(columns).nbytes * (LEAVING + OTHERS) / _PARTS


def own_bytes(columns: Mapping[str, Column]) -> int:
    """Returns the bytes of memory of a working set that do not depend on its slots."""
    return Records(columns).nbytes * (LEAVING + OTHERS) * _FEWEST + 128


def least_bytes(rows: int, slots: int, columns: Mapping[str, Column]) -> int:
    """Returns the bytes of memory of a table with so many rows and slots, at most."""
    return ceil(rows * row_bytes(rows, columns) + slots * slot_bytes(columns)) + own_bytes(columns)


@dataclass(frozen=True)
class Tier:
    """The limit of memory for one table, and the columns of its rows.

    Attributes:
        memory: bytes for its working set; below 1, the share of its rows.
        whole: the value asked for, which tables may share.
        columns: name -> column of a row on this rank.
    """

    memory: float
    whole: float
    columns: Mapping[str, Column]

    def slots(self, rows: int, table: str) -> int:
        """Counts the rows that stay in memory.

        Raises:
            ValueError: none would.
        """
        if self.memory < 1:
            return max(1, min(rows, ceil(self.memory * rows)))
        each = row_bytes(rows, self.columns)
        found = int((self.memory - rows * each - own_bytes(self.columns)) // slot_bytes(self.columns))
        if found < 1:
            raise ValueError(
                f"table_memory: {int(self.whole):,} bytes are too few for {table}. It needs at least "
                f"{self.table_memory_text(1, rows)}: room for one row, and {each:.1f} bytes for each of its {rows:,} "
                "rows to say where the row is. Raise it, or train on more ranks."
            )
        return min(rows, found)

    def table_memory_text(self, slots: int, rows: int) -> str:
        """Returns the `table_memory` that keeps this many rows in memory, as text."""
        if self.memory < 1:
            return f"{ceil(slots / rows * 1e4) / 1e4:g}"
        return f"{ceil(least_bytes(rows, slots, self.columns) * self.whole / self.memory):,} bytes"

    def row_memory(
        self, table: str, rows: int, at_once: int, draws: Draws, storage: tuple[StorageTier, ...]
    ) -> RowMemory:
        """Predicts the reads and writes of a table's rows, `at_once` of which all ranks read in a step."""
        sizes = slot_bytes(self.columns), row_bytes(rows, self.columns), own_bytes(self.columns)
        return RowMemory(rows, self.slots(rows, table), *sizes, Records(self.columns).nbytes, at_once, draws, storage)
