"""Bytes of memory that a table beyond memory takes, by its rows and those of them that are in memory."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from embrace_fx.runtime.tiers.records import Column

ROW_BYTES = 4
"""Of a row in memory that has no slot: where it is."""
SLOT_BYTES = 3 * 8 + 4 + 1
"""Of a slot, besides its columns."""
ON_THEIR_WAY = 1.25
"""Times the memory of slots: that of slots and of rows on their way. These are no more than a quarter: of 32 parts two
wait to be written, one is packed, two are read, two are moved in the file (`file_thread.py`); of a device as many leave
as four of them, and one of eight come."""


def slot_bytes(columns: Mapping[str, Column]) -> float:
    """Bytes of memory for a row that is there, and for its share of what is on its way."""
    return (sum(column.nbytes for column in columns.values()) + SLOT_BYTES) * ON_THEIR_WAY


def least_bytes(rows: int, slots: int, columns: Mapping[str, Column]) -> int:
    """Bytes of memory that slots of a table take at most."""
    return rows * ROW_BYTES + ceil(slots * slot_bytes(columns))
