"""Prepares the next batch while the current step runs: finds its rows, and exchanges its ids between ranks.

Contract
    A step begins with an announcement. In it each rank sends how many rows its batch reads, and how many the next one
    will. So all ranks know the sizes of the messages by which ids travel, before these leave.
    On the CPU a batch's rows are found at once.
    On a device another stream finds them, exchanges the ids and cuts both batches; the host waits for none of it. What
    depends on the ids is computed in tensors of the size that it cannot exceed, which the host knows from the batch's
    shape. So the host announces the number of a batch's ids in place of that of its rows. The sizes are copied to the
    host, which reads them half a step later and takes slices.
    Every rank learns every rank's counts, and from them whether any rank's batch holds an id outside a table: then all
    ranks forget what they have prepared, and the batch fails at its turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from embrace_fx.runtime.flow.routing import PaddedRouting, Routing, SplitAhead, route_padded
from embrace_fx.runtime.flow.row_exchange import RowExchange
from embrace_fx.runtime.kernels import unpack_ids
from embrace_fx.runtime.launch.launch_queue import Ticket
from embrace_fx.runtime.launch.stream_queue import StreamTicket
from embrace_fx.runtime.launch.streams import Event, Streams
from embrace_fx.runtime.ranks.bad_batches import describe_bad_id
from embrace_fx.runtime.ranks.communicator import Communicator, InFlight
from embrace_fx.runtime.ranks.groups import LANE_GROUP
from embrace_fx.runtime.tables.table import Member
from embrace_fx.vocabulary.graph import Values
from embrace_fx.vocabulary.joined_table import JoinedTable
from embrace_fx.vocabulary.operation_id import IDS, OperationId
from embrace_fx.vocabulary.version_snapshot import VersionSnapshot

ANNOUNCEMENT = OperationId("ids", "announcement", "early", lane="ids")
"""What a recording shows of the wait for the slowest rank."""


@dataclass(frozen=True)
class IdsProgram:
    """The part of a program that finds the rows that a batch reads. It can run before the batch's own step.

    It has two phases: "unique" finds the unique rows of a batch, and "ids" processes the ids gathered from all ranks.
    Both store the values that they compute by name.

    Attributes:
        unique: runs the unique phase on a flattened batch. Returns its values.
        unique_on_device: as `unique`, but pads each table's unique rows to the number of the table's ids. Returns also
            the number of unique rows of each table.
        rows_of_batch: takes the values of the unique phase. Returns the unique rows of each table.
        routing: function of (values of the unique phase, result of `unpack_ids`) that runs the ids phase. Adds the
            values of the ids phase to its first argument.
        tables, num_rows: the names and the numbers of rows of the tables.
        spaces: name of a joined table -> its description.
        routes: name of a table -> names of two values: the ids that all ranks read, and how many of them each rank
            reads.
        paddings: name of a table -> its rows that get no gradient.
        is_pure: whether the result is the same if the program runs a step earlier, because it draws no random numbers
            and reads nothing that a forward writes.
        reads: indices of the batch's tensors that `unique` reads.
    """

    unique: Callable[[Sequence[Any]], Values]
    unique_on_device: Callable[[Sequence[Any]], tuple[Values, list[Tensor]]]
    rows_of_batch: Callable[[Values], list[Tensor]]
    routing: Callable[[Values, list[Tensor]], None]
    tables: tuple[str, ...]
    spaces: Mapping[str, JoinedTable]
    num_rows: tuple[int, ...]
    routes: Mapping[str, tuple[str, str]]
    paddings: Mapping[str, tuple[int, ...]]
    is_pure: bool
    reads: tuple[int, ...]

    def route(self, values: Values, packed: Tensor) -> None:
        """Processes the gathered ids of all ranks (`packed`), and adds the values computed from them to `values`."""
        self.routing(values, unpack_ids(packed, len(self.tables), len(packed)))

    def bad_id(self, unique: Sequence[Tensor]) -> str | None:
        """Describes an id among a batch's `unique` rows that is outside of its table, or returns None."""
        return describe_bad_id(unique, self.tables, self.num_rows, self.spaces)


