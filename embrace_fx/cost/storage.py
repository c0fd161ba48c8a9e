"""Rows of tables beyond memory: how many of a step's a working set lacks, and what it takes to read and write them.

Each step draws rows independently of the steps before it, by Zipf's law with the exponent that a batch's distinct rows
tell; a working set has the rows drawn last. It then has a row that was drawn in the last T steps, T such that these
draw as many rows as it has slots (Che, Tung and Wang, "Hierarchical Web Caching Systems", JSAC 2002).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from embrace_fx.cost.sparsity import Sparsity

_HALVINGS = 60
"""Of an interval, until a number of steps or of rows, or an exponent is known."""
_STEEPEST, _LONGEST = 8.0, 1e15
"""Exponents, and steps, that are looked for."""
_BUCKETS, _CERTAIN = 200, 1e-12
"""Rows that are drawn about equally often count together; none is drawn with certainty."""


@dataclass(frozen=True)
class StorageTier:
    """A place where rows rest, as one rank reaches it with as many rows on their way as it takes at once.

    Attributes:
        name: as a report calls it.
        read_ms, write_ms: of one row, however few its bytes.
        byte_ms: of each of its bytes, besides, one way.
        holds_bytes: how much of it a rank has; None: enough.
    """

    name: str
    read_ms: float
    write_ms: float
    byte_ms: float = 0.0
    holds_bytes: float | None = None


@dataclass(frozen=True)
class Draws:
    """The ids of a step, all ranks together, drawn by Zipf's law: the k-th of V rows as often as k ** -`exponent`.

    Attributes:
        ids: of a step; 0: nothing is known.
    """

    num_rows: int
    exponent: float
    ids: float

    @classmethod
    def of(cls, lies: Sparsity) -> Draws:
        """Fits the exponent: a rank is expected to draw as many distinct rows as one does."""
        drawn = lies.draws_per_unit * lies.mean_units

        def are_few(exponent: float) -> bool:
            return cls(lies.num_units, exponent, drawn).rows <= lies.mean_units

        return cls(lies.num_units, _least(are_few, _STEEPEST), drawn * lies.world_size)

    @cached_property
    def _spectrum(self) -> tuple[Tensor, Tensor]:
        """Logarithms of the probabilities (B,) that a step does not read a row, and how many rows (B,) have each."""
        edges = torch.logspace(0, math.log10(self.num_rows), _BUCKETS, dtype=torch.float64, device="cpu").round()
        edges = torch.cat([edges, edges[-1:] + 1]).unique()
        rows, often = edges.diff(), ((edges[:-1] + edges[1:] - 1) / 2) ** -self.exponent
        return self.ids * (-often / (often * rows).sum()).clamp(min=_CERTAIN - 1).log1p(), rows

    @property
    def rows(self) -> float:
        """Distinct rows that a step is expected to read."""
        absent, rows = self._spectrum
        return -float((rows * absent.expm1()).sum())

    def lacking(self, slots: int) -> float:
        """Rows that a step reads and a working set of so many rows does not have."""
        if slots >= self.num_rows or not self.ids:
            return 0.0
        absent, rows = self._spectrum
        steps = _least(lambda steps: -float((rows * (steps * absent).expm1()).sum()) >= slots, _LONGEST)
        return -float((rows * absent.expm1() * (steps * absent).exp()).sum())


@dataclass(frozen=True)
class RowMemory:
    """A sharded table of whose rows a rank's memory holds some: what is predicted once all rows have moved.

    Attributes:
        num_rows: of the table.
        slots: rows in memory.
        slot_bytes: of one, with its optimizer state and its share of what is on its way.
        row_bytes: of each row of the table, wherever it is.
        record_bytes: of a row at rest.
        storage: the places where other rows rest, the nearest first; each holds the rows drawn last of those that those
            before it lack.
        at_once: rows that the known batches of all ranks read in a step.
        ahead: steps by which rows are read before the one that asks for them, with room for them beside its own.
    """

    num_rows: int
    slots: int
    slot_bytes: float
    row_bytes: int
    record_bytes: int
    at_once: int
    draws: Draws
    storage: tuple[StorageTier, ...]
    ahead: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes at most."""
        return self.num_rows * self.row_bytes + math.ceil(self.slots * self.slot_bytes)

    @cached_property
    def moved(self) -> tuple[tuple[StorageTier, float], ...]:
        """Rows that a step reads from each place, and as many that it writes there."""
        found, held = [], self.slots
        for place in self.storage:
            found.append((place, self.draws.lacking(held)))
            held += int((place.holds_bytes or 0) // self.record_bytes)
        return tuple(found)

    @property
    def moved_rows(self) -> float:
        """Rows that a step reads, each in the place of one that it writes."""
        return self.moved[0][1]

    @property
    def moved_bytes(self) -> float:
        """Bytes that a step reads, and as many that it writes."""
        return self.moved_rows * self.record_bytes

    @property
    def found(self) -> float:
        """The share of a step's distinct rows that are in memory without having been read for it."""
        return 1 - self.moved_rows / max(self.draws.rows, 1e-9)

    @property
    def read_ms(self) -> float:
        """Time in which a step's rows are read."""
        return sum(rows * (each.read_ms + self.record_bytes * each.byte_ms) for each, rows in self.moved)

    @property
    def write_ms(self) -> float:
        """Time in which they are written."""
        return sum(rows * (each.write_ms + self.record_bytes * each.byte_ms) for each, rows in self.moved)

    def with_slots(self, slots: int) -> RowMemory:
        """The same with so many rows in memory."""
        return replace(self, slots=min(slots, self.num_rows))

    @property
    def least(self) -> RowMemory:
        """The smallest that the known batches can keep to."""
        return self.with_slots(max(self.at_once, 1))

    def at_speed(self, step_ms: float, ahead: int = 1) -> RowMemory:
        """The smallest whose reads and writes take no longer than all else of a step, with rows read ahead of it."""

        def is_hidden(slots: float) -> bool:
            found = self.with_slots(math.ceil(slots))
            return found.read_ms + found.write_ms <= step_ms

        return self.with_slots(max((1 + ahead) * self.at_once, math.ceil(_least(is_hidden, self.num_rows))))


def _least(holds: Callable[[float], bool], most: float) -> float:
    """Returns the least number up to `most` from which on something holds."""
    low, high = 0.0, float(most)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
