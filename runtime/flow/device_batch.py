"""The next batch on a device: another stream finds its rows, exchanges its ids and cuts both batches; the host waits
for none of it.

Contract
    What depends on the ids is computed in tensors of the size that it cannot exceed, which the host knows from the
    batch's shape. The sizes themselves are copied to the host, which reads them half a step later and takes slices. So
    the host announces the number of ids of a batch in place of the number of its rows.
    Every rank learns every rank's counts, and from them whether any rank's batch holds an id outside a table: then all
    ranks forget what they have prepared, and the batch fails at its turn.

Shape legend: as in `embrace_fx/vocabulary/ops.py`; C most rows that a batch can read, by its number of
ids; R of a routing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from embrace_fx.runtime.flow.next_batch import IdsProgram, NextBatch
from embrace_fx.runtime.flow.routing import Among, Routing, by_rank
from embrace_fx.runtime.flow.row_exchange import RowExchange
from embrace_fx.runtime.launch.stream_queue import StreamTicket
from embrace_fx.runtime.launch.streams import Event, Streams, first_true
from embrace_fx.runtime.launch.ticket import Ticket
from embrace_fx.runtime.ranks.communicator import Communicator, InFlight
from embrace_fx.runtime.tables.row_table import RowTable
from embrace_fx.vocabulary.graph import Values


def look_ahead(program: IdsProgram, leaves: Sequence[Any], streams: Streams) -> NextBatch:
    """Finds the rows of a batch on its device, before its turn."""
    there = streams.record("batch ready")
    with streams.on("ids", "unique rows"):
        streams.wait(there)
        streams.keep(*(leaf for leaf in leaves if isinstance(leaf, Tensor)))
        values, counts = program.unique_on_device(leaves)
        of_tables = torch.stack(counts) if counts else torch.empty(0, device="cpu")
        return DeviceBatch(program, leaves, values, of_tables, streams)


class DeviceBatch(NextBatch):
    """The next batch on a device. The ids' stream prepares it.

    Args:
        counts: (T,) its unique rows by table, of this rank.
    """

    def __init__(self, program: IdsProgram, leaves: Sequence[Any], values: Values, counts: Tensor, streams: Streams):
        super().__init__(program, leaves, values, counts)
        self._streams, self._of_tables = streams, counts
        self._copies: list[Tensor] = []  # rows by table, and how many they are, on their way to the host
        self._copied: Event = None
        self._rank = 0
        self._tables: list[Routed] = []
        self._splits: dict[str, SplitAhead] = {}
        self._sizes: Tensor | None = None  # on their way to the host
        self._for_host: list[tuple[str, RowTable, Tensor]] = []  # ids on their way to tables whose host needs them

    def copy_rows(self) -> None:
        with self._streams.on("ids", "rows of a batch to come"):
            rows = [self._streams.to_host(each) for each in self.program.rows_of_batch(self.values)]
            self._copies = [*rows, self._streams.to_host(self._of_tables)]
            self._copied = self._streams.record("rows copied")

    def rows(self) -> dict[str, Tensor]:
        """Returns the rows that were copied to the host; those of a table with an id outside of it are left out.

        The last one may be row 0, with which unique rows are padded.
        """
        self._streams.reach(self._copied)
        *rows, counts = self._copies
        found = zip(self.program.tables, rows, counts.tolist(), strict=True)
        return {table: of[: count + 1] if count < len(of) else of for table, of, count in found if count >= 0}

    def sizes(self) -> list[int]:
        """Returns the most rows that the batch can read, by table."""
        return [rows.numel() for rows in self.program.rows_of_batch(self.values)]

    def exchange(self, communicator: Communicator, exchanges: Mapping[str, RowExchange]) -> InFlight:
        """Exchanges the ids, cuts both batches, and has the sizes copied to the host; all on the ids' stream."""
        current, self._rank = self.current, communicator.rank
        launched = super().exchange(communicator, exchanges)
        packed = communicator.wait(launched)
        self._tables = [routed(packed, self.announced, [(table, 0)]) for table in range(len(self.program.tables))]
        for table in self.program.routes:
            exchange = exchanges[table]
            if table in current and exchange.splits_ahead:
                self._streams.keep(current[table].ids)
                self._splits[table] = SplitAhead(
                    current[table],
                    self._routed(packed, table),
                    exchange.among,
                    exchange.table.shape[0],
                    exchange.delayed_chunks,
                    self.program.paddings.get(table, -1),
                )
        parts = [table.counts for table in self._tables] + [split.sizes() for split in self._splits.values()]
        self._sizes = self._streams.to_host(torch.cat(parts))
        for table in self.program.routes:
            (first, *others) = exchanges[table].table.members
            if first.needs_host and not others:
                self._for_host.append((table, first, self._streams.to_host(self._routed(packed, table).ids)))
        return InFlight(packed, None, reads=launched.reads)

    def _routed(self, packed: Tensor, table: str) -> Routed:
        parts = [(self.program.tables.index(part), first) for part, first in self.program.parts[table]]
        if len(parts) == 1 and parts[0][1] == 0:
            return self._tables[parts[0][0]]
        return routed(packed, self.announced, parts)

    def _arrive(self, ticket: Ticket, wait: Callable[[Ticket], Tensor]) -> None:
        assert isinstance(ticket, StreamTicket)
        assert self._sizes is not None
        ticket.issue()
        sizes = self._streams.read(ticket.ended, self._sizes)
        ranks = self._tables[0].counts.numel()
        counts = [sizes[k * ranks : (k + 1) * ranks] for k in range(len(self._tables))]
        wait(ticket)
        self.usable = all(count >= 0 for of_table in counts for count in of_table)
        if not self.usable:
            return
        self._cut_padding([of_table[self._rank] for of_table in counts])
        unpacked = []
        for routing, of_table in zip(self._tables, counts, strict=True):
            self._streams.keep(routing.ids)
            unpacked += [routing.ids[: sum(of_table)], torch.tensor(of_table, device="cpu")]
        self.program.routing(self.values, unpacked)
        rest, rows, found = sizes[len(self._tables) * ranks :], self.program.rows_of_ranks(self.values), {}
        for table, split in self._splits.items():
            self._streams.keep(*split.tensors())
            found[table] = split.cut(split.current.of_batch(*rows[table]), rest)
            rest = rest[split.length :]
        self.cuts = found
        for table, beyond, ids in self._for_host:
            own, _ = rows[table]
            beyond.note_rows(own, ids[: own.numel()].unique())

    def _cut_padding(self, counts: Sequence[int]) -> None:
        """Cuts this rank's unique rows to their numbers. From here on the stream of compute uses what was prepared."""
        padded = self.program.rows_of_batch(self.values)
        self._streams.keep(*(value for value in self.values.values() if isinstance(value, Tensor)))
        by_identity = {id(rows): rows[:count] for rows, count in zip(padded, counts, strict=True)}
        self.values |= {name: by_identity[id(v)] for name, v in self.values.items() if id(v) in by_identity}


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
        ahead = [_piece(mask, following.owner, ranks) for mask in (late, following.is_row & ~late)]
        ordered, order = current.ids.sort(stable=True)
        self._gradients = [
            _piece(mask, owner, ranks, _sums(ordered, order, mask, padding_idx))
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


def _sums(ordered: Tensor, order: Tensor, mask: Tensor, padding_idx: int) -> tuple[Tensor, Tensor, Tensor]:
    """Finds the sum that each masked row goes into; of equal ids all rows are masked or none is."""
    counted = mask.index_select(0, order) & (ordered != padding_idx)
    heads = _heads(ordered) & counted
    size = heads.sum()
    places = torch.where(counted, heads.cumsum(0) - 1, size)
    return ordered.index_select(0, first_true(heads)), torch.empty_like(order).scatter_(0, order, places), size