class NextBatch:
    """The batch of the model's next call, with the unique rows that it reads and the exchange of its ids.

    Args:
        leaves: the flattened batch.
        counts: (T,) on the device, the number of unique rows of each table. None if the rows are not padded.

    Attributes:
        values: the values computed from the batch's ids, by name. `route` adds the values computed from the ids of all
            ranks.
        unique: for each table, the rows that the batch reads. On a device, they are padded until `route` is called.
        ticket: the submitted exchange of the ids, to wait for.
        routed: whether `route` has been called.
        usable: False if an id of any rank is known to be invalid.
        cuts: table -> the result of the function `cut_batches`. Empty until it is known.
        announced: for each rank, the maximum number of rows that it reads of each table.
        current: table -> which rows each rank reads for the previous batch.
    """

    def __init__(
        self, program: IdsProgram, leaves: Sequence[Any], values: Values, counts: Tensor | None = None
    ) -> None:
        self.program, self.values = program, values
        self.unique = program.rows_of_batch(values)
        self.ticket: Ticket | None = None
        self.routed, self.usable = False, True
        self.cuts: dict[str, tuple[Routing, Routing]] = {}
        self.announced: Sequence[Sequence[int]] = ()
        self.current: dict[str, Routing] = {}
        self._counts = counts
        self._read = [leaves[k] for k in program.reads]
        # A batch counts as a different one if any of its tensors was written after this point.
        self._seen = VersionSnapshot.of_tensors_in(self._read)

    def is_batch(self, leaves: Sequence[Any]) -> bool:
        """Returns whether a flattened batch has this batch's ids, in the same tensors, not written since."""
        for k, own in zip(self.program.reads, self._read, strict=True):  # inlined, because it runs in every step
            if (leaf := leaves[k]) is not own and (isinstance(leaf, Tensor) or leaf != own):
                return False
        return not self._seen.written()

    def sizes(self) -> list[int]:
        """Returns how many unique rows the batch reads of each table, or -1 for every table if any id is invalid."""
        if self.program.bad_id(self.unique) is not None:
            return [-1] * len(self.unique)
        return [*map(Tensor.numel, self.unique)]

    def copy_rows(self) -> None:
        """Does nothing, because the ids of the batch's rows are on the host already."""

    def rows(self) -> dict[str, Tensor]:
        """Returns the ids (K,) of the rows that the batch reads, on the host, by table. Any thread may call this."""
        return dict(zip(self.program.tables, self.unique, strict=True))

    def exchange(self, communicator: Communicator, exchanges: Mapping[str, RowExchange]) -> InFlight:
        """Starts exchanging the batch's ids with all ranks."""
        group = LANE_GROUP[IDS.lane]
        return communicator.gather_rows_read(self.unique, self.announced, self.program.num_rows, group, self._counts)

    def may_be_used(self, wait: Callable[[Ticket], Tensor]) -> bool:
        """Returns whether all ranks' ids are valid. Always True here, because ranks announce invalid ids."""
        return True

    def route(self, wait: Callable[[Ticket], Tensor]) -> bool:
        """Waits for the ids of all ranks, by the function `wait`, and computes which rows each rank reads. Only the
        first call does this. Returns whether all ids are valid.
        """
        if not self.routed:
            assert self.ticket is not None
            self._receive_ids(self.ticket, wait)
            self.routed = True
        return self.usable

    def _receive_ids(self, ticket: Ticket, wait: Callable[[Ticket], Tensor]) -> None:
        """Waits for the ids of all ranks, and computes which rows each rank reads."""
        self.program.route(self.values, wait(ticket))


