"""Stand-ins for sizes: the capture's, what a plan expects of the data, and one number where neither is known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

UNKNOWN_SIZE = 64
"""What stands for a size, or for a table's rows, of which nothing is known before the data is: something small."""


@dataclass(frozen=True)
class RowCounts:
    """Row counts of a table that ranks have agreed to expect of a step: the same numbers on all of them.

    Attributes:
        own: unique rows that a rank reads, of the rank that reads the most.
        all: the sum of all ranks' unique rows.
        together: unique rows that any rank reads.
    """

    own: int
    all: int
    together: int

    @classmethod
    def unknown(cls, num_rows: int, world_size: int) -> RowCounts:
        """Counts that stand in for a table of which a plan says nothing."""
        own = min(UNKNOWN_SIZE, num_rows)
        return cls(own, world_size * own, min(world_size * own, num_rows))


@dataclass(frozen=True)
class ExpectedSizes:
    """The sizes of a graph's values as numbers, for estimates: nothing is proved by them.

    Attributes:
        by_symbol: the name of a symbol that stands for a size that only the data knows -> the number expected.
    """

    by_symbol: Mapping[str, int] = field(default_factory=dict)

    def number(self, size: int | torch.SymInt) -> int:
        """A size, its hint at capture, or what is expected of it; `UNKNOWN_SIZE` where a part of it is not known."""
        if isinstance(size, int):
            return size
        if is_known(size):
            return int(size.node.hint)
        expression = size.node.expr
        expected = {symbol: self.by_symbol.get(str(symbol)) for symbol in expression.free_symbols}
        return UNKNOWN_SIZE if None in expected.values() else int(expression.subs(expected))


NOTHING_EXPECTED = ExpectedSizes()


def is_known(size: int | torch.SymInt) -> bool:
    """Tells whether a size is the capture's, and not the data's."""
    return isinstance(size, int) or getattr(size.node, "hint", None) is not None
