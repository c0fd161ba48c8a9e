"""The exchanges of vocabulary heads: how many positions each rank scores, and what goes to and fro for each.

Contract
    Collectives leave where they are called, on the group of their class, in the same order on all ranks. A rank that
    cannot go on makes those that are left of its phase by the counts that it remembers, with zeros for values.

Shape legend: as in `embrace_fx/vocabulary/head_ops.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from embrace_fx.runtime.kernels.head import chunk_bounds
from embrace_fx.runtime.ranks.communicator import Communicator, InFlight


class HeadExchange:
    """The exchanges of one program's heads."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._counting: dict[str, InFlight] = {}  # table -> its last exchange of counts

    def launches(self) -> Mapping[str, Callable[..., InFlight]]:
        """Maps op names to the functions that a lowered program calls."""
        return {
            "embrace::gather_counts": self.gather_counts,
            "embrace::gather_positions": self.gather_positions,
            "embrace::scatter_positions": self.scatter_positions,
        }

    def gather_counts(self, labels: Tensor | None, table: str, group: str, group_size: int) -> InFlight:
        own = torch.tensor([0 if labels is None else len(labels)], device="cpu")
        self._counting[table] = self._communicator.gather_alike(own, group)
        return replace(self._counting[table], value=self._counting[table].value.view(-1))

    def gather_positions(
        self, rows: Tensor, counts: Tensor | None, chunk: int, chunks: int, table: str, group: str, group_size: int
    ) -> InFlight:
        """Launches `gather_positions`; without counts, of as many zeros as this rank has announced positions."""
        sizes, shape = self._sizes(counts, chunk, chunks, table), rows.shape[1:]
        if counts is None:
            rows = rows.new_zeros((sizes[self._communicator.rank], *shape))
        elif chunks > 1:
            rows = rows[slice(*chunk_bounds(len(rows), chunk, chunks))]
        of_ranks = [size * shape.numel() for size in sizes]
        found = self._communicator.gather_unlike(rows.reshape(-1), of_ranks, group)
        return replace(found, value=found.value.view(sum(sizes), *shape))

    def scatter_positions(
        self, rows: Tensor, counts: Tensor | None, chunk: int, chunks: int, table: str, group: str, group_size: int
    ) -> InFlight:
        """Launches `scatter_positions`, likewise."""
        sizes, shape = self._sizes(counts, chunk, chunks, table), rows.shape[1:]
        if counts is None:
            rows = rows.new_zeros((sum(sizes), *shape))
        of_ranks = [size * shape.numel() for size in sizes]
        if group_size == 1:
            return InFlight(rows, None)
        own = [of_ranks[self._communicator.rank]] * group_size
        arrived = rows.new_empty((sum(own),))
        found = self._communicator.all_to_all(arrived, rows.reshape(-1), own, of_ranks, group)
        return replace(found, value=found.value.view(group_size * sizes[self._communicator.rank], *shape))

    def _sizes(self, counts: Tensor | None, chunk: int, chunks: int, table: str) -> list[int]:
        """Returns how many positions of a chunk each rank scores."""
        if counts is None:
            counts = self._communicator.wait(self._counting[table]).view(-1)
        bounds = [chunk_bounds(size, chunk, chunks) for size in counts.tolist()]
        return [end - start for start, end in bounds]