class DeviceBatch(NextBatch):
    """The next batch of a model on a device, prepared on the CUDA stream for ids."""

    def __init__(self, program: IdsProgram, leaves: Sequence[Any], values: Values, counts: Tensor, streams: Streams):
        super().__init__(program, leaves, values, counts)
        self._streams, self._of_tables = streams, counts
        self._copies: list[Tensor] = []  # each table's unique rows, then their counts, being copied to the host
        self._copied: Event = None
        self._rank = 0
        self._routed: dict[str, PaddedRouting] = {}  # table -> which rows all ranks read, padded
        self._splits: dict[str, SplitAhead] = {}
        self._sizes: Tensor | None = None  # the numbers of rows, being copied to the host
        # Tables that need their ids of this batch on the host, with the ids.
        self._for_host: dict[str, tuple[Member, Tensor]] = {}

    def copy_rows(self) -> None:
        """Starts copying to the host, for each table, the ids of its unique rows and how many there are."""
        with self._streams.on("ids", "rows of a batch to come"):
            rows = [self._streams.to_host(each) for each in self.unique]
            self._copies = [*rows, self._streams.to_host(self._of_tables)]
            self._copied = self._streams.record("rows copied")

    def rows(self) -> dict[str, Tensor]:
        """Waits for the copies that `copy_rows` has started. Leaves out tables with an invalid id. The ids of a table
        may end with an additional 0 from the padding.
        """
        self._streams.wait_on_host(self._copied)
        *rows, counts = self._copies
        found = zip(self.program.tables, rows, counts.tolist(), strict=True)
        return {table: of[: count + 1] if count < len(of) else of for table, of, count in found if count >= 0}

    def sizes(self) -> list[int]:
        """Returns the maximum number of rows that the batch can read of each table."""
        return [*map(Tensor.numel, self.unique)]

    def may_be_used(self, wait: Callable[[Ticket], Tensor]) -> bool:
        """Returns whether all ranks' ids are valid, which the host learns from the exchanged ids."""
        return self.route(wait)

    def exchange(self, communicator: Communicator, exchanges: Mapping[str, RowExchange]) -> InFlight:
        """Starts exchanging the batch's ids, splitting the rows of the previous batch and this one, and copying the
        sizes of the parts to the host. All of this runs on the CUDA stream for ids.
        """
        current, self._rank = self.current, communicator.rank
        launched = super().exchange(communicator, exchanges)
        packed = communicator.wait(launched)
        for k, (table, size) in enumerate(zip(self.program.tables, self.program.num_rows, strict=True)):
            self._routed[table] = route_padded(packed, self.announced, k, size)
        for table in self.program.routes:
            exchange = exchanges[table]
            if table in current and current[table].grid.rows == 1:
                self._streams.keep(current[table].ids)
                self._splits[table] = SplitAhead(
                    current[table],
                    self._routed[table],
                    exchange.isin,
                    exchange.table.shape[0],
                    exchange.delayed_chunks,
                    self.program.paddings.get(table, ()),
                )
        parts = [each.counts for each in self._routed.values()] + [split.sizes for split in self._splits.values()]
        self._sizes = self._streams.to_host(torch.cat(parts))
        for table in self.program.routes:
            (first, *others) = exchanges[table].table.members
            if first.store.needs_host and not others:
                self._for_host[table] = first, self._streams.to_host(self._routed[table].ids)
        return InFlight(packed, None, reads=launched.reads)

    def _receive_ids(self, ticket: Ticket, wait: Callable[[Ticket], Tensor]) -> None:
        """Waits for the ids of all ranks, removes their padding, and computes which rows each rank reads."""
        assert isinstance(ticket, StreamTicket)
        assert self._sizes is not None
        ticket.issue()
        sizes = self._streams.read(ticket.ended, self._sizes)
        ranks, tables = len(self.announced), len(self._routed)
        counts = [sizes[k * ranks : (k + 1) * ranks] for k in range(tables)]
        wait(ticket)
        self.usable = min(sizes[: ranks * tables]) >= 0
        if not self.usable:
            return
        self._cut_padding([of_table[self._rank] for of_table in counts])
        unpacked = []
        for found, of_table in zip(self._routed.values(), counts, strict=True):
            self._streams.keep(found.ids)
            unpacked += [found.ids[: sum(of_table)], torch.tensor(of_table, device="cpu")]
        self.program.routing(self.values, unpacked)
        rest, values = sizes[tables * ranks :], self.values
        for table, split in self._splits.items():
            self._streams.keep(*split.tensors())
            ids_name, counts_name = self.program.routes[table]
            self.cuts[table] = split.cut_batches(values[ids_name], tuple(values[counts_name].tolist()), rest)
            rest = rest[split.sizes.numel() :]
        for table, (beyond, ids) in self._for_host.items():
            own = values[self.program.routes[table][0]]
            beyond.store.record_rows(own, ids[: own.numel()].unique())

    def _cut_padding(self, counts: Sequence[int]) -> None:
        """Cuts this rank's unique rows of each table to their `counts`, for use on the compute stream."""
        self._streams.keep(*[value for value in self.values.values() if isinstance(value, Tensor)])
        by_identity = {id(rows): rows[:count] for rows, count in zip(self.unique, counts, strict=True)}
        self.unique = [by_identity[id(rows)] for rows in self.unique]
        self.values |= {name: by_identity[id(v)] for name, v in self.values.items() if id(v) in by_identity}
