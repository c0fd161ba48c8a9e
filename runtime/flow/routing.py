"""Rows of a table that each rank reads for one batch: how two batches in a row are cut, and how the rows travel.

Contract
    Rows are cut by the ids of all ranks, in the same way on all of them. On the grid of ranks that a table lies on
    (columns alone are a grid of one row), a rank looks up, receives and updates what its own row of the grid has.
    On a device with several rows in the grid, the host waits for the sizes of each part.

Shape legend: as in `embrace_fx/vocabulary/ops.py`; R rows of a routing, of all ranks; N ranks; U' rows that this rank
reads of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from embrace_fx.runtime.kernels import (
    coalesce,
    gpu,
    join_columns,
    join_columns_into,
    split_columns,
    split_selected_columns,
)
from embrace_fx.runtime.kernels.grid import join_grid_into, route_grid, split_selected_grid
from embrace_fx.vocabulary.plan import Grid

Sums = tuple[Tensor, Tensor]
"""Ids (k,) of the sums of gradients, sorted and unique, without the padding row; (R,) which of them each row goes into,
k: none, a padding row. So no host has to ask for their number."""


@dataclass(frozen=True)
class Routing:
    """Rows of a table that each rank reads for one batch: all of them, or some, the same ones on all ranks.

    Attributes:
        ids: (R,) in rank order.
        counts: how many of them are whose.
        whole: all of the batch's, where these are some; None: these are all.
        positions: (R,) of some among all of them, ascending.
        sums: how their gradients are summed up; None: found when they arrive.
    """

    ids: Tensor
    counts: tuple[int, ...]
    whole: Routing | None = None
    positions: Tensor | None = None
    sums: Sums | None = None

    @staticmethod
    def of(ids: Tensor, counts: Tensor) -> Routing:
        return Routing(ids, tuple(counts.tolist()))

    def where(self, mask: Tensor) -> Routing:
        """Returns the rows that a mask (R,) bool selects."""
        positions, ends = mask.nonzero().view(-1), [*accumulate(self.counts)]
        # One host read for all ranks: where the positions of each end.
        cuts = torch.searchsorted(positions, torch.tensor(ends, device=positions.device)).tolist()
        return self.at(positions, tuple([last - first for first, last in pairwise((0, *cuts))]))

    def at(self, positions: Tensor, counts: tuple[int, ...], sums: Sums | None = None) -> Routing:
        """Returns the rows at positions (K,), ascending, of which so many are whose."""
        return Routing(self.ids.index_select(0, positions), counts, self, positions, sums)

    def own(self, rank: int) -> slice:
        start = sum(self.counts[:rank])
        return slice(start, start + self.counts[rank])

    def own_positions(self, rank: int) -> Tensor | None:
        """(k,) positions of the rank's rows among those of its batch; None: these are all."""
        if self.whole is None or self.positions is None:
            return None
        first: int = self.whole.own(rank).start
        return self.positions[self.own(rank)] - first


