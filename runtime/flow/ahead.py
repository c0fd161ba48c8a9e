"""The next batch, as far as it is known in the step before it.

Contract
    On the CPU its rows are found at once, and their number is announced. On a device that would make the host wait:
    there they are found on the ids' stream, the number of ids is announced in place of the number of rows, and what the
    host must know, it reads half a step later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from embrace_fx.runtime.flow.routing import Routing, Split
from embrace_fx.runtime.flow.row_exchange import RowExchange
from embrace_fx.runtime.flow.split_ahead import Routed, SplitAhead, routed
from embrace_fx.runtime.kernels import unpack_ids
from embrace_fx.runtime.launch.stream_queue import StreamTicket
from embrace_fx.runtime.launch.streams import Event, Streams
from embrace_fx.runtime.launch.ticket import Ticket
from embrace_fx.runtime.ranks.announcement import bad_id_report
from embrace_fx.runtime.ranks.communicator import Communicator, InFlight
from embrace_fx.runtime.ranks.groups import LANE_GROUP
from embrace_fx.runtime.tables.row_table import RowTable
from embrace_fx.vocabulary.as_seen import AsSeen
from embrace_fx.vocabulary.graph import Values
from embrace_fx.vocabulary.operation_id import IDS


@dataclass(frozen=True)
class TableRoute:
    """Names of the saved values that the exchange of a table, or of a stack, needs.

    Attributes:
        parts: tables that it is made of, with the row in which each begins.
    """

    table: str
    ids: str
    counts: str
    padding_idx: int
    parts: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class IdsProgram:
    """The ids' part of a program, as far as it can run ahead of its batch.

    Attributes:
        unique: batch -> the values of the unique phase.
        unique_ahead: likewise, with the unique rows as long as the number of ids; and how many they are, by table.
        rows_of_batch: from them, what `all_gather_ids` sends, by table.
        routing: (values, what `unpack_ids` yields) -> the values of the ids phase, added to them.
        tables, num_rows: of the tables in `rows_of_batch`.
        routes: of the sharded tables that the forward awaits.
        reads: indices of what `unique` reads of a batch.
    """

    unique: Callable[[Sequence[Any]], Values]
    unique_ahead: Callable[[Sequence[Any]], tuple[Values, list[Tensor]]]
    rows_of_batch: Callable[[Values], list[Tensor]]
    routing: Callable[[Values, list[Tensor]], None]
    tables: tuple[str, ...]
    num_rows: tuple[int, ...]
    routes: tuple[TableRoute, ...]
    reads: tuple[int, ...]

    def route(self, values: Values, packed: Tensor) -> None:
        """Adds the values of the ids phase, from what all ranks' ids are packed into."""
        self.routing(values, unpack_ids(packed, len(self.tables), len(packed)))


class Ahead:
    """The next batch.

    Attributes:
        program: its own.
        values: what the unique phase made of it, and the ids phase once it is `routed`.
        ticket: of its exchange of ids.
        usable: whether every rank's batch holds ids of its tables alone, as far as that is known.
        splits: how its rows and those of the batch before it are cut, by table, where that has been found.
        everyone: the most rows that it reads, by rank, by table, once every rank has announced its own.
        current: the routings of the batch before, by table, likewise.
    """

    def __init__(self, program: IdsProgram, leaves: Sequence[Any], values: Values) -> None:
        self.program = program
        self.values = values
        self.ticket: Ticket | None = None
        self.routed = False
        self.usable = True
        self.splits: Mapping[str, Split] = {}
        self.everyone: Sequence[Sequence[int]] = ()
        self.current: Mapping[str, Routing] = {}
        self._read = [leaves[k] for k in program.reads]
        self._seen = AsSeen.of(self._read)  # a tensor that was written since makes another batch

    def is_batch(self, leaves: Sequence[Any]) -> bool:
        """Tells whether a flattened batch is this one, as far as its ids are computed from it."""
        read = (leaves[k] for k in self.program.reads)
        same = all(a is b or (not isinstance(a, Tensor) and a == b) for a, b in zip(read, self._read, strict=True))
        return same and not self._seen.written()

    def sizes(self) -> list[int]:
        """Unique rows by table; -1 where the batch holds an id that is to fail at its turn."""
        unique = self.program.rows_of_batch(self.values)
        if bad_id_report(unique, self.program.tables, self.program.num_rows) is not None:
            return [-1] * len(unique)
        return [rows.numel() for rows in unique]

    def rows(self) -> dict[str, Tensor]:
        """Returns the rows (K,) that it reads, on the host, by table. Perhaps of a thread."""
        return dict(zip(self.program.tables, self.program.rows_of_batch(self.values), strict=True))

    def exchange(self, communicator: Communicator, exchanges: Mapping[str, RowExchange]) -> InFlight:
        """Launches the exchange of ids."""
        rows = self.program.rows_of_batch(self.values)
        return communicator.gather_rows_read(rows, self.everyone, self.program.num_rows, LANE_GROUP[IDS.lane])

    def arrive(self, wait: Callable[[Ticket], Tensor]) -> None:
        """Adds the values of the ids phase, once its exchange has ended."""
        assert self.ticket is not None
        self.program.route(self.values, wait(self.ticket))


