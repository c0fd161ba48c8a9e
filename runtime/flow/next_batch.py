"""The next batch: its rows are found, and the ranks exchange their ids, while the step before it runs.

Contract
    A step begins with an announcement. In it each rank tells how many rows its batch reads, and how many the next one
    will. So all ranks know the sizes of the messages by which ids travel, before these leave.
    On the CPU a batch's rows are found at once. On a device they are found in another stream (`device_batch.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from embrace_fx.runtime.flow.routing import Routing
from embrace_fx.runtime.flow.row_exchange import RowExchange
from embrace_fx.runtime.kernels import unpack_ids
from embrace_fx.runtime.launch.launcher import Launcher
from embrace_fx.runtime.launch.ticket import Ticket
from embrace_fx.runtime.ranks.announcement import Announcements, bad_id_report, unreadable
from embrace_fx.runtime.ranks.communicator import Communicator, InFlight
from embrace_fx.runtime.ranks.groups import LANE_GROUP
from embrace_fx.vocabulary.as_seen import AsSeen
from embrace_fx.vocabulary.graph import Values
from embrace_fx.vocabulary.operation_id import IDS, OperationId

ANNOUNCEMENT = OperationId("ids", "announcement", "early", lane="ids")
"""What a recording shows of the wait for the slowest rank."""

_FOUND, _OVERTOOK = 1, 2
"""Bits of the state that a rank announces, as in `Announced`."""


@dataclass(frozen=True)
class IdsProgram:
    """The part of a program that finds the rows a batch reads. It can run ahead of its batch.

    Attributes:
        unique: batch -> the values of the unique phase.
        unique_on_device: batch -> these values, each table's unique rows padded to as many as the batch has ids; and
            their numbers, by table.
        rows_of_batch: values -> what `all_gather_ids` sends, by table.
        routing: (values, what `unpack_ids` yields) -> None: adds the values of the ids phase.
        tables, num_rows: of the tables in `rows_of_batch`.
        routes: table, or stack, whose rows the forward awaits -> names of the saved ids of all ranks, and of their
            counts.
        parts: table, or stack -> the tables that it is made of, with the row in which each begins.
        paddings: table, or stack -> its row without gradient, where it has one.
        is_pure: whether it finds the same a step earlier: it draws nothing, and reads nothing that a forward writes.
        reads: indices of what `unique` reads of a batch.
    """

    unique: Callable[[Sequence[Any]], Values]
    unique_on_device: Callable[[Sequence[Any]], tuple[Values, list[Tensor]]]
    rows_of_batch: Callable[[Values], list[Tensor]]
    routing: Callable[[Values, list[Tensor]], None]
    tables: tuple[str, ...]
    num_rows: tuple[int, ...]
    routes: Mapping[str, tuple[str, str]]
    parts: Mapping[str, tuple[tuple[str, int], ...]]
    paddings: Mapping[str, int]
    is_pure: bool
    reads: tuple[int, ...]

    def route(self, values: Values, packed: Tensor) -> None:
        """Adds the values of the ids phase, from the ids of all ranks."""
        self.routing(values, unpack_ids(packed, len(self.tables), len(packed)))

    def rows_of_ranks(self, values: Values) -> dict[str, tuple[Tensor, Tensor]]:
        """Returns the ids that all ranks read of each table, or stack, and their counts by rank."""
        return {table: (values[ids], values[counts]) for table, (ids, counts) in self.routes.items()}


class NextBatch:
    """The next batch, of which all is known on the host.

    Args:
        counts: (T,) unique rows by table, where only the device knows; None: all are.

    Attributes:
        values: those of its unique phase; once it is `routed`, those of the ids phase too.
        ticket: of its exchange of ids.
        usable: whether the ids of every rank's batch are ids of its tables, as far as that is known.
        cuts: table -> prior rows of the batch before it, and early ones of its own, where that is known before the
            backward.
        announced: the most rows that it reads, by rank, by table.
        current: table -> the routing of the batch before it.
    """

    def __init__(
        self, program: IdsProgram, leaves: Sequence[Any], values: Values, counts: Tensor | None = None
    ) -> None:
        self.program = program
        self.values = values
        self.ticket: Ticket | None = None
        self.routed = False
        self.usable = True
        self.cuts: Mapping[str, tuple[Routing, Routing]] = {}
        self.announced: Sequence[Sequence[int]] = ()
        self.current: Mapping[str, Routing] = {}
        self._counts = counts
        self._read = [leaves[k] for k in program.reads]
        self._seen = AsSeen.of(self._read)  # a tensor that was written since makes another batch

    def is_batch(self, leaves: Sequence[Any]) -> bool:
        """Tells whether a flattened batch is this one, as far as its ids are computed from it."""
        read = (leaves[k] for k in self.program.reads)
        same = all(a is b or (not isinstance(a, Tensor) and a == b) for a, b in zip(read, self._read, strict=True))
        return same and not self._seen.written()

    def sizes(self) -> list[int]:
        """Counts its rows by table; -1 where it holds an id that is to fail at its turn."""
        unique = self.program.rows_of_batch(self.values)
        if bad_id_report(unique, self.program.tables, self.program.num_rows) is not None:
            return [-1] * len(unique)
        return [rows.numel() for rows in unique]

    def copy_rows(self) -> None:
        """Begins to copy its rows to the host, for `rows`: they are there."""

    def rows(self) -> dict[str, Tensor]:
        """Returns the rows (K,) that it reads, on the host, by table. Any thread may ask."""
        return dict(zip(self.program.tables, self.program.rows_of_batch(self.values), strict=True))

    def exchange(self, communicator: Communicator, exchanges: Mapping[str, RowExchange]) -> InFlight:
        """Launches the exchange of ids."""
        rows = self.program.rows_of_batch(self.values)
        sizes, group = self.announced, LANE_GROUP[IDS.lane]
        return communicator.gather_rows_read(rows, sizes, self.program.num_rows, group, self._counts)

    def route(self, wait: Callable[[Ticket], Tensor]) -> bool:
        """Waits for the exchange of ids and runs the ids phase, once; returns whether the batch is usable."""
        if not self.routed:
            assert self.ticket is not None
            self._arrive(self.ticket, wait)
            self.routed = True
        return self.usable

    def _arrive(self, ticket: Ticket, wait: Callable[[Ticket], Tensor]) -> None:
        self.program.route(self.values, wait(ticket))


@dataclass(frozen=True)
class Announced:
    """The announcements of all ranks at the head of a forward.

    Attributes:
        found: whether the batch of every rank is the one that it was prepared for.
        overtook: whether launches of any rank's last window left out of turn: the next ones must not wait for them.
        rows: unique rows by rank, by table.
        coming: those of the next batch, by rank, by table; -1 where they are not known.
    """

    found: bool
    overtook: bool
    rows: list[tuple[int, ...]]
    coming: list[tuple[int, ...]]


def announce(
    announcements: Announcements,
    launcher: Launcher,
    rows: Sequence[Tensor],
    coming: Sequence[int] | None,
    failure: str | None,
    *,
    found: bool,
) -> Announced:
    """Announces this rank's batch to all ranks, and returns the announcements of all.

    Args:
        rows: unique rows by table.
        coming: how many the next batch has; None: it is not known.
        failure: what is wrong with the batch.
        found: whether the batch is the one that was prepared.

    Raises:
        PeerFailure: a rank could not go on, on every rank.
    """
    now = [each.numel() for each in rows]
    state = found * _FOUND + (not launcher.queue.took_turns()) * _OVERTOOK
    with launcher.recorder.waiting(ANNOUNCEMENT):
        everyone = announcements.announce_step([state, *now, *(coming or [-1] * len(now))], failure)
    return Announced(
        all(row[0] & _FOUND for row in everyone),
        any(row[0] & _OVERTOOK for row in everyone),
        [row[1 : 1 + len(now)] for row in everyone],
        [row[1 + len(now) :] for row in everyone],
    )


def read_batch(announcements: Announcements, program: IdsProgram, leaves: Sequence[Any]) -> tuple[Values, str | None]:
    """Returns the values of a batch's unique phase, and what is wrong with its ids.

    Raises:
        PeerFailure: they cannot be computed; on every rank.
    """
    try:
        values = program.unique(leaves)
    except Exception as error:  # whatever it is, the other ranks must hear of it
        announcements.announce_step((), unreadable(error))
        raise
    return values, bad_id_report(program.rows_of_batch(values), program.tables, program.num_rows)
