"""What the benchmark of the exchanges runs: tensors and their zeros, systems, and the bytes none can go below.

Legend: N ranks, V units in the tensor (blocks or rows) of s bytes, u units on a rank, U(k) in the union of k ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor, nn

import embrace_fx
from embrace_fx.cost.blocks import fastest_block_size
from embrace_fx.cost.exchanges import Prediction, Scheme, power_of_two_below, predict
from embrace_fx.cost.links import Cluster
from embrace_fx.cost.sparsity import Sparsity, in_blocks, measure_sparsity

Kind = Literal["blocks", "zipf"]

ITEM_BYTES = 4
SHAPES: dict[Kind, tuple[int, int]] = {"blocks": (102_400, 256), "zipf": (51_200, 512)}
"""100 MiB of float32, in blocks as OmniReduce has them (SIGCOMM 2021: 256 elements), or rows as the LSTM of Zen has."""
LSTM_DENSITY = 0.0113
"""Of the LSTM's gradient on one rank (Zen, OSDI 2025)."""
DENSITIES = (1.0, 0.8, 0.4, 0.2, 0.1, 0.08, 0.04, 0.02, 0.01)


@dataclass(frozen=True)
class Case:
    """Gradients of one tensor on all ranks.

    Attributes:
        kind: "blocks": as many on every rank, drawn at random. "zipf": the rows of as many words on every rank, drawn
            from V with frequency 1/rank (Zipf), rows in the order of frequency as vocabularies have them; all of
            them at density 1, which no number of words would promise.
        density: the share of units that a rank has; of "zipf" the expected one.
        divisor: a factor by which the tensor is smaller, for tests.
    """

    kind: Kind
    density: float
    divisor: int = 1

    @property
    def name(self) -> str:
        return f"{self.kind} {self.density:.4g}"

    @property
    def num_units(self) -> int:
        return SHAPES[self.kind][0] // self.divisor

    @property
    def width(self) -> int:
        return SHAPES[self.kind][1]

    def ids(self, rank: int) -> Tensor:
        """Returns the units that a rank has, (u,) int64, ascending."""
        random = torch.Generator().manual_seed(1000 * rank + round(self.density * 100_000))
        if self.density == 1:
            return torch.arange(self.num_units)
        if self.kind == "blocks":
            count = round(self.density * self.num_units)
            return torch.randperm(self.num_units, generator=random)[:count].sort().values
        return zipf_ids(self.num_units, self.density, random)

    def sparsity(self, ranks: int) -> Sparsity:
        return measure_sparsity([self.ids(rank) for rank in range(ranks)], self.num_units, self.width, ITEM_BYTES)


CASES = (
    *(Case("blocks", density) for density in DENSITIES),
    *(Case("zipf", density) for density in sorted((*DENSITIES, LSTM_DENSITY), reverse=True)),
)


def zipf_ids(num_words: int, density: float, random: torch.Generator) -> Tensor:
    """Returns the distinct ids (u,) int64, ascending, of words drawn with frequency 1/rank. As many words are drawn as
    are expected to contain a share `density` of all ids.
    """
    drawn = torch.rand(words_of(num_words, density), generator=random, dtype=torch.float64)
    words = torch.searchsorted(_frequency(num_words).cumsum(0), drawn).clamp_(max=num_words - 1)
    distinct: Tensor = words.unique()
    return distinct


def _frequency(num_words: int) -> Tensor:
    weights = torch.arange(1, num_words + 1, dtype=torch.float64).reciprocal()
    return weights / weights.sum()


@lru_cache
def words_of(num_words: int, density: float) -> int:
    """Returns how many words must be drawn so that a share `density` of all words is expected among them."""
    frequency, distinct = _frequency(num_words), density * num_words
    low, high = 1, 2**40
    while low < high:
        middle = (low + high) // 2
        if float((1 - (1 - frequency) ** middle).sum()) < distinct:
            low = middle + 1
        else:
            high = middle
    return low


@dataclass(frozen=True)
class System:
    """A strategy with its scheme."""

    name: str
    strategy: str
    scheme: Scheme | Literal[""] = ""

    def predict(self, rows: Sparsity, cluster: Cluster) -> Prediction:
        """Returns the planner's prediction for this system."""
        scheme: Scheme = "hierarchical" if self.scheme == "hierarchical" else "balanced"
        units = rows
        if self.strategy == "omnireduce":
            units = in_blocks(rows, fastest_block_size(rows.width, rows.itemsize, cluster))
        return predict(self.strategy, units, scheme=scheme, cluster=cluster)


SYSTEMS = {
    system.name: system
    for system in (
        System("allreduce", "allreduce"),
        System("allgather", "allgather"),
        System("omnireduce", "omnireduce"),
        System("zen_balanced", "zen", "balanced"),
        System("zen_hierarchical", "zen", "hierarchical"),
        System("ps", "ps"),
    )
}


def least_bytes(system: str, sparsity: Sparsity) -> float:
    """Returns the bytes that a rank must send, averaged over ranks: the values of its units, without any index, bitmap,
    count or header.

    | system | bytes |
    |---|---|
    | allreduce | 2 (N-1)/N V s |
    | allgather | (N-1) u s |
    | zen_hierarchical | sum over k = 1, 2, 4, .. of U(k) s |
    | the others | (N-1)/N (u + U) s |
    """
    ranks, unit_bytes = sparsity.world_size, sparsity.width * sparsity.itemsize
    if system == "allreduce":
        return 2 * (ranks - 1) / ranks * sparsity.tensor_bytes
    if system == "allgather":
        return (ranks - 1) * sparsity.mean_units * unit_bytes
    if system == "zen_hierarchical":
        if power_of_two_below(ranks) != ranks:
            raise ValueError(f"least_bytes(): {ranks} ranks are not a power of two.")
        return math.fsum(sparsity.unions[2**k - 1] for k in range(ranks.bit_length() - 1)) * unit_bytes
    return (ranks - 1) / ranks * (sparsity.mean_units + sparsity.union) * unit_bytes


class _Reads(nn.Module):
    """A table with an optimizer that changes every row, so that the table cannot be sharded."""

    def __init__(self, num_units: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(num_units, width)

    def forward(self, ids: Tensor) -> Tensor:
        total: Tensor = self.table(ids).sum()
        return total


def picked(case: Case, ids_by_rank: Sequence[Tensor], cluster: Cluster) -> str:
    """Returns the system that the planner chooses under "auto" for a replica whose gradients have these units."""
    model = _Reads(case.num_units, case.width)
    whole = torch.optim.Adafactor(model.parameters())  # not element-wise, so the table cannot be sharded
    plan = embrace_fx.plan(model, list(ids_by_rank), cluster=cluster, optimizer=whole)
    chosen = plan["table.weight"]
    return f"zen_{chosen.scheme}" if chosen.strategy == "zen" else chosen.strategy
