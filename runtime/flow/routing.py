"""Rows of a table that each rank reads for one batch: whose they are, where, and how two batches in a row are cut.

Contract
    Rows are cut by the ids of all ranks, in the same way on all of them. On the grid of ranks that a table lies on
    (columns alone are a grid of one row), a rank looks up, receives and updates what its own row of the grid has.
    On a device with several rows in the grid, the host waits for the sizes of each part.

Shape legend: as in `embrace_fx/vocabulary/ops.py`; R rows of a routing, of all ranks; N ranks; U' rows that this rank
reads of the whole batch; C most rows that a batch can read, by its number of ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from embrace_fx.runtime.kernels import first_true, heads_of
from embrace_fx.runtime.kernels.among import among as is_one_of
from embrace_fx.runtime.kernels.grid import route_grid
from embrace_fx.vocabulary.plan import Grid

Sums = tuple[Tensor, Tensor]
"""Ids (k,) of the sums of gradients, sorted and unique, without padding rows; (R,) which of them each row goes into,
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

    def among(ids: Tensor, others: Tensor) -> Tensor:
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


# -- before the host knows the sizes -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Piece:
    """Some rows of a routing, whose sizes are still on the device.

    Attributes:
        positions: (R,) of theirs among all, then others.
        counts: (N,) how many of them are whose.
        sums: of gradients, ids of their sums, which of them each row goes into, and how many there are.
    """

    positions: Tensor
    counts: Tensor
    sums: tuple[Tensor, Tensor, Tensor] | None = None

    def of(self, routing: Routing, counts: tuple[int, ...], number_of_sums: int = 0) -> Routing:
        """Returns them, with the sizes that the host has read by now."""
        positions, sums = self.positions[: sum(counts)], None
        if self.sums is not None:
            ids, places, _ = self.sums
            sums = ids[:number_of_sums], places.index_select(0, positions)
        return routing.at(positions, counts, sums)


@dataclass(frozen=True)
class Routed:
    """The next batch's routing of one table: ids (C of all ranks,) in rank order, then others; counts (N,)."""

    ids: Tensor
    owner: Tensor
    is_row: Tensor
    counts: Tensor


def routed(packed: Tensor, capacities: Sequence[Sequence[int]], table: int) -> Routed:
    """Finds the rows that all ranks read of a table.

    Args:
        packed: (N, T + M): each rank's T counts, then its ids table after table, each as long as its capacity.
        capacities: C by rank, by table.
        table: its number.
    """
    starts = [len(of_rank) + sum(of_rank[:table]) for of_rank in capacities]
    of_table = [of_rank[table] for of_rank in capacities]
    spans = zip(packed.unbind(0), starts, of_table, strict=True)
    flat = torch.cat([of_rank[start : start + length] for of_rank, start, length in spans]).to(torch.int64)
    owner, number = by_rank(of_table, flat)
    counts = packed[:, table].to(torch.int64)
    is_row = number < counts.index_select(0, owner)
    order = first_true(is_row)
    return Routed(
        flat.index_select(0, order),
        owner.index_select(0, order),
        torch.arange(order.numel(), device=order.device) < is_row.sum(),
        counts,
    )


class SplitAhead:
    """Cuts a table's rows of two batches in a row, before the host knows the sizes.

    Args:
        current: the batch whose rows have been asked for.
        following: the next one.
        among: of the table's rows; used on this stream alone.
        num_rows: of the table.
        chunks: in how many pieces delayed gradients travel.
        padding_rows: those without gradient.
    """

    def __init__(
        self,
        current: Routing,
        following: Routed,
        among: Among,
        num_rows: int,
        chunks: int,
        padding_rows: tuple[int, ...],
    ) -> None:
        self.current = current
        self._following = following
        ranks = following.counts.numel()
        late = among(following.ids, current.ids) & following.is_row
        prior = among(current.ids, torch.where(following.is_row, following.ids, num_rows))
        owner, _ = by_rank(current.counts, current.ids)
        ahead = [_piece(mask, following.owner, ranks) for mask in (late, following.is_row & ~late)]
        ordered, order = current.ids.sort(stable=True)
        self._gradients = [
            _piece(mask, owner, ranks, _sums(ordered, order, mask, padding_rows))
            for mask in (prior, *_chunks(ordered, order, current.ids, ~prior, chunks))
        ]
        self._pieces = (*ahead, *self._gradients)

    @property
    def length(self) -> int:
        """Counts the numbers in `sizes`."""
        return self._following.counts.numel() * len(self._pieces) + len(self._gradients)

    def sizes(self) -> Tensor:
        """All sizes, in the order in which `cut` takes them: int64, of a length that the host knows."""
        of_sums = torch.stack([each.sums[2] for each in self._gradients if each.sums is not None])
        return torch.cat([*(each.counts for each in self._pieces), of_sums])

    def tensors(self) -> list[Tensor]:
        """Lists the tensors that another stream will read."""
        of_sums = [tensor for each in self._gradients if each.sums is not None for tensor in each.sums[:2]]
        return [self._following.ids, *(each.positions for each in self._pieces), *of_sums]

    def cut(self, following: Routing, sizes: Sequence[int]) -> tuple[Routing, Routing]:
        """As `routing.cut`, with the sizes that the host has read by now."""
        ranks, of_sums = len(following.counts), sizes[self.length - len(self._gradients) : self.length]
        counts = [tuple(sizes[k * ranks : (k + 1) * ranks]) for k in range(len(self._pieces))]
        late, early = (piece.of(following, own) for piece, own in zip(self._pieces[:2], counts[:2], strict=True))
        prior, *delayed = [
            piece.of(self.current, own, size)
            for piece, own, size in zip(self._gradients, counts[2:], of_sums, strict=True)
        ]
        return replace(prior, rest=lambda: delayed), replace(early, rest=lambda: (late,))


def _piece(mask: Tensor, owner: Tensor, ranks: int, sums: tuple[Tensor, Tensor, Tensor] | None = None) -> _Piece:
    counts = torch.zeros(ranks, dtype=torch.int64, device=mask.device).index_add_(0, owner, mask.to(torch.int64))
    return _Piece(first_true(mask), counts, sums)


def _chunks(ordered: Tensor, order: Tensor, ids: Tensor, mask: Tensor, chunks: int) -> list[Tensor]:
    """`chunks_of`, for ids whose order is known."""
    if chunks == 1:
        return [mask]
    masked = mask.index_select(0, order)
    candidates = ordered.index_select(0, first_true(masked))  # the masked ids in order, then others
    size = masked.sum()
    at = [(size * k // chunks).clamp(max=max(ids.numel() - 1, 0)) for k in range(1, chunks)]
    if ids.numel() == 0:
        return [mask] * chunks
    which = torch.bucketize(ids, candidates.index_select(0, torch.stack(at)), right=True)
    return [mask & (which == k) for k in range(chunks)]


def _sums(ordered: Tensor, order: Tensor, mask: Tensor, padding_rows: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Finds the sum that each masked row goes into; of equal ids all rows are masked or none is."""
    counted = mask.index_select(0, order)
    if padding_rows:
        counted = counted & ~is_one_of(ordered, padding_rows)
    heads = heads_of(ordered) & counted
    size = heads.sum()
    places = torch.where(counted, heads.cumsum(0) - 1, size)
    return ordered.index_select(0, first_true(heads)), torch.empty_like(order).scatter_(0, order, places), size
