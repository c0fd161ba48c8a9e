"""Numbers for symbolic sizes: known from the capture, expected by a plan, or else a constant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

UNKNOWN_SIZE = 64
"""A small number used for an unknown size, or an unknown number of rows of a table."""


@dataclass(frozen=True)
class RowCounts:
    """How many rows of a table a step is expected to read; equal on all ranks.

    Attributes:
        own: the number of unique rows that a single rank reads; the maximum over ranks.
        all: the sum over ranks of the number of unique rows that each reads.
        together: the number of unique rows that at least one rank reads.
    """

    own: int
    all: int
    together: int

    @classmethod
    def unknown(cls, num_rows: int, world_size: int) -> RowCounts:
        """Returns counts for a table of `num_rows` rows whose counts are unknown: each rank is assumed to read
        `UNKNOWN_SIZE` rows.
        """
        own = min(UNKNOWN_SIZE, num_rows)
        return cls(own, world_size * own, min(world_size * own, num_rows))

    @classmethod
    def total(cls, tables: Sequence[RowCounts]) -> RowCounts:
        """Returns the sum of several tables' counts."""
        return cls(*(sum(counts) for counts in zip(*((t.own, t.all, t.together) for t in tables), strict=True)))


@dataclass(frozen=True)
class ExpectedSizes:
    """Numbers to assume for the symbolic sizes of a graph.

    Attributes:
        by_symbol: name of the symbol for a size that depends on data -> the expected number.
    """

    by_symbol: Mapping[str, int] = field(default_factory=dict)

    def number(self, size: int | torch.SymInt) -> int:
        """Returns a number for a size: its value when the graph was captured, if it had one, or else the expected
        number. If no number is expected, returns `UNKNOWN_SIZE`.
        """
        if isinstance(size, int):
            return size
        if is_known(size):
            return int(size.node.hint)
        expression = size.node.expr
        expected = {symbol: self.by_symbol.get(str(symbol)) for symbol in expression.free_symbols}
        return UNKNOWN_SIZE if None in expected.values() else int(expression.subs(expected))


NOTHING_EXPECTED = ExpectedSizes()


def is_known(size: int | torch.SymInt) -> bool:
    """Returns whether a size had a value when the graph was captured, rather than depending on data."""
    return isinstance(size, int) or getattr(size.node, "hint", None) is not None
