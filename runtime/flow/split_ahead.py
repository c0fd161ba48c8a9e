"""The next batch on the ids' stream: its unique rows, their exchange, how both batches are cut; sizes follow later.

Contract
    No function here makes the host wait for the device. What depends on the ids is computed in tensors of the size that
    it cannot exceed, which the host knows from the batch's shape; the sizes themselves are copied to pinned memory. The
    host reads them when it is about to need them, half a step later, and takes slices.
    Every rank learns every rank's counts, and from them whether any rank's batch holds an id outside a table: then all
    ranks forget what they have prepared, and the batch fails at its turn.

Shape legend: as in `embrace_fx/vocabulary/ops.py`; C most rows that a batch can read, by its number of
ids; R of a routing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from embrace_fx.runtime.flow.routing import Among, Routing, Split, by_rank
from embrace_fx.runtime.launch.streams import first_true

_BELOW_ALL = torch.iinfo(torch.int64).min


def unique_ids(ids: Sequence[Tensor], num_rows: int, padding_idx: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The op of that name, in tensors whose sizes follow from those of `ids`.

    Returns: (C,) the rows it reads, then zeros; how many those are, 0-d int64, -1 where an id is outside the table;
        where each of `ids` finds its row.
    """
    flat = torch.cat([i.reshape(-1) for i in ids]).to(torch.int64)
    given = flat.numel()
    bad = (flat < 0) | (flat >= num_rows)
    if padding_idx >= 0:
        # The padding row comes first, whether or not a batch holds it: as a number below all others, present once.
        flat = torch.where(flat == padding_idx, _BELOW_ALL, flat)
        flat = torch.cat([flat, flat.new_full((1,), _BELOW_ALL)])
    ordered, order = flat.sort(stable=True)
    heads = _heads(ordered)
    places = heads.cumsum(0) - 1
    where = torch.empty_like(order).scatter_(0, order, places)[:given]
    unique = torch.zeros_like(ordered).scatter_(0, places, ordered)
    if padding_idx >= 0:
        unique[:1].fill_(padding_idx)  # by index, the host would copy a number to the device and wait
    count = torch.where(bad.any(), -1, heads.sum())
    parts = where.split([i.numel() for i in ids])
    return unique.clamp_(0, num_rows - 1), count, [part.view(i.shape) for part, i in zip(parts, ids, strict=True)]


def _heads(ordered: Tensor) -> Tensor:
    """Marks the first of each run of equal values in a sorted tensor: bool."""
    heads = torch.ones_like(ordered, dtype=torch.bool)
    heads[1:] = ordered[1:] != ordered[:-1]
    return heads


@dataclass(frozen=True)
class _Selected:
    """Some rows of a routing, whose sizes are still on the device."""

    positions: Tensor
    counts: Tensor


@dataclass(frozen=True)
class _Merged:
    """Its sums, likewise."""

    ids: Tensor
    places: Tensor
    size: Tensor


@dataclass(frozen=True)
class Routed:
    """The next batch's routing of one table: ids (C of all ranks,) in rank order, then others; counts (N,)."""

    ids: Tensor
    owner: Tensor
    is_row: Tensor
    counts: Tensor


def routed(packed: Tensor, capacities: Sequence[Sequence[int]], parts: Sequence[tuple[int, int]]) -> Routed:
    """Finds the rows that all ranks read of a table, or of a stack of several.

    Args:
        packed: (N, T + M): each rank's T counts, then its ids table after table, each as long as its capacity.
        capacities: C by rank, by table.
        parts: the tables, with the row in which each begins.
    """
    starts = [list(accumulate(of_rank, initial=len(of_rank))) for of_rank in capacities]
    pieces = [(rank, table, first) for rank in range(len(capacities)) for table, first in parts]
    ids = [packed[rank, starts[rank][table] : starts[rank][table + 1]].to(torch.int64) for rank, table, _ in pieces]
    flat = torch.cat([own + first if first else own for own, (_, _, first) in zip(ids, pieces, strict=True)])
    piece, number = by_rank([capacities[rank][table] for rank, table, _ in pieces], flat)
    of_pieces = torch.stack([packed[:, table] for table, _ in parts], 1).to(torch.int64)
    is_row = number < of_pieces.view(-1).index_select(0, piece)
    order = first_true(is_row)
    total = is_row.sum()
    return Routed(
        flat.index_select(0, order),
        piece.index_select(0, order) // len(parts),
        torch.arange(order.numel(), device=order.device) < total,
        of_pieces.sum(1),
    )


