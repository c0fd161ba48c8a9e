"""Zen's communication experiment (OSDI 2025, section 4): embedding gradients of three models, across machines.

Each machine of 8 V100 reduces densely inside and takes part as one rank. The paper gives each model's embedding
parameters and the density of a machine's gradient. It does not give how words are distributed: ids are drawn here from
Zipf's law, as often as that density takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from embrace_fx.cost.devices import DEVICES
from embrace_fx.cost.exchanges import predict
from embrace_fx.cost.links import Cluster
from embrace_fx.cost.sparsity import Sparsity, in_blocks, independent, measure

BYTES_PER_MS_OF_GBIT = 1e9 / 8 / 1e3
FLOAT_BYTES = 4
BLOCK = 256
"""Elements of a block of OmniReduce."""


@dataclass(frozen=True)
class Embedding:
    """A model's embedding gradient.

    Attributes:
        parameters: of all its tables.
        width: columns of a row, of the model as its authors published it.
        density: of one machine's gradient.
    """

    parameters: float
    width: int
    density: float

    def sparsity(self, machines: int, seed: int = 0) -> Sparsity:
        """How the gradients of so many machines lie, drawn from Zipf's law."""
        rows = round(self.parameters / self.width)
        generator = torch.Generator().manual_seed(seed)
        cumulative = torch.arange(1, rows + 1, dtype=torch.float64).reciprocal().cumsum(0)
        places = torch.randperm(rows, generator=generator)  # frequent words do not lie side by side
        ids = [places[_drawn(cumulative, round(rows * self.density), generator)] for _ in range(machines)]
        return measure(ids, rows, self.width, FLOAT_BYTES)


def _drawn(cumulative: Tensor, units: int, generator: torch.Generator) -> Tensor:
    """So many different ids, in the order in which they first come up."""
    found = torch.empty(0, dtype=torch.int64)
    while found.numel() < units:
        draws = torch.rand(4 * units, generator=generator, dtype=torch.float64) * cumulative[-1]
        ids = torch.cat([found, torch.searchsorted(cumulative, draws).clamp_(max=cumulative.numel() - 1)])
        unique, first = ids.unique(return_inverse=True)
        order = torch.full((unique.numel(),), ids.numel()).scatter_reduce_(
            0, first, torch.arange(ids.numel()), "amin", include_self=True
        )
        found = ids[order.sort().values]
    return found[:units]


MODELS = {
    "LSTM": Embedding(406e6, 512, 0.0113),
    "DeepFM": Embedding(214e6, 16, 0.0280),
    "NMT": Embedding(112e6, 1024, 0.0247),
}
PUBLISHED = {("LSTM", 16, 25): 6.77, ("DeepFM", 16, 25): 2.10}
"""(model, machines, Gb/s) -> Zen's communication over AllReduce's."""


@dataclass(frozen=True)
class Row:
    """One setting: predicted times of each strategy over AllReduce's, the higher the faster.

    Attributes:
        union: how many times as many elements all machines have together as one has (g of the paper's formula).
        implied: g with which the bytes of the paper's formula alone come to what is published; None where nothing is.
    """

    model: str
    machines: int
    gbit: int
    allreduce_ms: float
    speedups: dict[str, float]
    published: float | None
    union: float
    implied: float | None


def rows() -> Iterator[Row]:
    """All settings of the paper."""
    device = DEVICES["V100"]
    for model, embedding in MODELS.items():
        for machines in (4, 8, 16):
            lying = embedding.sparsity(machines)
            for gbit in (25, 100):
                cluster = device.cluster(gbit * BYTES_PER_MS_OF_GBIT)
                allreduce_ms = predict("allreduce", lying, cluster=cluster).time_ms(cluster)
                published = PUBLISHED.get((model, machines, gbit))
                implied = 1 / (published * embedding.density) - 1 if published is not None else None
                found = speedups(lying, cluster)
                yield Row(model, machines, gbit, allreduce_ms, found, published, lying.densification(machines), implied)


def by_elements(lying: Sparsity) -> Sparsity:
    """The same gradients, every value with an index of its own: what the paper sends and counts."""
    width = lying.width
    return replace(
        lying,
        num_units=lying.num_units * width,
        width=1,
        units_by_rank=tuple(units * width for units in lying.units_by_rank),
        unions=tuple(units * width for units in lying.unions),
    )


def drawn_evenly(lying: Sparsity) -> Sparsity:
    """As many units on each machine, none more frequent than others: as few in common as there can be by chance."""
    return independent(lying.num_units, lying.width, lying.itemsize, lying.units_by_rank)


def speedups(lying: Sparsity, cluster: Cluster) -> dict[str, float]:
    """AllReduce's predicted time over that of Zen, as the paper has it and by rows, and of what it is compared with.

    Args:
        lying: in rows.
    """
    compared = {
        "zen": ("zen", by_elements(lying)),
        "zen, no words in common": ("zen", drawn_evenly(by_elements(lying))),
        "zen by rows": ("zen", lying),
        "allgather": ("allgather", by_elements(lying)),
        "omnireduce": ("omnireduce", in_blocks(lying, BLOCK)),
    }
    allreduce_ms = predict("allreduce", lying, cluster=cluster).time_ms(cluster)
    times_ms = {name: predict(way, units, cluster=cluster).time_ms(cluster) for name, (way, units) in compared.items()}
    return {name: allreduce_ms / time_ms for name, time_ms in times_ms.items()}