class AheadOfDevice(Ahead):
    """The next batch on a device, where the ids' stream prepares it."""

    def __init__(self, program: IdsProgram, leaves: Sequence[Any], values: Values, counts: Tensor, streams: Streams):
        super().__init__(program, leaves, values)
        self._streams = streams
        self._counts = counts  # (T,) of this rank
        self._copies: list[Tensor] = []  # rows by table, and how many they are, on their way to the host
        self._copied: Event = None
        self._rank = 0
        self._tables: list[Routed] = []
        self._splits: dict[str, SplitAhead] = {}
        self._sizes: Tensor | None = None  # on their way to the host
        self._for_host: list[tuple[TableRoute, RowTable, Tensor]] = []  # likewise, ids of tables whose host needs them

    @staticmethod
    def of(program: IdsProgram, leaves: Sequence[Any], streams: Streams) -> AheadOfDevice:
        """Finds the batch's unique rows on the ids' stream."""
        there = streams.record("batch ready")
        with streams.on("ids", "unique rows"):
            streams.wait(there)
            streams.keep(*(leaf for leaf in leaves if isinstance(leaf, Tensor)))
            values, counts = program.unique_ahead(leaves)
            return AheadOfDevice(
                program, leaves, values, torch.stack(counts) if counts else torch.empty(0, device="cpu"), streams
            )

    def copied(self) -> AheadOfDevice:
        """Itself, with its rows on their way to the host."""
        with self._streams.on("ids", "rows of a batch to come"):
            rows = [self._streams.to_host(each) for each in self.program.rows_of_batch(self.values)]
            self._copies = [*rows, self._streams.to_host(self._counts)]
            self._copied = self._streams.record("rows copied")
        return self

    def rows(self) -> dict[str, Tensor]:
        """Likewise; none where an id is outside its table. Behind them row 0, which unique rows are filled up with."""
        self._streams.reach(self._copied)
        *rows, counts = self._copies
        found = zip(self.program.tables, rows, counts.tolist(), strict=True)
        return {table: of[: count + 1] if count < len(of) else of for table, of, count in found if count >= 0}

    def sizes(self) -> list[int]:
        """Returns the most rows that the batch can read, by table."""
        return [rows.numel() for rows in self.program.rows_of_batch(self.values)]

    def exchange(self, communicator: Communicator, exchanges: Mapping[str, RowExchange]) -> InFlight:
        """Exchanges the ids, cuts both batches, and has the sizes copied to the host; all on the ids' stream."""
        unique, num_rows = self.program.rows_of_batch(self.values), self.program.num_rows
        sizes, current = self.everyone, self.current
        self._rank = communicator.rank
        launched = communicator.gather_rows_ahead(unique, self._counts, sizes, num_rows, LANE_GROUP[IDS.lane])
        packed = communicator.wait(launched)
        self._tables = [routed(packed, sizes, [(table, 0)]) for table in range(len(unique))]
        for route in self.program.routes:
            if route.table in current and exchanges[route.table].splits_ahead:
                self._streams.keep(current[route.table].ids)
                self._splits[route.table] = SplitAhead(
                    current[route.table],
                    self._routed(packed, sizes, route),
                    exchanges[route.table].among,
                    exchanges[route.table].table.shape[0],
                    exchanges[route.table].delayed_chunks,
                    route.padding_idx,
                )
        parts = [table.counts for table in self._tables] + [split.sizes() for split in self._splits.values()]
        self._sizes = self._streams.to_host(torch.cat(parts))
        for route in self.program.routes:
            (first, *others) = exchanges[route.table].table.members
            if first.needs_host and not others:
                self._for_host.append((route, first, self._streams.to_host(self._routed(packed, sizes, route).ids)))
        return InFlight(packed, None, reads=launched.reads)

    def _routed(self, packed: Tensor, sizes: Sequence[Sequence[int]], route: TableRoute) -> Routed:
        parts = [(self.program.tables.index(table), first) for table, first in route.parts]
        return self._tables[parts[0][0]] if len(parts) == 1 and parts[0][1] == 0 else routed(packed, sizes, parts)

    def arrive(self, wait: Callable[[Ticket], Tensor]) -> None:
        assert isinstance(self.ticket, StreamTicket)
        assert self._sizes is not None
        self.ticket.issue()
        sizes = self._streams.read(self.ticket.ended, self._sizes)
        ranks = self._tables[0].counts.numel()
        counts = [sizes[k * ranks : (k + 1) * ranks] for k in range(len(self._tables))]
        wait(self.ticket)
        self.usable = all(count >= 0 for of_table in counts for count in of_table)
        if not self.usable:
            return
        self._take_rows([of_table[self._rank] for of_table in counts])
        unpacked = []
        for table, of_table in zip(self._tables, counts, strict=True):
            self._streams.keep(table.ids)
            unpacked += [table.ids[: sum(of_table)], torch.tensor(of_table, device="cpu")]
        self.program.routing(self.values, unpacked)
        rest = sizes[len(self._tables) * ranks :]
        found = {}
        for route in self.program.routes:
            split = self._splits.get(route.table)
            if split is None:
                continue
            self._streams.keep(*split.tensors())
            following = split.current.of_batch(self.values[route.ids], self.values[route.counts])
            found[route.table] = split.split(following, rest)
            rest = rest[split.length :]
        self.splits = found
        for route, beyond, ids in self._for_host:
            own = self.values[route.ids]
            beyond.tell(own, ids[: own.numel()].unique())

    def _take_rows(self, counts: Sequence[int]) -> None:
        """Cuts this rank's unique rows to their number, and takes over what the unique phase made."""
        padded = self.program.rows_of_batch(self.values)
        self._streams.keep(*(value for value in self.values.values() if isinstance(value, Tensor)))
        by_identity = {id(rows): rows[:count] for rows, count in zip(padded, counts, strict=True)}
        self.values |= {name: by_identity[id(v)] for name, v in self.values.items() if id(v) in by_identity}