class SplitAhead:
    """Cuts a table's rows of two batches in a row, before the host knows the sizes.

    Args:
        current: the batch whose rows have been asked for.
        following: the next one.
        among: of the table's rows; used on this stream alone.
        num_rows: of the table.
        chunks: in how many pieces delayed gradients travel.
        padding_idx: the row without gradient, or -1.
    """

    def __init__(
        self, current: Routing, following: Routed, among: Among, num_rows: int, chunks: int, padding_idx: int
    ) -> None:
        self.current = current
        self._following = following
        ranks = following.counts.numel()
        late = among(following.ids, current.ids) & following.is_row
        prior = among(current.ids, torch.where(following.is_row, following.ids, num_rows))
        owner, _ = by_rank(current.counts, current.ids)
        self._late = _select(late, following.owner, ranks)
        self._early = _select(following.is_row & ~late, following.owner, ranks)
        ordered, order = current.ids.sort(stable=True)
        masks = [prior, *_chunks(ordered, order, current.ids, ~prior, chunks)]
        self._parts = [_select(mask, owner, ranks) for mask in masks]
        self._merges = [_merge(ordered, order, mask, padding_idx) for mask in masks]

    @property
    def length(self) -> int:
        """Counts the numbers in `sizes`."""
        return self._following.counts.numel() * (2 + len(self._parts)) + len(self._merges)

    def sizes(self) -> Tensor:
        """All sizes, in the order in which `split` takes them: int64, of a length that the host knows."""
        selected = (self._late, self._early, *self._parts)
        return torch.cat([*(each.counts for each in selected), torch.stack([merge.size for merge in self._merges])])

    def tensors(self) -> list[Tensor]:
        """Lists the tensors that another stream will read."""
        found = [self._late.positions, self._early.positions, self._following.ids]
        return [
            *found,
            *(part.positions for part in self._parts),
            *(t for m in self._merges for t in (m.ids, m.places)),
        ]

    def split(self, following: Routing, sizes: Sequence[int]) -> Split:
        """The same with the sizes that the host has read by now."""
        ranks = len(following.counts)
        rows = [tuple(sizes[start : start + ranks]) for start in range(0, ranks * (2 + len(self._parts)), ranks)]
        late, early, *parts = rows
        merged = sizes[ranks * len(rows) : self.length]
        selections = [
            self.current.at(part.positions[: sum(counts)], counts, _sliced(merge, part, sum(counts), size))
            for part, counts, merge, size in zip(self._parts, parts, self._merges, merged, strict=True)
        ]
        return Split(
            following.at(self._early.positions[: sum(early)], early),
            following.at(self._late.positions[: sum(late)], late),
            selections[0],
            lambda: selections[1:],
        )


def _select(mask: Tensor, owner: Tensor, ranks: int) -> _Selected:
    counts = torch.zeros(ranks, dtype=torch.int64, device=mask.device).index_add_(0, owner, mask.to(torch.int64))
    return _Selected(first_true(mask), counts)


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


def _merge(ordered: Tensor, order: Tensor, mask: Tensor, padding_idx: int) -> _Merged:
    """Finds the sum that each masked row goes into; of equal ids all rows are masked or none is."""
    counted = mask.index_select(0, order) & (ordered != padding_idx)
    heads = _heads(ordered) & counted
    size = heads.sum()
    places = torch.where(counted, heads.cumsum(0) - 1, size)
    return _Merged(ordered.index_select(0, first_true(heads)), torch.empty_like(order).scatter_(0, order, places), size)


def _sliced(merge: _Merged, part: _Selected, rows: int, size: int) -> tuple[Tensor, Tensor]:
    return merge.ids[:size], merge.places.index_select(0, part.positions[:rows])
