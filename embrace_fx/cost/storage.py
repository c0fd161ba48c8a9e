"""Predicts, for tables larger than memory, how many of a step's rows must be read from storage, and the time that
takes.

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
    """A kind of storage for rows (host memory or a drive), with the speed at which one rank reads and writes it.

    Attributes:
        name: the name shown in reports.
        read_ms, write_ms: the fixed time to read or write one row.
        byte_ms: the additional time per byte.
        holds_bytes: how many bytes one rank can store in it, or None for no limit.
    """

    name: str
    read_ms: float
    write_ms: float
    byte_ms: float = 0.0
    holds_bytes: float | None = None


@dataclass(frozen=True)
class Draws:
    """How often each row of a table is looked up, modeled by Zipf's law: row k, from 1, is drawn with a probability
    proportional to k ** -`exponent`.

    Attributes:
        num_rows: the number of rows of the table.
        exponent: the exponent of Zipf's law.
        ids: the number of ids that all ranks look up in a step; 0 if unknown.
    """

    num_rows: int
    exponent: float
    ids: float

    @classmethod
    def fit(cls, sparsity: Sparsity) -> Draws:
        """Fits the exponent to a measured sparsity, so that the expected number of distinct rows that a rank reads
        equals the measured number.
        """
        drawn = sparsity.draws_per_unit * sparsity.mean_units

        def draws_too_few(exponent: float) -> bool:
            """Returns whether draws with this exponent are expected to read at most as many distinct rows as were
            measured.
            """
            return cls(sparsity.num_units, exponent, drawn).rows <= sparsity.mean_units

        return cls(sparsity.num_units, _smallest_number(draws_too_few, _STEEPEST), drawn * sparsity.world_size)

    @cached_property
    def _spectrum(self) -> tuple[Tensor, Tensor]:
        """The table's rows, divided into G groups of similar frequency, as two tensors (G,): for each group, the
        logarithm of the probability that a step does not read a given row of it, and its number of rows.
        """
        edges = torch.logspace(0, math.log10(self.num_rows), _BUCKETS, dtype=torch.float64, device="cpu").round()
        edges = torch.cat([edges, edges[-1:] + 1]).unique()
        rows, often = edges.diff(), ((edges[:-1] + edges[1:] - 1) / 2) ** -self.exponent
        return self.ids * (-often / (often * rows).sum()).clamp(min=_CERTAIN - 1).log1p(), rows

    @property
    def rows(self) -> float:
        """The expected number of distinct rows that a step reads."""
        absent, rows = self._spectrum
        return -float((rows * absent.expm1()).sum())

    def missing_rows(self, slots: int) -> float:
        """Predicts how many of the distinct rows that a step reads are not in memory, if memory holds the `slots` most
        recently read rows.
        """
        if slots >= self.num_rows or not self.ids:
            return 0.0
        absent, rows = self._spectrum
        steps = _smallest_number(lambda steps: -float((rows * (steps * absent).expm1()).sum()) >= slots, _LONGEST)
        return -float((rows * absent.expm1() * (steps * absent).exp()).sum())


@dataclass(frozen=True)
class _CombinedDraws(Draws):
    """How often the rows of several tables that share memory are looked up."""

    tables: tuple[Draws, ...] = ()

    @cached_property
    def _spectrum(self) -> tuple[Tensor, Tensor]:
        """The rows of all tables, divided into G groups of similar frequency, as two tensors (G,): for each group, the
        logarithm of the probability that a step does not read a given row of it, and its number of rows.
        """
        absent, rows = zip(*(each._spectrum for each in self.tables), strict=True)
        return torch.cat(absent), torch.cat(rows)


@dataclass(frozen=True)
class RowMemory:
    """The memory that a table larger than memory needs, and its predicted reads from storage. A rank keeps only some
    rows of the table in memory.

    Attributes:
        num_rows: the number of rows of the table.
        slots: the number of rows in memory.
        slot_bytes: bytes of one row in memory, with its optimizer state and its share of transfer buffers.
        row_bytes: bytes of memory for bookkeeping, for each row of the table.
        own_bytes: other bytes of memory that the table needs.
        record_bytes: bytes of a row in storage.
        at_once: the number of distinct rows that all ranks together read in one step of the known batches. All of these
            rows must be in memory at the same time.
        draws: how often each row is looked up.
        storage: the storage tiers for rows that are not in memory, fastest first. A tier stores the most recently read
            rows that memory and faster tiers have no room for.
        ahead: the number of steps by which rows are read from storage before they are used. Rows that were read for
            future steps take memory too.
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
        """The maximum bytes of memory that the table needs on a rank."""
        return math.ceil(self.num_rows * self.row_bytes + self.slots * self.slot_bytes) + self.own_bytes

    @cached_property
    def moved_by_tier(self) -> tuple[tuple[StorageTier, float], ...]:
        """Pairs (storage tier, number of rows that a step reads from it). As many rows are written back."""
        found, held = [], self.slots
        for place in self.storage:
            found.append((place, self.draws.missing_rows(held)))
            held += int((place.holds_bytes or 0) // self.record_bytes)
        return tuple(found)

    @property
    def moved_rows(self) -> float:
        """The number of rows that a step reads from storage. It writes as many."""
        return self.moved_by_tier[0][1]

    @property
    def moved_bytes(self) -> float:
        """The number of bytes that a step reads from storage. It writes as many."""
        return self.moved_rows * self.record_bytes

    @property
    def hit_rate(self) -> float:
        """The share of a step's distinct rows that are already in memory."""
        return 1 - self.moved_rows / max(self.draws.rows, 1e-9)

    @property
    def read_ms(self) -> float:
        """The time to read a step's rows from storage, in ms."""
        return sum(rows * (each.read_ms + self.record_bytes * each.byte_ms) for each, rows in self.moved_by_tier)

    @property
    def write_ms(self) -> float:
        """The time to write a step's rows to storage, in ms."""
        return sum(rows * (each.write_ms + self.record_bytes * each.byte_ms) for each, rows in self.moved_by_tier)

    def with_slots(self, slots: int) -> RowMemory:
        """Returns a copy of this prediction with `slots` rows in memory, or all rows if the table has fewer."""
        return replace(self, slots=min(slots, self.num_rows))

    @property
    def smallest(self) -> RowMemory:
        """A copy of this prediction with as few rows in memory as one step of the known batches needs."""
        return self.with_slots(max(self.at_once, 1))

    def for_step(self, step_ms: float, ahead: int = 1) -> RowMemory:
        """Returns a copy of this prediction with the fewest rows in memory for which a step's reads and writes take at
        most `step_ms`. The memory also has room for the rows of `ahead` future steps, which are read in advance.
        """

        def is_hidden(slots: float) -> bool:
            """Returns whether reads and writes fit within a step, with `slots` rows in memory."""
            found = self.with_slots(math.ceil(slots))
            return found.read_ms + found.write_ms <= step_ms

        return self.with_slots(max((1 + ahead) * self.at_once, math.ceil(_smallest_number(is_hidden, self.num_rows))))

    def describe(self, step_ms: float | None) -> str:
        """Returns a report on the table as text: the predicted reads and writes per step, and the smallest useful
        `table_memory`. It is empty if the number of lookups is unknown.

        Args:
            step_ms: the time of a step without waits for this table's rows, or None if unknown.
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
        """Returns the memory that the table needs as text: "12.50 MiB (3.00% of its rows)"."""
        return f"{self.nbytes / 2**20:,.2f} MiB ({self.slots / self.num_rows:.2%} of its rows)"


def combine_memories(memories: Sequence[RowMemory]) -> RowMemory:
    """Combines the predictions for several tables, which share memory and have rows of equal size, into one."""
    first, *others = memories
    if not others:
        return first
    rows, slots, at_once = (sum(of) for of in zip(*[(m.num_rows, m.slots, m.at_once) for m in memories], strict=True))
    drawn = sum(each.draws.ids for each in memories)
    draws = _CombinedDraws(rows, first.draws.exponent, drawn, tuple(each.draws for each in memories if each.draws.ids))
    return replace(first, num_rows=rows, slots=slots, at_once=at_once, draws=draws)


def _smallest_number(holds: Callable[[float], bool], most: float) -> float:
    """Finds, by bisection, the smallest number from 0 to `most` for which `holds` returns True. Returns `most` if there
    is none.

    Args:
        holds: a function of a number that returns True for all numbers above some limit.
    """
    low, high = 0.0, float(most)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
