"""Describes which rows of a table each rank reads for one batch, and splits the rows of two consecutive batches.

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
from functools import lru_cache
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
    """Describes which rows of one table each rank reads for a batch, or for a part of the batch.

    The table is sharded on a grid of ranks. The ranks in one row of the grid have the same rows of the table, and the
    ranks in one column of the grid have the same columns.

    Args:
        places: (U,) the positions of this rank's rows in its whole batch. None if the routing has all of them.

    Attributes:
        ids: (R,) the ids that all ranks read, in rank order.
        counts: for each rank, how many of the ids it reads.
        whole: the routing of the whole batch if this routing has only some of its rows, otherwise None.
        all_ids: the ids of the whole batch.
        sums: how gradients of equal ids are summed. None to compute it when the gradients arrive.
        owner: (R,) the rank that reads each row, if this is known only on the device. None if it follows from `counts`.
        rest: function that returns the routings of the batch's other rows, one for each piece in which they are sent.
        held_ids: (M,) the part of `ids` whose rows are in this rank's shard, in rank order.
        counts_by_row: for each rank, how many rows it reads from each row of the grid.
        own_positions: (U,) the positions of this rank's rows in its batch, grouped by row of the grid. None if the grid
            has one row and the routing has all rows of the batch.
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
        self.ids, self.counts, self.grid, self.rank = ids, counts, grid, rank
        self.whole, self.sums, self.owner = whole, sums, owner
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
        """Returns the routing of the rows in a mask (R,). Given all others (`but`), the host reads no size."""
        places = mask.nonzero().view(-1)
        if but is None:  # the host reads the number of each rank's rows once
            ends = torch.tensor([*accumulate(self.counts)], device=places.device)
            cuts = torch.searchsorted(places, ends).tolist()
            counts = tuple(map(sub, cuts, [0, *cuts]))
        else:
            counts = remaining_counts(self.counts, [each.counts for each in but])
        return self.split_pieces(places, [counts])[0]

    def split_pieces(
        self, places: Tensor, counts: Sequence[tuple[int, ...]], sums: Sequence[Sums] = ()
    ) -> list[Routing]:
        """Divides the rows at `places` (R',) into consecutive pieces, and returns the routing of each piece.

        Args:
            counts: for each piece, how many of its rows each rank reads.
            sums: for each piece, how gradients of equal ids are summed. Empty if this is not known.
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
    """Subtracts all of `taken` from `counts`, where each has one number of rows for each rank."""
    return tuple([count - sum(of_rank) for count, *of_rank in zip(counts, *taken, strict=True)])


def cut_batches(current: Routing, following: Routing, isin: IsIn, chunks: int) -> tuple[Routing, Routing]:
    """Splits the rows of two consecutive batches by whether both batches read them (EmbRace, ICPP 2022, section 4.2).

    Args:
        current, following: which rows each rank reads for this batch and for the next one.

    Returns:
        The routings of (this batch's prior rows, the next batch's early rows). Prior rows are those that the next batch
        reads too, so their gradients are sent first. Early rows are those that this batch does not read, so they can be
        sent before its gradients are applied. `rest` of the prior rows returns this batch's other rows, whose gradients
        are delayed, in `chunks` pieces. `rest` of the early rows returns the next batch's other rows, the late ones, in
        one piece.
    """
    is_late = isin(following.ids, current.ids)
    is_prior = isin(current.ids, following.ids)
    late = following.select(is_late)
    prior, early = current.select(is_prior), following.select(~is_late, but=[late])
    delayed = list[Routing]()

    def split_delayed() -> list[Routing]:
        """Returns the routing of each piece of the delayed rows, computed at the first call."""
        if not delayed:
            for k, mask in enumerate(split_in_chunks(current.ids, ~is_prior, chunks), 1):
                delayed.append(current.select(mask, but=[prior, *delayed] if k == chunks else None))
        return delayed

    prior.rest, early.rest = split_delayed, lambda: (late,)
    return prior, early


MOST_MARKED = 1 << 22
"""The most rows of a table on the CPU that have a mark each: marks of more rows would not stay in cache."""

IsIn = Callable[[Tensor, Tensor], Tensor]
"""Marks those of ids (R,) that are among others: bool (R,)."""


def membership(num_rows: int, device: torch.device) -> IsIn:
    """Returns a function that marks those of a table's row ids that are among others. It marks the others in a buffer
    with one entry for each row, and one for padding. For a large table on the CPU, it sorts the others instead.
    """
    is_marked = device.type != "cpu" or num_rows <= MOST_MARKED
    marks = torch.zeros((num_rows + 1 if is_marked else 0,), dtype=torch.bool, device=device)

    def isin(ids: Tensor, others: Tensor) -> Tensor:
        """Marks the `ids` that are in `others`."""
        if not is_marked:
            ordered = torch.cat([others.sort().values, others.new_full((1,), num_rows)])
            return ordered[torch.searchsorted(ordered[:-1], ids)] == ids
        marks.index_fill_(0, others, True)
        found = marks.index_select(0, ids)
        marks.index_fill_(0, others, False)
        return found

    return isin


def split_in_chunks(ids: Tensor, mask: Tensor, chunks: int) -> list[Tensor]:
    """Divides the ids (R,) that a mask (R,) selects into `chunks` parts of about equal size. Returns a mask for each.

    Equal ids are in the same part, because a row whose gradients arrived in two parts would be updated twice.
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
    """Returns each row's rank, and its index among its rank's `sizes` rows: (R,) each. Do not write to them."""
    owner = [torch.full((size,), rank, device=device) for rank, size in enumerate(sizes)]
    return torch.cat(owner), torch.cat([torch.arange(size, device=device) for size in sizes])


