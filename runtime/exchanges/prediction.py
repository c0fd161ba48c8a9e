"""What exchanges cost before they run: sparsity in, bytes and time out. Each strategy has its `predict` beside it.

Legend of the formulas: N ranks, V units in the tensor (rows, elements or blocks) of w values and s bytes, u_r units on
rank r, u their mean, U units in the union of all ranks, i bytes of an index (4, or 8 from 2^31 on).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch

from embrace_fx.cost import Cluster, Exchange
from embrace_fx.runtime.exchanges.gradient import RowSet
from embrace_fx.runtime.exchanges.records import record_bytes


@dataclass(frozen=True)
class Sparsity:
    """How sparse one tensor's gradients are on all ranks, in units of one size.

    Attributes:
        num_units: V, present or not.
        width: values per unit.
        itemsize: bytes of a value.
        units_by_rank: u_r, present on each rank.
        unions: units present on any of 1, 2, .. N ranks, the mean over neighbouring ranks; the last is U.
        push_imbalance: of all ranks' units, those in the fullest of N even ranges over the mean of the ranges.
        pull_imbalance: the same of the union (both as Zen, OSDI 2025, defines the imbalance ratio).
    """

    num_units: int
    width: int
    itemsize: int
    units_by_rank: tuple[int, ...]
    unions: tuple[float, ...]
    push_imbalance: float = 1.0
    pull_imbalance: float = 1.0

    @property
    def world_size(self) -> int:
        return len(self.units_by_rank)

    @property
    def mean_units(self) -> float:
        return fmean(self.units_by_rank)

    @property
    def union(self) -> float:
        return self.unions[-1]

    @property
    def record_bytes(self) -> int:
        """A unit with its index."""
        return record_bytes(self.num_units, self.width, self.itemsize)


def measure(by_rank: Sequence[RowSet]) -> Sparsity:
    """The sparsity of all ranks' gradients, for profiling a few steps."""
    first, world_size = by_rank[0], len(by_rank)
    ids = [rows.ids for rows in by_rank]
    windows = [
        [torch.cat([ids[(rank + k) % world_size] for k in range(size)]).unique() for rank in range(world_size)]
        for size in range(1, world_size + 1)
    ]
    return Sparsity(
        num_units=first.num_rows,
        width=first.width,
        itemsize=first.rows.itemsize,
        units_by_rank=tuple(i.numel() for i in ids),
        unions=tuple(fmean(union.numel() for union in of_size) for of_size in windows),
        push_imbalance=_imbalance(torch.cat(ids), first.num_rows, world_size),
        pull_imbalance=_imbalance(windows[-1][0], first.num_rows, world_size),
    )


def random_sparsity(num_units: int, width: int, itemsize: int, density: float, world_size: int) -> Sparsity:
    """Every unit present on every rank with the same probability, independently."""
    return Sparsity(
        num_units,
        width,
        itemsize,
        units_by_rank=(round(num_units * density),) * world_size,
        unions=tuple(num_units * (1 - (1 - density) ** ranks) for ranks in range(1, world_size + 1)),
    )


def even_ranges(num_units: int, ranges: int) -> list[int]:
    """Where each of N even ranges of consecutive units begins."""
    return [index * num_units // ranges for index in range(ranges)]


def _imbalance(ids: torch.Tensor, num_units: int, ranges: int) -> float:
    if ids.numel() == 0:
        return 1.0
    starts = torch.tensor(even_ranges(num_units, ranges)[1:], dtype=torch.int64, device=ids.device)
    counts = torch.bincount(torch.bucketize(ids, starts, right=True), minlength=ranges)
    return float(counts.max()) * ranges / ids.numel()


@dataclass(frozen=True)
class Prediction:
    """What one exchange will send.

    Attributes:
        mean: what a rank sends, the mean over ranks.
        critical: the chain of its rounds, in each the bytes of the rank with most to send or receive.
    """

    mean: Exchange
    critical: Exchange

    def time_ms(self, cluster: Cluster) -> float:
        """Time of the exchange alone on idle links: the round's slowest rank makes the others wait."""
        return self.critical.time_ms(cluster)


def prediction(mean_bytes: float, critical_bytes: float, messages: int) -> Prediction:
    return Prediction(Exchange(round(mean_bytes), messages), Exchange(round(critical_bytes), messages))


def push_bytes(sparsity: Sparsity, record: int, imbalance: float) -> tuple[float, float]:
    """Every rank's units to N servers, each with `record` bytes: mean of a rank, and the slowest's.

    The slowest is the rank with most units to send, or the server of the fullest range.
    """
    to_others = (sparsity.world_size - 1) / sparsity.world_size * record
    return (
        to_others * sparsity.mean_units,
        to_others * max(*sparsity.units_by_rank, imbalance * sparsity.mean_units),
    )


def pull_bytes(sparsity: Sparsity, record: int, imbalance: float) -> tuple[float, float]:
    """Every server's share of the union to all other ranks: mean of a rank, and the slowest's."""
    to_others = (sparsity.world_size - 1) / sparsity.world_size * record * sparsity.union
    return to_others, to_others * imbalance
