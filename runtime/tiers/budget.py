"""Bytes of memory that a table beyond memory takes at most, by its rows and those of them that are in memory.

Records are in memory twice only in buffers that a working set has from the first. Of 32 parts of its slots, three leave
for the file, two are read, by two threads, one begins, two take what they have skipped, and for one the allocator keeps
what it has given; of a device as many leave as four of them, and one of twelve come.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from embrace_fx.runtime.tiers.record_log import NUMBER_BYTES, block_size
from embrace_fx.runtime.tiers.records import Column, Records

PLACE_BYTES = 4
"""Of a row, where it is."""
SLOT_BYTES = 2 * 8 + 3 * 4 + 1 + 24 + 8 + 7 + 24
"""Of a slot, besides its columns: what tells of it; what is made as slots are emptied; a row that waits to be read; of
the quarter at most that come, their numbers; and what is made of those that are looked for at once, as many."""
LEAVING, OTHERS = 3, 6
"""Parts of records that wait to be written; others."""
_PARTS, _FEWEST, _MOST = 32, 8, 1 << 12
"""Of all slots, so many parts, of at least and at most so many rows."""


def part_of(slots: int) -> int:
    """Returns the rows that are read, written or moved at once."""
    return min(max(slots // _PARTS, _FEWEST), _MOST)


def row_bytes(rows: int, columns: Mapping[str, Column]) -> float:
    """Bytes of memory for each of a table's rows."""
    return PLACE_BYTES + NUMBER_BYTES / block_size(Records(columns).nbytes, rows)


def slot_bytes(columns: Mapping[str, Column]) -> float:
    """Bytes of memory for a row that is there, and for its share of buffers."""
    of_columns = sum(column.nbytes for column in columns.values())
    return of_columns + SLOT_BYTES + Records(columns).nbytes * (LEAVING + OTHERS) / _PARTS


def own_bytes(columns: Mapping[str, Column]) -> int:
    """Bytes of memory of a working set, besides."""
    return Records(columns).nbytes * (LEAVING + OTHERS) * _FEWEST + 128


def least_bytes(rows: int, slots: int, columns: Mapping[str, Column]) -> int:
    """Bytes of memory that slots of a table take at most."""
    return ceil(rows * row_bytes(rows, columns) + slots * slot_bytes(columns)) + own_bytes(columns)
