"""Joined tables: several tables stacked as one matrix of rows, which is exchanged, updated and stored as one table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType

JOINED_TABLE_BYTES = 2**32
"""Maximum bytes of a rank's part of a joined table. The rank briefly holds twice as many when its tables are joined."""

OUTSIDE = 2**48
"""Unit of the offsets that `embrace::join_ids` adds to ids outside of their table; above twice any table's rows."""


@dataclass(frozen=True)
class JoinedTable:
    """Several sharded tables stacked as one. Row i of a table is row `first + i` of the joined table, where `first` is
    the table's entry in `bounds`.

    Attributes:
        tables: parameter names, in the order of their rows.
        bounds: the first row of each table, followed by the total number of rows.
        padding_rows: rows of the joined table that get no gradient, because they are padding rows of the tables.
    """

    tables: tuple[str, ...]
    bounds: tuple[int, ...]
    padding_rows: tuple[int, ...] = ()

    @staticmethod
    def from_tables(rows: Mapping[str, int], paddings: Mapping[str, int] = MappingProxyType({})) -> JoinedTable:
        """Creates the joined table of several tables, which are stacked in the order of `rows`.

        Args:
            rows: parameter name -> number of rows.
            paddings: parameter name -> the row that gets no gradient, or a negative number.

        >>> JoinedTable.from_tables({"user.weight": 10, "item.weight": 20}, {"item.weight": 3})
        JoinedTable(tables=('user.weight', 'item.weight'), bounds=(0, 10, 30), padding_rows=(13,))
        """
        bounds = tuple(accumulate(rows.values(), initial=0))
        of_tables = [(first, paddings.get(table, -1)) for table, first in zip(rows, bounds, strict=False)]
        return JoinedTable(tuple(rows), bounds, tuple(first + row for first, row in of_tables if row >= 0))

    @property
    def name(self) -> str:
        """The name of the joined table in launches and updates.

        >>> JoinedTable(("user.weight", "item.weight", "shop.weight"), (0, 10, 30, 35)).name
        'user.weight and 2 more'
        """
        return f"{self.tables[0]} and {len(self.tables) - 1} more"

    def decode_invalid_id(self, value: int) -> tuple[str, int]:
        """Decodes `value`, the number by which the op `embrace::join_ids` replaced an id outside its table. Returns
        (table, id), or (name of the joined table, `value`) if the id was too large to be encoded.

        >>> JoinedTable(("user.weight", "item.weight"), (0, 10, 30)).decode_invalid_id(25 - 2 * 2**48)
        ('item.weight', 25)
        """
        number = (-value + OUTSIDE // 2) // OUTSIDE
        if not 1 <= number <= len(self.tables):  # the id was too large to be encoded
            return self.name, value
        return self.tables[number - 1], value + number * OUTSIDE

    def rows_of(self, table: str) -> range:
        """Returns the range of a table's rows in the joined table.

        >>> JoinedTable(("user.weight", "item.weight"), (0, 10, 30)).rows_of("item.weight")
        range(10, 30)
        """
        k = self.tables.index(table)
        return range(self.bounds[k], self.bounds[k + 1])
