"""Predicts, for tables beyond memory, the number of a step's rows missing in a working set, and the time to move them.

Each step draws rows independently of earlier steps, by Zipf's law with an exponent fitted to a batch's distinct rows. A
working set contains the rows of the last T steps, where T steps draw as many distinct rows as it has slots (Che, Tung
and Wang, "Hierarchical Web Caching Systems", JSAC 2002).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from embrace_fx.cost.sparsity import Sparsity

_HALVINGS = 60
"""Number of bisections in a search for a number of steps or rows, or for an exponent."""
_STEEPEST, _LONGEST = 8.0, 1e15
"""Upper bounds of the search for an exponent and for a number of steps."""
_BUCKETS, _CERTAIN = 200, 1e-12
"""Number of groups of rows with about the same frequency; the minimum probability of not drawing a row."""


@dataclass(frozen=True)
class StorageTier:
    """A storage for rows, with one rank's speed of reads and writes with a full queue.

    Attributes:
        name: its name in reports.
        read_ms, write_ms: the fixed time of one row.
        byte_ms: the additional time per byte, in one direction.
        holds_bytes: a rank's share of its size, or None for no limit.
    """

    name: str
    read_ms: float
    write_ms: float
    byte_ms: float = 0.0
    holds_bytes: float | None = None


@dataclass(frozen=True)
class Draws:
    """The ids that all ranks together look up in a step, modeled by Zipf's law: row k of V is drawn in proportion to k
    ** -`exponent`.

    Attributes:
        ids: number of ids of a step; 0: unknown.
    """

    num_rows: int
    exponent: float
    ids: float

    @classmethod
    def fit(cls, sparsity: Sparsity) -> Draws:
        """Fits the exponent to a measured sparsity, so that the expected distinct rows of a rank equal the measured
        ones.
        """
        drawn = sparsity.draws_per_unit * sparsity.mean_units

        def draws_too_few(exponent: float) -> bool:
            """Returns whether this exponent yields at most as many distinct rows as were measured."""
            return cls(sparsity.num_units, exponent, drawn).rows <= sparsity.mean_units

        return cls(sparsity.num_units, _smallest(draws_too_few, _STEEPEST), drawn * sparsity.world_size)

    @cached_property
    def _spectrum(self) -> tuple[Tensor, Tensor]:
        """Returns, for B groups of rows: (logarithms (B,) of the probability that a step does not read a row of the
        group, numbers (B,) of its rows).
        """
        edges = torch.logspace(0, math.log10(self.num_rows), _BUCKETS, dtype=torch.float64, device="cpu").round()
        edges = torch.cat([edges, edges[-1:] + 1]).unique()
        rows, often = edges.diff(), ((edges[:-1] + edges[1:] - 1) / 2) ** -self.exponent
        return self.ids * (-often / (often * rows).sum()).clamp(min=_CERTAIN - 1).log1p(), rows

    @property
    def rows(self) -> float:
        """Returns the expected number of distinct rows that a step reads."""
        absent, rows = self._spectrum
        return -float((rows * absent.expm1()).sum())

    def missing_rows(self, slots: int) -> float:
        """Predicts how many of a step's rows are not in memory, if memory holds the `slots` rows that were read
        last.
        """
        if slots >= self.num_rows or not self.ids:
            return 0.0
        absent, rows = self._spectrum
        steps = _smallest(lambda steps: -float((rows * (steps * absent).expm1()).sum()) >= slots, _LONGEST)
        return -float((rows * absent.expm1() * (steps * absent).exp()).sum())


@dataclass(frozen=True)
class _CombinedDraws(Draws):
    """The combined ids of several tables."""

    tables: tuple[Draws, ...] = ()

    @cached_property
    def _spectrum(self) -> tuple[Tensor, Tensor]:
        """Absence probabilities and row counts of all tables."""
        absent, rows = zip(*(each._spectrum for each in self.tables), strict=True)
        return torch.cat(absent), torch.cat(rows)


@dataclass(frozen=True)
class RowMemory:
    """Predicts the steady state of a sharded table that keeps only some rows in a rank's memory.

    Attributes:
        num_rows: rows of the table.
        slots: rows in memory.
        slot_bytes: bytes of a row in memory, with its optimizer state and its share of buffers in flight.
        row_bytes: bytes of bookkeeping in memory for each row of the table.
        own_bytes: other bytes of memory.
        record_bytes: bytes of a row in storage.
        storage: the storage tiers of the other rows, nearest first. Each contains the most recently drawn of the rows
            that nearer tiers do not.
        at_once: rows that the known batches of all ranks read in a step.
        ahead: number of steps that rows are read early, with room beside the current step's rows.
    """

    num_rows: int
    slots: int
    slot_bytes: float
    row_bytes: float
    own_bytes: int
    record_bytes: int
    at_once: int
    draws: Draws
    storage: tuple[StorageTier, ...]
    ahead: int = 0

    @property
    def nbytes(self) -> int:
        """Returns the maximum bytes of memory of the table."""
        return math.ceil(self.num_rows * self.row_bytes + self.slots * self.slot_bytes) + self.own_bytes

    @cached_property
    def moved_by_tier(self) -> tuple[tuple[StorageTier, float], ...]:
        """Returns, for each storage tier, the number of rows that a step reads from it; as many are written back."""
        found, held = [], self.slots
        for place in self.storage:
            found.append((place, self.draws.missing_rows(held)))
            held += int((place.holds_bytes or 0) // self.record_bytes)
        return tuple(found)

    @property
    def moved_rows(self) -> float:
        """Returns the number of rows that a step reads from storage, which is also the number it writes."""
        return self.moved_by_tier[0][1]

    @property
    def moved_bytes(self) -> float:
        """Returns the bytes that a step reads from storage, which are also the bytes it writes."""
        return self.moved_rows * self.record_bytes

    @property
    def hit_rate(self) -> float:
        """Returns the hit rate: the share of a step's distinct rows that are already in memory."""
        return 1 - self.moved_rows / max(self.draws.rows, 1e-9)

    @property
    def read_ms(self) -> float:
        """Returns the time to read a step's rows."""
        return sum(rows * (each.read_ms + self.record_bytes * each.byte_ms) for each, rows in self.moved_by_tier)

    @property
    def write_ms(self) -> float:
        """Returns the time to write a step's rows."""
        return sum(rows * (each.write_ms + self.record_bytes * each.byte_ms) for each, rows in self.moved_by_tier)

    def with_slots(self, slots: int) -> RowMemory:
        """Returns a copy with this many rows in memory."""
        return replace(self, slots=min(slots, self.num_rows))

    @property
    def smallest(self) -> RowMemory:
        """Returns a copy with the fewest rows in memory that still hold a known batch."""
        return self.with_slots(max(self.at_once, 1))

    def for_step(self, step_ms: float, ahead: int = 1) -> RowMemory:
        """Returns a copy with the fewest rows in memory for which a step of `step_ms` hides all reads and writes."""

        def is_hidden(slots: float) -> bool:
            """Returns whether a step hides its reads and writes with this many rows in memory."""
            found = self.with_slots(math.ceil(slots))
            return found.read_ms + found.write_ms <= step_ms

        return self.with_slots(max((1 + ahead) * self.at_once, math.ceil(_smallest(is_hidden, self.num_rows))))

    def describe(self, step_ms: float | None) -> str:
        """Returns lines about the table: the prediction, and the least `table_memory`.

        Args:
            step_ms: the time of a step without its waits for these rows, or None if unknown.
        """
        if not self.draws.ids:
            return ""
        places = []
        for place, rows in self.moved_by_tier:
            places.append(f"{rows * self.record_bytes / 2**20:,.3f} from {place.name}")
            if place.holds_bytes is not None:
                share = min(place.holds_bytes / self.record_bytes / self.num_rows, 1)
                places[-1] += f", which holds {share:.2%}"
        moved = f"{self.hit_rate:.1%} in memory; MiB read, and as many written, per step: {', '.join(places)}"
        text = f"predicted, once all rows have moved: {moved};\n    least budget {self.smallest._describe_size()}"
        if step_ms is None:
            return text
        return f"{text}; to hide reads behind a step of {step_ms:.1f} ms, {self.for_step(step_ms)._describe_size()}"

    def _describe_size(self) -> str:
        """Describes how many rows are in memory, in bytes and as a share."""
        return f"{self.nbytes / 2**20:,.2f} MiB ({self.slots / self.num_rows:.2%} of its rows)"


def combine(memories: Sequence[RowMemory]) -> RowMemory:
    """Combines tables with equal records that share a working set."""
    first, *others = memories
    if not others:
        return first
    rows, slots, at_once = (sum(of) for of in zip(*[(m.num_rows, m.slots, m.at_once) for m in memories], strict=True))
    drawn = sum(each.draws.ids for each in memories)
    draws = _CombinedDraws(rows, first.draws.exponent, drawn, tuple(each.draws for each in memories if each.draws.ids))
    return replace(first, num_rows=rows, slots=slots, at_once=at_once, draws=draws)


def _smallest(holds: Callable[[float], bool], most: float) -> float:
    """Finds, by bisection, the smallest number up to `most` for which `holds` is true."""
    low, high = 0.0, float(most)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
