"""Exchanges of more ranks than there are processes: all ranks in this one, over a simulated wire.

The wire also checks what a real one would hang on: that ranks launch the same collectives in the same order, and agree
on their sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from embrace_fx.cost.links import Cluster
from embrace_fx.runtime.exchanges.channel import Channel, Steps
from embrace_fx.runtime.exchanges.gradient import RowSet, join_parts
from embrace_fx.runtime.exchanges.in_place import STRATEGY_OF
from embrace_fx.runtime.ranks.communicator import InFlight
from tests.support.exchange_cases import WAYS


@dataclass
class Launch:
    kind: str
    sent: Tensor
    send_sizes: Sequence[int]
    received: Tensor
    receive_sizes: Sequence[int]


class Wire:
    """Launches of all ranks; each is carried out when the last rank has launched it."""

    def __init__(self, world_size: int) -> None:
        self.launches: list[list[Launch]] = [[] for _ in range(world_size)]
        self._delivered = 0

    def deliver(self) -> None:
        while all(len(launches) > self._delivered for launches in self.launches):
            together = [launches[self._delivered] for launches in self.launches]
            assert len({launch.kind for launch in together}) == 1
            parts = [launch.sent.split(list(launch.send_sizes)) for launch in together]
            for rank, launch in enumerate(together):
                incoming = [part[rank] for part in parts]
                assert [part.numel() for part in incoming] == list(launch.receive_sizes)
                launch.received.copy_(torch.cat(incoming))
            self._delivered += 1


class SimulatedChannel(Channel):
    def __init__(self, rank: int, wire: Wire) -> None:
        self.rank, self.world_size, self.sent_bytes = rank, len(wire.launches), 0
        self._wire = wire

    def _launch(
        self, kind: str, sent: Tensor, send_sizes: Sequence[int], received: Tensor, receive_sizes: Sequence[int]
    ) -> InFlight:
        self._wire.launches[self.rank].append(Launch(kind, sent, send_sizes, received, receive_sizes))
        return InFlight(received, None)

    def all_to_all(self, sent: Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]) -> InFlight:
        return self._launch("all_to_all", sent, send_sizes, sent.new_empty((sum(receive_sizes),)), receive_sizes)

    def all_to_all_equal(self, sent: Tensor) -> InFlight:
        sizes = [sent.numel() // self.world_size] * self.world_size
        return self.all_to_all(sent, sizes, sizes)

    def all_gather(self, own: Tensor, sizes: Sequence[int]) -> InFlight:
        copies = own.repeat(self.world_size)
        return self._launch("all_gather", copies, [own.numel()] * self.world_size, own.new_empty((sum(sizes),)), sizes)


def run_simulated(world_size: int, start: Callable[[int, Channel], Steps[list[RowSet]]]) -> list[list[RowSet]]:
    """Every rank's result; each rank has as many rounds as the others."""
    wire = Wire(world_size)
    ranks = [start(rank, SimulatedChannel(rank, wire)) for rank in range(world_size)]
    values: list[Tensor | None] = [None] * world_size
    while True:
        results: list[list[RowSet]] = []
        for rank, steps in enumerate(ranks):
            value = values[rank]
            try:
                values[rank] = (next(steps) if value is None else steps.send(value)).value
            except StopIteration as end:
                results.append(end.value)
        if results:
            assert len(results) == world_size
            return results
        wire.deliver()


def rows_of(rank: int, density: float, seed: int) -> RowSet:
    random = torch.Generator().manual_seed(seed * 100 + rank)
    ids = (torch.rand(53, generator=random) < density / (1 + rank % 3)).nonzero().view(-1)
    return RowSet(ids, torch.randint(-50, 50, (ids.numel(), 3), generator=random).double(), 53)


@pytest.mark.parametrize("name", [name for name, way in WAYS.items() if not way.elements])
@settings(max_examples=15)
@given(world_size=st.integers(5, 17), density=st.sampled_from([0.0, 0.02, 0.3, 1.0]), seed=st.integers(0, 1000))
def test_the_mean_of_many_ranks(name: str, world_size: int, density: float, seed: int) -> None:
    way = WAYS[name]
    mean_parts = STRATEGY_OF[way.strategy, way.scheme].mean_parts
    by_rank = [rows_of(rank, density, seed) for rank in range(world_size)]
    dense = torch.zeros(53, 3, dtype=torch.float64)
    for rows in by_rank:
        dense.index_add_(0, rows.ids, rows.rows)
    union = torch.cat([rows.ids for rows in by_rank]).unique()
    with way.chosen():
        found = run_simulated(world_size, lambda rank, channel: mean_parts(by_rank[rank], channel, Cluster()))
    for mean in (join_parts(parts, 53) for parts in found):
        assert torch.equal(mean.ids, union)
        assert torch.equal(mean.rows, dense[union] / world_size)
