"""Describes the sparsity of a tensor's gradients on all ranks: measured, extrapolated, or assumed. It is counted in
units: rows, elements or blocks.

Contract
    A `Sparsity` is in units of one size: rows, elements or blocks, each with its own index on the wire. It determines
    the costs of exchanges (`embrace_fx.cost.exchanges`).

Legend of the formulas: N ranks, V units in the tensor (rows, elements or blocks) of w values and s bytes, u_r units on
rank r, u their mean, U(n) units in the union of n ranks, U that of all.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import fmean

import torch
from torch import Tensor

NEIGHBOURHOODS = 8
"""Number of starting ranks for measured unions, because starting from all N ranks would take N squared time."""


@dataclass(frozen=True)
class Sparsity:
    """The sparsity of one tensor's gradients on all ranks. It counts units (rows, elements or blocks), which are either
    present, with values to send, or zero.

    Attributes:
        num_units: V, the number of units of the tensor.
        width: values per unit.
        itemsize: bytes of a value.
        units_by_rank: u_r, the number of units present on each rank.
        unions: for 1, 2, .. N neighbouring ranks, the number of units present on at least one of them, averaged over
            several such groups; the last number is U, for all ranks.
        push_imbalance: how unevenly the units of all ranks are spread if the tensor is divided into N even ranges: the
            count of the fullest range, divided by the mean over ranges.
        pull_imbalance: the same ratio for the union of the ranks' units. Both are Zen's imbalance ratio (OSDI 2025).
        draws_per_unit: the number of ids in a batch, divided by the number of unique ids.
    """

    num_units: int
    width: int
    itemsize: int
    units_by_rank: tuple[int, ...]
    unions: tuple[float, ...]
    push_imbalance: float = 1.0
    pull_imbalance: float = 1.0
    draws_per_unit: float = 1.0

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.units_by_rank)

    @property
    def mean_units(self) -> float:
        """The number of units (rows or blocks) present on one rank, averaged over ranks."""
        return fmean(self.units_by_rank)

    @property
    def union(self) -> float:
        """The number of distinct units (rows, elements or blocks) that are present on at least one rank."""
        return self.unions[-1]

    @property
    def tensor_bytes(self) -> int:
        """The bytes of the whole tensor, including the zero units."""
        return self.num_units * self.width * self.itemsize

    @property
    def density(self) -> float:
        """The share of the tensor's units (rows or blocks) that are present on one rank, averaged over ranks."""
        return self.mean_units / max(self.num_units, 1)

    def densification(self, ranks: int) -> float:
        """Returns g(n) for n = `ranks`: the number of units (rows or blocks) present on at least one of n ranks,
        divided by the number on one rank.
        """
        return self.unions[ranks - 1] / max(self.mean_units, 1.0)

    def __str__(self) -> str:
        """Prints the sparsity of rows in one line.

        >>> str(independent_ranks(100, 8, 4, (20, 20)))
        'density 20.00%, ids per row 1.0, overlap of two ranks 20%, g(2) 1.80, skew 1.0 (of the union 1.0)'
        """
        parts = [f"density {self.density:.2%}", f"ids per row {self.draws_per_unit:.1f}"]
        if self.world_size > 1 and self.mean_units:
            parts.append(f"overlap of two ranks {2 - self.densification(2):.0%}")
            parts += [f"g({n}) {self.densification(n):.2f}" for n in sorted({2, self.world_size})]
        return f"{', '.join(parts)}, skew {self.push_imbalance:.1f} (of the union {self.pull_imbalance:.1f})"


def measure_sparsity(
    ids_by_rank: Sequence[Tensor], num_units: int, width: int, itemsize: int, total_ids: int | None = None
) -> Sparsity:
    """Measures the sparsity of a tensor's gradients. Each rank gives the ids of the units (rows, for a table) that have
    a gradient.

    Args:
        ids_by_rank: for each rank, unique int64 ids (K,) from 0 to num_units - 1.
        num_units: the number of units of the tensor.
        width: the values of a unit.
        itemsize: the bytes of a value.
        total_ids: the number of ids of all ranks before deduplication, or None if no id repeats.
    """
    world_size = len(ids_by_rank)
    first_ranks = range(0, world_size, math.ceil(world_size / NEIGHBOURHOODS))
    grown = [_union_sizes([*ids_by_rank[first:], *ids_by_rank[:first]], num_units) for first in first_ranks]
    everyone = torch.cat(list(ids_by_rank))
    return Sparsity(
        num_units,
        width,
        itemsize,
        units_by_rank=tuple(ids.numel() for ids in ids_by_rank),
        unions=tuple(fmean(of_size) for of_size in zip(*grown, strict=True)),
        push_imbalance=imbalance(everyone, num_units, world_size),
        pull_imbalance=imbalance(everyone.unique(), num_units, world_size),
        draws_per_unit=total_ids / everyone.numel() if total_ids and everyone.numel() else 1.0,
    )