@lru_cache(maxsize=64)
def _delayed_bounds(num_rows: int, device: torch.device) -> Tensor:
    """Returns the range of the sort keys of delayed rows, [0, num_rows]. The tensor is cached; do not write to it."""
    return torch.arange(0, 2 * num_rows, num_rows, device=device)


# -- before the host knows the sizes -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class PaddedRouting:
    """Describes which rows of one table all ranks read for the next batch, padded to a fixed size on a device.

    Attributes:
        ids: the ids, rank after rank. Padding entries come last, and have the table's number of rows as id.
        owner: for each entry, the rank that reads the row.
        counts: (N,) how many rows each rank reads.
    """

    ids: Tensor
    owner: Tensor
    counts: Tensor


def route_padded(packed: Tensor, capacities: Sequence[Sequence[int]], table: int, num_rows: int) -> PaddedRouting:
    """Extracts the ids of one table from the gathered ids of all ranks and tables.

    Args:
        packed: (N, T + M), one row for each of N ranks. It contains the rank's number of ids in each of T tables,
            followed by the ids of each table, padded to the table's capacity.
        capacities: for each rank, the number of ids to which each table is padded.
        table, num_rows: the index of the table, and the number of its rows.
    """
    starts = [len(of_rank) + sum(of_rank[:table]) for of_rank in capacities]
    of_table = tuple([of_rank[table] for of_rank in capacities])
    spans = zip(packed.unbind(0), starts, of_table, strict=True)
    flat = torch.cat([of_rank[start : start + length] for of_rank, start, length in spans]).to(torch.int64)
    owner, number = _by_rank(of_table, flat.device)
    counts = packed[:, table].to(torch.int64)
    is_row, order = (number < counts.index_select(0, owner)).sort(stable=True, descending=True)
    ids = torch.where(is_row, flat.index_select(0, order), num_rows)
    return PaddedRouting(ids, owner.index_select(0, order), counts)


class SplitAhead:
    """Splits a table's rows of two consecutive batches on a device, before the host knows how many rows each part has.

    Positions are sorted by part. Once the host has read the sizes of the parts, it can take each part as a slice. A
    second sort by part and id puts rows whose gradients are summed next to each other.

    Args:
        current, following: which rows each rank reads for this batch and for the next one.
        isin: the result of `membership`, used only on this stream.
        num_rows: the number of the table's rows.
        chunks: the number of pieces in which delayed gradients are sent.
        padding_rows: the rows that get no gradient.
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
        # Sort into late rows, early rows and padding.
        self._ahead = late.sort(stable=True, descending=True).indices
        key = torch.add(ids, prior, alpha=-num_rows)  # sort keys that put prior rows before all others
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
        if padding_rows:  # padding rows have no sum: they get the number after the last one
            ordered, order = torch.where(is_one_of(ids, padding_rows), num_rows, key).sort(stable=True)
        begins = torch.zeros(ids.numel() + 1, dtype=torch.bool, device=ids.device)
        torch.ne(ordered[1:], ordered[:-1], out=begins[2:])
        number = begins.cumsum(0)  # for each row, 1 + the index of the sum to which it is added
        self._sums = torch.empty_like(order).scatter_(0, order, number[1:])
        # Rows of one sum have equal ids, so any order of writes is correct.
        self._ids = torch.empty_like(ids).scatter_(0, self._sums, ids)
        ends = torch.searchsorted(ordered, bounds)
        none = torch.zeros(self._ranks, dtype=torch.int64, device=ids.device)
        counts = [none.index_add(0, of, mask.to(torch.int64)) for of, mask in counted]
        self.sizes = torch.cat([*counts, ends, number.index_select(0, ends)])
        """All sizes, in the order that `cut_batches` expects: int64, of a length that the host knows."""

    def tensors(self) -> list[Tensor]:
        """Returns the tensors that hold the result of the split. Another CUDA stream will read them."""
        return [self._following.ids, self._following.owner, self._ahead, self._places, self._sums, self._ids]

    def cut_batches(self, ids: Tensor, counts: tuple[int, ...], sizes: Sequence[int]) -> tuple[Routing, Routing]:
        """Returns the routings that the function `cut_batches` returns.

        Args:
            ids, counts: the ids that all ranks read for the next batch, and how many of them each rank reads.
            sizes: the values of the tensor `self.sizes`, copied to the host.
        """
        current, ranks, chunks = self._current, self._ranks, self._chunks
        following = Routing(ids, counts, current.grid, current.rank, owner=self._following.owner[: sum(counts)])
        late, *gradients = [tuple(sizes[k * ranks : (k + 1) * ranks]) for k in range(chunks + 1)]
        gradients.append(remaining_counts(current.counts, gradients))
        rows, numbers = [sizes[k : k + chunks + 1] for k in ((chunks + 1) * ranks, (chunks + 1) * (ranks + 1))]
        # The number of sums is one more than the last index, because indices start at 0.
        ends = [number + (end > 0) for end, number in zip(rows, numbers, strict=True)]
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
    """Returns the sort keys (chunks - 1,) that divide the delayed rows, those of keys >= 0, into equal chunks."""
    if not ordered.numel():
        return ordered.new_zeros(chunks - 1)
    begin = torch.searchsorted(ordered, ordered.new_zeros(1))
    steps = torch.arange(1, chunks, device=ordered.device)
    at = begin + torch.div((ordered.numel() - begin) * steps, chunks, rounding_mode="floor")
    return ordered.index_select(0, at.clamp(max=ordered.numel() - 1)).clamp(min=0)
