"""Rows of a table that each rank reads for one batch: whose they are, where, and how two batches in a row are cut.

Contract
    Rows are cut by the ids of all ranks, in the same way on all of them. On the grid of ranks that a table lies on
    (columns alone are a grid of one row), a rank looks up, receives and updates what its own row of the grid has.
    On a device with several rows in the grid, the host waits for the sizes of each part.

Shape legend: as in `embrace_fx/vocabulary/ops.py`; R rows of a routing, of all ranks; N ranks; U' rows that this rank
reads of the whole batch; C most rows that a batch can read, by its number of ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate
from operator import sub

import torch
from torch import Tensor

from embrace_fx.runtime.kernels.grid import route_grid
from embrace_fx.runtime.kernels.membership import isin as is_one_of
from embrace_fx.vocabulary.plan import Grid

Sums = tuple[Tensor, Tensor]
"""Ids (k,) of the sums of gradients, sorted and unique, without padding rows; (R,) which of them each row goes into,
k: none, a padding row. So no host has to ask for their number."""


class Routing:
    """The distribution over ranks of the rows of one table that a batch reads, or of a part of these rows.

    Args:
        grid: the grid of ranks that hold the table.
        rank: this rank.
        places: the positions (U,) of this rank's rows among those of its whole batch, or None for all of them.

    Attributes:
        ids: the ids (R,), in rank order of the readers.
        all_ids: the ids of all rows of the batch.
        counts: how many of the ids each rank reads.
        whole: the routing of all the batch's rows if this one has only some, or None.
        sums: how gradients of the rows are summed, or None to find it when they arrive.
        owner: the reading rank (R,) of each row if only the device knows it, or None if `counts` gives it.
        rest: if these rows are sent before the others, a function that finds the others, in pieces.
        held_ids: the rows (M,) of this rank's part of the table that any rank reads, in rank order of the readers.
        counts_by_row: by rank, how many rows it reads from each row of the grid.
        own_positions: the positions (U,) of this rank's rows among those of its batch, grouped by the grid's rows, or
            None for all of them on a grid of one row.
    """

    def __init__(
        self,
        ids: Tensor,
        counts: tuple[int, ...],
        grid: Grid,
        rank: int,
        whole: Routing | None = None,
        places: Tensor | None = None,
        sums: Sums | None = None,
        owner: Tensor | None = None,
    ) -> None:
        self.ids, self.counts, self.whole, self.sums, self.owner = ids, counts, whole, sums, owner
        self.grid, self.rank = grid, rank
        self.all_ids = ids if whole is None else whole.ids
        self.rest: Callable[[], Sequence[Routing]] = tuple
        self.held_ids, self.own_positions = ids, places
        self.counts_by_row: Sequence[Sequence[int]]
        if grid.rows == 1:
            self.counts_by_row = [*zip(counts, strict=True)]
            return
        sizes = torch.tensor(counts, device="cpu")
        self.held_ids, by_row, order = route_grid(ids, sizes, rank, grid.rows, grid.columns)
        self.counts_by_row = by_row.tolist()
        self.own_positions = order if places is None else places.index_select(0, order)

    def select(self, mask: Tensor, but: Sequence[Routing] | None = None) -> Routing:
        """Returns the routing of the rows that a mask (R,) selects.

        Args:
            but: all other rows, if known, so that the host reads no sizes.
        """
        places = mask.nonzero().view(-1)
        if but is None:  # one host read gives the end of each rank's places
            ends = torch.tensor([*accumulate(self.counts)], device=places.device)
            cuts = torch.searchsorted(places, ends).tolist()
            counts = tuple(map(sub, cuts, [0, *cuts]))
        else:
            counts = remaining_counts(self.counts, [each.counts for each in but])
        return self.split_pieces(places, [counts])[0]

    def split_pieces(
        self, places: Tensor, counts: Sequence[tuple[int, ...]], sums: Sequence[Sums] = ()
    ) -> list[Routing]:
        """Returns the routings of consecutive pieces of the rows at `places` (R',).

        Args:
            counts: for each piece, how many of its rows each rank reads.
            sums: for each piece, how its gradients are summed, if known.
        """
        ids, rank, found, start = self.ids.index_select(0, places), self.rank, list[Routing](), 0
        own = places - sum(self.counts[:rank])
        for k, of_piece in enumerate(counts):
            first, end = start + sum(of_piece[:rank]), start + sum(of_piece)
            mine = own[first : first + of_piece[rank]]
            found.append(Routing(ids[start:end], of_piece, self.grid, rank, self, mine, sums[k] if sums else None))
            start = end
        return found


def remaining_counts(counts: tuple[int, ...], taken: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """Returns, by rank, the number of rows that are left when some are taken."""
    for each in taken:
        counts = tuple(map(sub, counts, each))
    return counts


def cut_batches(current: Routing, following: Routing, isin: IsIn, chunks: int) -> tuple[Routing, Routing]:
    """Splits the rows of two consecutive batches into prior and delayed gradients, and early and late rows (EmbRace,
    ICPP 2022, section 4.2).

    Args:
        isin: the membership test of the table's rows.
        chunks: the count of pieces in which delayed gradients are sent.

    Returns: this batch's prior rows, which the next batch reads, and the next batch's early rows, which this batch does
        not read. The `rest` of the former is delayed, in chunks, and the `rest` of the latter is late, in one piece.
    """
    is_late = isin(following.ids, current.ids)
    is_prior = isin(current.ids, following.ids)
    late = following.select(is_late)
    prior, early = current.select(is_prior), following.select(~is_late, but=[late])

    @cache
    def split_delayed() -> list[Routing]:
        """Returns the routings of the delayed rows, in chunks."""
        found = list[Routing]()
        for k, mask in enumerate(split_in_chunks(current.ids, ~is_prior, chunks), 1):
            found.append(current.select(mask, but=[prior, *found] if k == chunks else None))
        return found

    prior.rest, early.rest = split_delayed, lambda: (late,)
    return prior, early


MOST_MARKED = 1 << 22
"""The most rows of a table on the CPU that have a mark each: marks of more rows would not stay in cache."""

IsIn = Callable[[Tensor, Tensor], Tensor]
"""Marks those of ids (R,) that are among others: bool (R,)."""


def membership(num_rows: int, device: torch.device) -> IsIn:
    """Returns a function that tests which ids are among others, for one table.

    The test keeps one mark per row, and one for no row. For a large table on the CPU it sorts the other ids instead.
    """
    is_marked = device.type != "cpu" or num_rows <= MOST_MARKED
    marks = torch.zeros((num_rows + 1 if is_marked else 0,), dtype=torch.bool, device=device)

    def isin(ids: Tensor, others: Tensor) -> Tensor:
        """Returns a bool mask of the `ids` that are in `others`."""
        if not is_marked:
            ordered = torch.cat([others.sort().values, others.new_full((1,), num_rows)])
            return ordered[torch.searchsorted(ordered[:-1], ids)] == ids
        marks.index_fill_(0, others, True)
        found = marks.index_select(0, ids)
        marks.index_fill_(0, others, False)
        return found

    return isin


def split_in_chunks(ids: Tensor, mask: Tensor, chunks: int) -> list[Tensor]:
    """Splits the masked ids into `chunks` masks of about equal size. Equal ids stay together.

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


@lru_cache(maxsize=16)
def _by_rank(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns, for `sizes[r]` rows of each rank r, the rank of each row and its index within that rank; both (R,)
    int64.

    The tensors are shared; do not write to them.
    """
    owner = [torch.full((size,), rank, device=device) for rank, size in enumerate(sizes)]
    return torch.cat(owner), torch.cat([torch.arange(size, device=device) for size in sizes])


@lru_cache(maxsize=64)
def _delayed_bounds(num_rows: int, device: torch.device) -> Tensor:
    """Returns the keys (2,) at which delayed rows begin and end. The tensor is shared; do not write to it."""
    return torch.arange(0, 2 * num_rows, num_rows, device=device)


# -- before the host knows the sizes -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class PaddedRouting:
    """The routing of one table for the next batch, padded to a fixed size on a device.

    Attributes:
        ids: the ids (sum of all ranks' C,). At places of no row, the table's count of rows.
        owner, is_row: the rank of each place, and whether it holds a row; of the same shape.
        counts: the count of rows of each rank (N,).
    """

    ids: Tensor
    owner: Tensor
    is_row: Tensor
    counts: Tensor


def route_padded(packed: Tensor, capacities: Sequence[Sequence[int]], table: int, num_rows: int) -> PaddedRouting:
    """Finds the rows that all ranks read of a table.

    Args:
        packed: (N, T + M): each rank's T counts, then its ids table after table, each as long as its capacity.
        capacities: the capacity C by rank, by table.
        table: the index of the table.
        num_rows: the count of the table's rows.
    """
    starts = [len(of_rank) + sum(of_rank[:table]) for of_rank in capacities]
    of_table = tuple([of_rank[table] for of_rank in capacities])
    spans = zip(packed.unbind(0), starts, of_table, strict=True)
    flat = torch.cat([of_rank[start : start + length] for of_rank, start, length in spans]).to(torch.int64)
    owner, number = _by_rank(of_table, flat.device)
    counts = packed[:, table].to(torch.int64)
    is_row, order = (number < counts.index_select(0, owner)).sort(stable=True, descending=True)
    ids = torch.where(is_row, flat.index_select(0, order), num_rows)
    return PaddedRouting(ids, owner.index_select(0, order), is_row, counts)


class SplitAhead:
    """Splits a table's rows of two consecutive batches on a device, before the host knows the sizes.

    A stable sort by kind puts the places of each piece after those of the previous piece, so that the host can cut once
    it has read the sizes. A sort by kind and id puts the rows of each sum next to each other.

    Args:
        current: the batch whose rows have been requested.
        following: the next batch.
        isin: the membership test of the table's rows, used on this stream only.
        num_rows: the count of the table's rows.
        chunks: the count of pieces in which delayed gradients are sent.
        padding_rows: the rows without gradient.
    """

    def __init__(
        self,
        current: Routing,
        following: PaddedRouting,
        isin: IsIn,
        num_rows: int,
        chunks: int,
        padding_rows: tuple[int, ...],
    ) -> None:
        self._current, self._following = current, following
        self._chunks, self._ranks, self._pads = chunks, following.counts.numel(), bool(padding_rows)
        ids = current.ids
        late, prior = isin(following.ids, ids), isin(ids, following.ids)
        owner = _by_rank(current.counts, ids.device)[0] if current.owner is None else current.owner
        # Sort keys: late rows, then early rows, then places of no row.
        self._ahead = late.sort(stable=True, descending=True).indices
        key = torch.add(ids, prior, alpha=-num_rows)  # sort keys: prior rows before all others
        ordered, order = key.sort(stable=True)
        bounds = _delayed_bounds(num_rows, ids.device)
        if chunks == 1:
            self._places = prior.sort(stable=True, descending=True).indices
            counted = [(following.owner, late), (owner, prior)]
        else:
            bounds = torch.cat([bounds[:1], _chunk_bounds(ordered, chunks), bounds[1:]])
            kind = torch.bucketize(key, bounds[:-1], right=True)
            self._places = kind.sort(stable=True).indices
            counted = [(following.owner, late), *((owner, kind == k) for k in range(chunks))]
        if padding_rows:  # the place of rows without a sum, after all sums
            ordered, order = torch.where(is_one_of(ids, padding_rows), num_rows, key).sort(stable=True)
        begins = torch.zeros(ids.numel() + 1, dtype=torch.bool, device=ids.device)
        torch.ne(ordered[1:], ordered[:-1], out=begins[2:])
        number = begins.cumsum(0)  # index of the sum that each row goes into, plus one
        self._sums = torch.empty_like(order).scatter_(0, order, number[1:])
        # Rows of one sum have equal ids, so any order of writes is correct.
        self._ids = torch.empty_like(ids).scatter_(0, self._sums, ids)
        ends = torch.searchsorted(ordered, bounds)
        none = torch.zeros(self._ranks, dtype=torch.int64, device=ids.device)
        counts = [none.index_add(0, of, mask.to(torch.int64)) for of, mask in counted]
        self.sizes = torch.cat([*counts, ends, number.index_select(0, ends)])
        """All sizes, in the order that `cut_batches` expects: int64, of a length that the host knows."""

    def tensors(self) -> list[Tensor]:
        """Lists the tensors that another stream will read."""
        return [self._following.ids, self._following.owner, self._ahead, self._places, self._sums, self._ids]

    def cut_batches(self, ids: Tensor, counts: tuple[int, ...], sizes: Sequence[int]) -> tuple[Routing, Routing]:
        """Splits both batches as `cut_batches` does, once the host has read the sizes of the pieces.

        Args:
            ids, counts: the ids and counts of the following batch.
        """
        current, ranks, chunks = self._current, self._ranks, self._chunks
        following = Routing(ids, counts, current.grid, current.rank, owner=self._following.owner[: sum(counts)])
        late, *gradients = [tuple(sizes[k * ranks : (k + 1) * ranks]) for k in range(chunks + 1)]
        gradients.append(remaining_counts(current.counts, gradients))
        rows, numbers = [sizes[k : k + chunks + 1] for k in ((chunks + 1) * ranks, (chunks + 1) * (ranks + 1))]
        ends = [number + (end > 0) for end, number in zip(rows, numbers, strict=True)]  # the first sum has number 0
        which = self._sums.index_select(0, self._places)
        sums, start, first = list[Sums](), 0, 0
        for of_piece, last in zip(gradients, ends, strict=True):
            places = which[start : start + sum(of_piece)]
            places = places - first if first else places
            sums.append((self._ids[first:last], places.clamp(max=last - first) if self._pads else places))
            start, first = start + sum(of_piece), last
        late_rows, early = following.split_pieces(self._ahead[: sum(counts)], [late, remaining_counts(counts, [late])])
        prior, *delayed = current.split_pieces(self._places, gradients, sums)
        prior.rest, early.rest = lambda: delayed, lambda: (late_rows,)
        return prior, early


def _chunk_bounds(ordered: Tensor, chunks: int) -> Tensor:
    """Returns the keys (chunks - 1,) at which `split_in_chunks` cuts delayed rows, which come last in `ordered`."""
    if not ordered.numel():
        return ordered.new_zeros(chunks - 1)
    begin = torch.searchsorted(ordered, ordered.new_zeros(1))
    steps = torch.arange(1, chunks, device=ordered.device)
    at = begin + torch.div((ordered.numel() - begin) * steps, chunks, rounding_mode="floor")
    return ordered.index_select(0, at.clamp(max=ordered.numel() - 1)).clamp(min=0)