def _union_sizes(ids_by_rank: Sequence[Tensor], num_units: int) -> list[int]:
    """Returns a list of numbers, one per rank. Entry k is the number of distinct units (rows or blocks) that the first
    k + 1 ranks have together.

    Args:
        ids_by_rank: for each rank, unique ids (K,) of its units.
        num_units: the number of units of the tensor.
    """
    seen = torch.zeros(num_units, dtype=torch.bool, device=ids_by_rank[0].device)
    sizes, size = [], 0
    for ids in ids_by_rank:
        size += ids.numel() - int(seen[ids].sum())
        seen[ids] = True
        sizes.append(size)
    return sizes


def extrapolate(ids_by_batch: Sequence[Tensor], num_units: int, width: int, itemsize: int, world_size: int) -> Sparsity:
    """Estimates the sparsity on `world_size` ranks from a few measured batches. It assumes that all ranks draw ids
    independently, with the frequencies of these batches.

    Ids that no measured batch has are assumed equally likely. Together they have the probability of the ids that occur
    once (Good-Turing estimate). The expected union of several ranks is scaled so that the value for one rank equals the
    measured one.

    Args:
        ids_by_batch: for each measured batch, its int64 ids (T,) from 0 to num_units - 1, with duplicates.
        num_units: the number of units (such as rows) of the tensor.
        width: the values of a unit.
        itemsize: the bytes of a value.
        world_size: the number of ranks N.
    """
    ids = torch.cat(list(ids_by_batch))
    on_a_rank = fmean(own.unique().numel() for own in ids_by_batch)
    if not ids.numel():
        return Sparsity(num_units, width, itemsize, (0,) * world_size, (0.0,) * world_size)
    units, times = ids.unique(return_counts=True)
    lacking = num_units - units.numel()
    new = min(float((times == 1).sum()), ids.numel() - 1.0) / ids.numel() if lacking else 0.0
    often = times.double() * (1 - new) / ids.numel()
    draws = ids.numel() / len(ids_by_batch)

    def presence_probabilities(ranks: int) -> tuple[Tensor, float]:
        """Returns the probabilities that units are present on at least one of `ranks` ranks: (a tensor with the
        probability of each unit in the measured batches, the probability of any other unit).
        """
        return 1 - (1 - often) ** (draws * ranks), 1 - math.pow(1 - new / max(lacking, 1), draws * ranks)

    def union(ranks: int) -> float:
        """Returns the expected number of units (rows or blocks) present on at least one of `ranks` ranks."""
        known, other = presence_probabilities(ranks)
        return float(known.sum() + lacking * other)

    known, other = presence_probabilities(world_size)
    ranges = range_index(units, num_units, world_size)
    starts = torch.tensor([*range_starts(num_units, world_size), num_units], device="cpu")
    lacking_by_range = starts.diff() - torch.bincount(ranges, minlength=world_size)

    filled = torch.bincount(ranges, weights=known, minlength=world_size) + other * lacking_by_range
    scale = on_a_rank / union(1)
    return Sparsity(
        num_units,
        width,
        itemsize,
        units_by_rank=(round(on_a_rank),) * world_size,
        unions=tuple(min(float(num_units), scale * union(ranks)) for ranks in range(1, world_size + 1)),
        push_imbalance=fmean(imbalance(own.unique(), num_units, world_size) for own in ids_by_batch),
        pull_imbalance=float(filled.max() / filled.mean()),
        draws_per_unit=draws / on_a_rank,
    )


