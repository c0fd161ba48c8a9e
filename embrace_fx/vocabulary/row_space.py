"""Row spaces: tables below each other as one matrix of rows, which are exchanged, updated and kept as one table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType

SPACE_BYTES = 2**30
"""Most bytes of a rank's part of a row space: the rank holds twice as many for a moment when its tables become one."""

OUTSIDE = 2**48
"""Unit of the marks that `embrace::join_ids` puts on ids outside of their table; above twice any table's rows."""


@dataclass(frozen=True)
class RowSpace:
    """Sharded tables of one width, dtype and update rule; row of the space = first row of the table + id.

    Attributes:
        tables: parameter names, in the order of their rows.
        bounds: first row of each table in the space, and the number of its rows.
        padding_rows: rows of the space that get no gradient.
    """

    tables: tuple[str, ...]
    bounds: tuple[int, ...]
    padding_rows: tuple[int, ...] = ()

    @staticmethod
    def of(rows: Mapping[str, int], paddings: Mapping[str, int] = MappingProxyType({})) -> RowSpace:
        """Makes the space of tables in this order: parameter name -> number of rows.

        Args:
            paddings: parameter name -> the row without gradient; below 0, there is none.

        >>> RowSpace.of({"user.weight": 10, "item.weight": 20}, {"item.weight": 3})
        RowSpace(tables=('user.weight', 'item.weight'), bounds=(0, 10, 30), padding_rows=(13,))
        """
        bounds = tuple(accumulate(rows.values(), initial=0))
        of_tables = [(first, paddings.get(table, -1)) for table, first in zip(rows, bounds, strict=False)]
        return RowSpace(tuple(rows), bounds, tuple(first + row for first, row in of_tables if row >= 0))

    @property
    def name(self) -> str:
        """The name of the space in launches and updates.

        >>> RowSpace(("user.weight", "item.weight", "shop.weight"), (0, 10, 30, 35)).name
        'user.weight and 2 more'
        """
        return f"{self.tables[0]} and {len(self.tables) - 1} more"

    def outside(self, value: int) -> tuple[str, int]:
        """Returns the table, and the id outside of it, that `embrace::join_ids` has turned into a number.

        >>> RowSpace(("user.weight", "item.weight"), (0, 10, 30)).outside(25 - 2 * 2**48)
        ('item.weight', 25)
        """
        number = (-value + OUTSIDE // 2) // OUTSIDE
        if not 1 <= number <= len(self.tables):  # an id beyond all numbers of rows
            return self.name, value
        return self.tables[number - 1], value + number * OUTSIDE

    def rows_of(self, table: str) -> range:
        """Returns the rows of one of its tables.

        >>> RowSpace(("user.weight", "item.weight"), (0, 10, 30)).rows_of("item.weight")
        range(10, 30)
        """
        k = self.tables.index(table)
        return range(self.bounds[k], self.bounds[k + 1])
