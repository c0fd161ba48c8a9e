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
from dataclasses import dataclass, replace
from functools import cache, cached_property
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
        grid: of the ranks that the table lies on.
        rank: this one.
        whole: all of the batch's, where these are some; None: these are all.
        positions: (R,) of some among all of them, ascending.
        sums: how their gradients are summed up; None: found when they arrive.
        rest: of some that leave before the others, finds the others, in pieces.
    """

    ids: Tensor
    counts: tuple[int, ...]
    grid: Grid
    rank: int
    whole: Routing | None = None
    positions: Tensor | None = None
    sums: Sums | None = None
    rest: Callable[[], Sequence[Routing]] = tuple

    def of_batch(self, ids: Tensor, counts: Tensor) -> Routing:
        """Returns all rows of another batch of the same table."""
        return Routing(ids, tuple(counts.tolist()), self.grid, self.rank)

    def where(self, mask: Tensor) -> Routing:
        """Returns the rows that a mask (R,) bool selects."""
        positions, ends = mask.nonzero().view(-1), [*accumulate(self.counts)]
        # One host read for all ranks: where the positions of each end.
        cuts = torch.searchsorted(positions, torch.tensor(ends, device=positions.device)).tolist()
        return self.at(positions, tuple([last - first for first, last in pairwise((0, *cuts))]))

    def at(self, positions: Tensor, counts: tuple[int, ...], sums: Sums | None = None) -> Routing:
        """Returns the rows at positions (K,), ascending, of which so many are whose."""
        return Routing(self.ids.index_select(0, positions), counts, self.grid, self.rank, self, positions, sums)

    @property
    def all_ids(self) -> Tensor:
        """The ids of all rows of its batch."""
        return self.ids if self.whole is None else self.whole.ids

    def own(self) -> slice:
        """Returns the places of this rank's rows."""
        start = sum(self.counts[: self.rank])
        return slice(start, start + self.counts[self.rank])

    # -- on the grid ---------------------------------------------------------------------------------------------------

    @cached_property
    def _on_grid(self) -> tuple[Tensor, Sequence[Sequence[int]], Tensor | None]:
        own: Tensor | None = None
        if self.whole is not None and self.positions is not None:
            own = self.positions[self.own()] - self.whole.own().start
        rows, columns = self.grid.rows, self.grid.columns
        if rows == 1:
            return self.ids, [(size,) for size in self.counts], own
        ids, by_row, order = route_grid(self.ids, torch.tensor(self.counts, device="cpu"), self.rank, rows, columns)
        return ids, by_row.tolist(), order if own is None else own.index_select(0, order)

    @property
    def held_ids(self) -> Tensor:
        """Rows (M,) of the own part of the table that any rank reads, in rank order of the readers."""
        return self._on_grid[0]

    @property
    def counts_by_row(self) -> Sequence[Sequence[int]]:
        """Counts the rows that a rank reads of each row of the grid, by rank."""
        return self._on_grid[1]

    @property
    def own_positions(self) -> Tensor | None:
        """Places (U,) of this rank's rows among those of its batch, grouped by the grid's rows; None: all of them, on a
        grid of one row."""
        return self._on_grid[2]

    def join(self, flat: Tensor, out: Tensor | None, shape: tuple[int, int]) -> Tensor:
        """Returns the rows that have arrived, in their places among those of the batch.

        Args:
            out: (U', D) those of parts before; None: there are none.
            shape: U', D.
        """
        positions, columns = self.own_positions, self.grid.columns
        if positions is None:
            return join_columns(flat, shape[1], columns)
        out = flat.new_empty(shape) if out is None else out
        if self.grid.rows == 1:
            join_columns_into(out, positions, flat, columns)
        else:
            join_grid_into(out, positions, flat, self.counts_by_row[self.rank], columns)
        return out

    def split(self, rows: Tensor) -> Tensor:
        """Returns the part of rows (U', D) as it is sent: flat (U * D,), blocks by the rank that each goes to."""
        positions, columns = self.own_positions, self.grid.columns
        if positions is None:
            return split_columns(rows, columns)
        if self.grid.rows == 1:
            return split_selected_columns(rows, positions, columns)
        return split_selected_grid(rows, positions, self.counts_by_row[self.rank], columns)

    def summed(
        self, flat: Tensor, dtype: torch.dtype, columns: int, padding_idx: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        """The gradients (M, d) of all ranks that have arrived, flat, as one for each row: ids (K,), rows (K, d)."""
        flat = flat.to(dtype)
        if self.sums is None:
            ids, rows = coalesce(self.held_ids, flat, columns, padding_idx, scale)
            return ids, rows
        unique, places = self.sums
        rows = flat.view(places.numel(), columns)
        return unique, rows.new_zeros((len(unique) + 1, columns)).index_add_(0, places, rows, alpha=scale)[:-1]


def cut(current: Routing, following: Routing, among: Among, chunks: int) -> tuple[Routing, Routing]:
    """Cuts two batches in a row by use, reading the sizes of their pieces (EmbRace, ICPP 2022, section 4.2).

    Args:
        among: of the table's rows.
        chunks: in how many pieces delayed gradients travel.

    Returns: of this batch's rows, the prior ones, which the next one reads; their rest are delayed, in chunks. Of the
        next batch's rows, the early ones, which this one does not read; their rest are late, in one piece.
    """
    is_late = among(following.ids, current.ids)
    is_prior = among(current.ids, following.ids)
    late = following.where(is_late)
    delayed = cache(lambda: [current.where(mask) for mask in chunks_of(current.ids, ~is_prior, chunks)])
    prior, early = current.where(is_prior), following.where(~is_late)
    return replace(prior, rest=delayed), replace(early, rest=lambda: (late,))


MOST_MARKED = 1 << 22
"""Rows of a table on the CPU, each of which has a mark of its own: marks of more rows are memory, and not in cache."""

Among = Callable[[Tensor, Tensor], Tensor]
"""Marks those of ids (R,) that are among others: bool (R,)."""


def membership(num_rows: int, device: torch.device) -> Among:
    """Makes an `Among` of one table's rows, and `num_rows`, which stands for none.

    It keeps one mark per row and one for none; of a large table on the CPU it sorts the others instead.
    """
    is_marked = device.type != "cpu" or num_rows <= MOST_MARKED
    marks = torch.zeros((num_rows + 1 if is_marked else 0,), dtype=torch.bool, device=device)
    stamp = 0  # on CUDA: marks that differ from this number are not erased

    def among(ids: Tensor, others: Tensor) -> Tensor:
        nonlocal stamp
        if ids.is_cuda and gpu.available():
            if stamp == gpu.STAMPS:
                marks.zero_()
                stamp = 0
            stamp += 1
            return gpu.split_prior_delayed(ids.contiguous(), others.contiguous(), marks.view(torch.uint8), stamp)
        if not is_marked:
            ordered = torch.cat([others.sort().values, others.new_full((1,), num_rows)])
            return ordered[torch.searchsorted(ordered[:-1], ids)] == ids
        marks.index_fill_(0, others, True)
        found = marks.index_select(0, ids)
        marks.index_fill_(0, others, False)
        return found

    return among


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