def independent_ranks(num_units: int, width: int, itemsize: int, units_by_rank: tuple[int, ...]) -> Sparsity:
    """Returns the expected sparsity if each rank draws its units uniformly and independently of other ranks.

    Args:
        num_units: the number of units of the tensor.
        width: the values of a unit.
        itemsize: the bytes of a value.
        units_by_rank: the number of units present on each rank.
    """
    absent = accumulate((1.0 - units / max(num_units, 1) for units in units_by_rank), operator.mul)
    unions = tuple(num_units * (1.0 - probability) for probability in absent)
    return Sparsity(num_units, width, itemsize, units_by_rank, unions)


def with_units_by_rank(sparsity: Sparsity, units_by_rank: tuple[int, ...]) -> Sparsity:
    """Returns a copy of `sparsity` with other numbers of units (rows or blocks) on the ranks. The ranks' units overlap
    to the same degree as before.

    The degree of overlap is given by where the size of the union lies between two extremes: its size if all ranks have
    the same units, and its size if all ranks draw units independently.
    """
    drawn = independent_ranks(sparsity.num_units, sparsity.width, sparsity.itemsize, units_by_rank)
    once = independent_ranks(sparsity.num_units, sparsity.width, sparsity.itemsize, sparsity.units_by_rank)
    here, there = sparsity.mean_units, drawn.mean_units
    unions = []
    for ranks, (found, apart, apart_there) in enumerate(
        zip(sparsity.unions, once.unions, drawn.unions, strict=True), start=1
    ):
        way = (found - here) / (apart - here) if ranks > 1 and apart > here else 1.0
        unions.append(min(max(there + way * (apart_there - there), there), ranks * there, sparsity.num_units))
    # Bound the imbalances, because a range cannot have more units than its size.
    fullest = max(1.0, sparsity.num_units / max(there, 1.0))
    return replace(
        drawn,
        unions=tuple(unions),
        push_imbalance=min(sparsity.push_imbalance, fullest),
        pull_imbalance=min(sparsity.pull_imbalance, fullest),
        draws_per_unit=sparsity.draws_per_unit,
    )


def in_blocks(sparsity: Sparsity, block_size: int) -> Sparsity:
    """Returns the sparsity of the same gradients, counted in blocks of `block_size` consecutive values.

    A row longer than a block counts as several blocks. If a block contains several rows, the count assumes that rows
    are at random places. Neighbouring rows would be in fewer blocks.
    """
    values = sparsity.num_units * sparsity.width
    num_blocks = math.ceil(values / block_size)
    per_unit = max(1.0, sparsity.width / block_size)
    units_per_block = max(1.0, block_size / sparsity.width)

    def expected_blocks(units: float) -> float:
        """Returns the expected number of blocks that contain at least one of `units` randomly placed units."""
        absent = 1 - units / max(sparsity.num_units, 1)
        return min(units * per_unit, num_blocks * (1 - math.pow(absent, units_per_block)))

    return replace(
        sparsity,
        num_units=num_blocks,
        width=block_size,
        units_by_rank=tuple(round(expected_blocks(units)) for units in sparsity.units_by_rank),
        unions=tuple(expected_blocks(units) for units in sparsity.unions),
    )


def range_starts(num_units: int, ranges: int) -> list[int]:
    """Divides `num_units` units (rows or blocks) into `ranges` even ranges of consecutive units. Returns the first unit
    of each range.
    """
    return [index * num_units // ranges for index in range(ranges)]


def range_index(ids: Tensor, num_units: int, ranges: int) -> Tensor:
    """Divides `num_units` units (rows or blocks) into `ranges` even ranges of consecutive units. Returns the index of
    the range to which each id belongs.
    """
    starts = torch.tensor(range_starts(num_units, ranges)[1:], dtype=torch.int64, device=ids.device)
    return torch.bucketize(ids, starts, right=True)


def imbalance(ids: Tensor, num_units: int, ranges: int) -> float:
    """Divides `num_units` units (rows or blocks) into `ranges` even ranges of consecutive units. Returns the number of
    ids in the fullest range, divided by the mean over ranges, or 1 if there are no ids.
    """
    if ids.numel() == 0:
        return 1.0
    counts = torch.bincount(range_index(ids, num_units, ranges), minlength=ranges)
    return float(counts.max()) * ranges / ids.numel()
