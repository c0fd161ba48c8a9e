"""Rows of a table that each rank reads for one batch, and the cut of those of two batches in a row.

Shape legend: as in `embrace_fx/vocabulary/ops.py`; R rows of a routing, of all ranks; N ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from embrace_fx.runtime.kernels import coalesce, gpu


@dataclass(frozen=True)
class Routing:
    """Rows of a table that each rank reads for one batch: `ids` (R,) in rank order, `counts[r]` of them rank r's."""

    ids: Tensor
    counts: tuple[int, ...]

    @staticmethod
    def of(ids: Tensor, counts: Tensor) -> Routing:
        return Routing(ids, tuple(counts.tolist()))

    def own(self, rank: int) -> slice:
        start = sum(self.counts[:rank])
        return slice(start, start + self.counts[rank])


@dataclass(frozen=True)
class Selection:
    """Some of a routing's rows, the same ones on all ranks.

    Attributes:
        positions: (K,) among the routing's rows, ascending.
        counts: how many of them are whose.
        sums: how their gradients are summed, without a size that the host would have to ask for: the ids (k,) of the
            sums, sorted and unique, without the padding row, and (K,) which of them each row goes into; k: none, a
            padding row. None: found when they arrive.
    """

    positions: Tensor
    counts: tuple[int, ...]
    sums: tuple[Tensor, Tensor] | None = None

    @staticmethod
    def of(routing: Routing, mask: Tensor) -> Selection:
        """The rows that a mask (R,) bool selects."""
        positions, ends = mask.nonzero().view(-1), [*accumulate(routing.counts)]
        # One host read for all ranks: where the positions of each end.
        cuts = torch.searchsorted(positions, torch.tensor(ends, device=positions.device)).tolist()
        return Selection(positions, tuple([last - first for first, last in pairwise((0, *cuts))]))

    def own(self, routing: Routing, rank: int) -> Tensor:
        """(k,) positions of the rank's rows, counted from its first."""
        first = sum(self.counts[:rank])
        return self.positions[first : first + self.counts[rank]] - sum(routing.counts[:rank])

    def coalesce(
        self, ids: Tensor, flat: Tensor, columns: int, padding_idx: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        """The op of that name, for gradients of the rows selected."""
        if self.sums is None:
            unique, rows = coalesce(ids, flat, columns, padding_idx, scale)
            return unique, rows
        unique, places = self.sums
        rows = flat.view(places.numel(), columns)
        return unique, rows.new_zeros((len(unique) + 1, columns)).index_add_(0, places, rows, alpha=scale)[:-1]


@dataclass(frozen=True)
class Split:
    """The rows of this batch and of the next one, cut by use (EmbRace, ICPP 2022, section 4.2).

    Attributes:
        following: the next batch's routing.
        early, late: of its rows, those that this batch does not read and those it does.
        prior: of this batch's rows, those the next one reads.
        delayed: finds the others, in chunks.
    """

    following: Routing
    early: Selection
    late: Selection
    prior: Selection
    delayed: Callable[[], list[Selection]]


class RowSplitter:
    """Cuts routings of one table by what another batch reads. Keeps one mark per row of the table, and one for none.

    Attributes:
        no_row: stands for no row among ids.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.no_row = num_rows
        self._marks = torch.zeros((num_rows + 1,), dtype=torch.bool, device=device)
        self._stamps = 0  # on CUDA: marks that differ from this number are not erased

    def among(self, ids: Tensor, others: Tensor) -> Tensor:
        """Marks those of `ids` (R,) that are among `others`: bool (R,)."""
        if ids.is_cuda and gpu.available():
            return self._stamped(ids, others)
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
            following,
            Selection.of(following, ~late),
            Selection.of(following, late),
            Selection.of(current, prior),
            lambda: [Selection.of(current, mask) for mask in chunks_of(current.ids, ~prior, chunks)],
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