@dataclass(frozen=True)
class GridPart:
    """Rows of a batch, all or some, on a grid.

    Attributes:
        ids: (M,) rows of the own part of the table that any rank reads, in rank order of the readers.
        counts: how many rows a rank reads of each row of the grid, by rank.
        own: likewise, of this rank.
        positions: (U,) of this rank's rows among those of its batch, grouped by the grid's rows; None: all of them, on
            a grid of one row.
        columns: of the grid.
        sums: as of the routing.
    """

    ids: Tensor
    counts: Sequence[Sequence[int]]
    own: Sequence[int]
    positions: Tensor | None
    columns: int
    sums: Sums | None

    @staticmethod
    def of(routing: Routing, grid: Grid, rank: int) -> GridPart:
        ids, sizes, positions = routing.ids, routing.counts, routing.own_positions(rank)
        if grid.rows == 1:
            return GridPart(ids, [(size,) for size in sizes], (sizes[rank],), positions, grid.columns, routing.sums)
        own_ids, by_row, order = route_grid(ids, torch.tensor(sizes, device="cpu"), rank, grid.rows, grid.columns)
        positions = order if positions is None else positions.index_select(0, order)
        counts = by_row.tolist()
        return GridPart(own_ids, counts, counts[rank], positions, grid.columns, routing.sums)

    def join(self, flat: Tensor, out: Tensor | None, shape: tuple[int, int]) -> Tensor:
        """Returns the rows that have arrived, in their places among those of the batch.

        Args:
            out: (U', D) those of parts before; None: there are none.
            shape: U', D.
        """
        if self.positions is None:
            return join_columns(flat, shape[1], self.columns)
        out = flat.new_empty(shape) if out is None else out
        if len(self.own) == 1:
            join_columns_into(out, self.positions, flat, self.columns)
        else:
            join_grid_into(out, self.positions, flat, self.own, self.columns)
        return out

    def split(self, rows: Tensor) -> Tensor:
        """Returns the part of rows (U', D) as it is sent: flat (U * D,), blocks by the rank that each goes to."""
        if self.positions is None:
            return split_columns(rows, self.columns)
        if len(self.own) == 1:
            return split_selected_columns(rows, self.positions, self.columns)
        return split_selected_grid(rows, self.positions, self.own, self.columns)

    def summed(
        self, flat: Tensor, dtype: torch.dtype, columns: int, padding_idx: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        """The gradients (M, d) of all ranks that have arrived, flat, as one for each row: ids (K,), rows (K, d)."""
        flat = flat.to(dtype)
        if self.sums is None:
            ids, rows = coalesce(self.ids, flat, columns, padding_idx, scale)
            return ids, rows
        unique, places = self.sums
        rows = flat.view(places.numel(), columns)
        return unique, rows.new_zeros((len(unique) + 1, columns)).index_add_(0, places, rows, alpha=scale)[:-1]


@dataclass(frozen=True)
class Split:
    """The rows of this batch and of the next one, cut by use (EmbRace, ICPP 2022, section 4.2).

    Attributes:
        early, late: of the next batch's rows, those that this batch does not read and those it does.
        prior: of this batch's rows, those the next one reads.
        delayed: finds the others, in chunks.
    """

    early: Routing
    late: Routing
    prior: Routing
    delayed: Callable[[], list[Routing]]


MOST_MARKED = 1 << 22
"""Rows of a table on the CPU, each of which has a mark of its own: marks of more rows are memory, and not in cache."""


class RowSplitter:
    """Cuts routings of one table by what another batch reads. Keeps one mark per row of the table, and one for none; of
    a large one on the CPU none.

    Attributes:
        no_row: stands for no row among ids.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.no_row = num_rows
        self._is_marked = device.type != "cpu" or num_rows <= MOST_MARKED
        self._marks = torch.zeros((num_rows + 1 if self._is_marked else 0,), dtype=torch.bool, device=device)
        self._stamps = 0  # on CUDA: marks that differ from this number are not erased

    def among(self, ids: Tensor, others: Tensor) -> Tensor:
        """Marks those of `ids` (R,) that are among `others`: bool (R,)."""
        if ids.is_cuda and gpu.available():
            return self._stamped(ids, others)
        if not self._is_marked:
            ordered = torch.cat([others.sort().values, others.new_full((1,), self.no_row)])
            return ordered[torch.searchsorted(ordered[:-1], ids)] == ids
        self._marks.index_fill_(0, others, True)
        found = self._marks.index_select(0, ids)
        self._marks.index_fill_(0, others, False)
        return found

    def _stamped(self, ids: Tensor, others: Tensor) -> Tensor:
        marks = self._marks.view(torch.uint8)
        if self._stamps == gpu.STAMPS:
            marks.zero_()
            self._stamps = 0
        self._stamps += 1
        return gpu.split_prior_delayed(ids.contiguous(), others.contiguous(), marks, self._stamps)

    def split(self, current: Routing, following: Routing, chunks: int) -> Split:
        """Cuts two batches, reading the sizes of their parts.

        Args:
            chunks: in how many pieces delayed gradients travel.
        """
        late = self.among(following.ids, current.ids)
        prior = self.among(current.ids, following.ids)
        return Split(
            following.where(~late),
            following.where(late),
            current.where(prior),
            lambda: [current.where(mask) for mask in chunks_of(current.ids, ~prior, chunks)],
        )


def chunks_of(ids: Tensor, mask: Tensor, chunks: int) -> list[Tensor]:
    """Cuts the masked ids into `chunks` masks of about equal size; equal ids fall into the same one.

    A row whose gradients came in two chunks would be updated twice.
    """
    if chunks == 1:
        return [mask]
    order = ids[mask].sort().values
    cuts = [order[len(order) * k // chunks] for k in range(1, chunks)] if len(order) else []
    if not cuts:
        return [mask, *(torch.zeros_like(mask) for _ in range(chunks - 1))]
    which = torch.bucketize(ids, torch.stack(cuts), right=True)
    return [mask & (which == k) for k in range(chunks)]


def by_rank(sizes: Sequence[int], like: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the rank of each of `sizes[r]` rows of rank r, and its number among that rank's; (R,) int64 both."""
    owner = torch.cat([like.new_full((size,), rank, dtype=torch.int64) for rank, size in enumerate(sizes)])
    number = torch.cat([torch.arange(size, device=like.device) for size in sizes])
    return owner, number
