"""What runs from one step into the next: ids of the batch to come, rows, row gradients, buckets.

Contract
    One `Flow` per compiled model, on every rank the same calls in the same order. Compute is the calling thread's, the
    launcher's thread only sends. What the ranks must agree on to go on (is the batch the one looked ahead to, on all of
    them?) rides along in the announcement at the head of each step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from embrace_fx import cost
from embrace_fx.runtime.bucket_updates import BucketUpdates
from embrace_fx.runtime.communicator import Communicator, InFlight, bad_id_report
from embrace_fx.runtime.launcher import Launcher, Ticket
from embrace_fx.runtime.recorder import Recorder
from embrace_fx.runtime.row_exchange import RowExchange
from embrace_fx.schedule import BETWEEN, EARLY, END, START

Values = dict[str, Any]


@dataclass(frozen=True)
class TableRoute:
    """Where a program keeps what a table's exchange needs: names among the values that its phases save."""

    table: str
    ids: str
    counts: str
    dtype: torch.dtype


@dataclass(frozen=True)
class IdsProgram:
    """The ids' part of a program, as far as it can run ahead of its batch.

    Attributes:
        unique: batch -> the values of the unique phase.
        rows_of_batch: from them, what `all_gather_ids` sends, by table.
        routing: (values, what was gathered) -> the values of the ids phase, added to them.
        tables, num_rows: of the tables in `rows_of_batch`.
        routes: of the sharded tables that the forward awaits.
    """

    unique: Callable[[Sequence[Any]], Values]
    rows_of_batch: Callable[[Values], list[Tensor]]
    routing: Callable[[Values, InFlight], None]
    tables: tuple[str, ...]
    num_rows: tuple[int, ...]
    routes: tuple[TableRoute, ...]


@dataclass
class Ahead:
    """The next batch, as far as it is known.

    Attributes:
        leaves: the flattened batch, by which it is recognised.
        versions: of its tensors: one that was written since is another batch.
        values: what the unique phase made of it, and the ids phase once it is `routed`.
        ticket: of its exchange of ids.
    """

    program: IdsProgram
    leaves: tuple[Any, ...]
    versions: tuple[int, ...]
    values: Values
    ticket: Ticket | None = None
    routed: bool = False

    @staticmethod
    def of(program: IdsProgram, leaves: Sequence[Any]) -> Ahead:
        return Ahead(program, tuple(leaves), _versions(leaves), program.unique(leaves))

    def is_batch(self, leaves: Sequence[Any]) -> bool:
        same = len(leaves) == len(self.leaves) and all(
            a is b or (not isinstance(a, Tensor) and a == b) for a, b in zip(leaves, self.leaves, strict=True)
        )
        return same and _versions(leaves) == self.versions


def _versions(leaves: Sequence[Any]) -> tuple[int, ...]:
    return tuple(leaf._version for leaf in leaves if isinstance(leaf, Tensor))


class Flow:
    """Everything under way between two steps.

    Args:
        looks_ahead: whether prior and delayed rows are told apart.
        warn: told that a batch was not the one looked ahead to.
        after_announcement: called in each step when every rank is known to go on with it.

    Attributes:
        exchanges: by table.
        buckets: those of the plan.
    """

    buckets: BucketUpdates

    def __init__(
        self,
        communicator: Communicator,
        launcher: Launcher,
        recorder: Recorder,
        looks_ahead: bool,
        warn: Callable[[], None],
        after_announcement: Callable[[], None],
    ) -> None:
        self.communicator = communicator
        self.launcher = launcher
        self.recorder = recorder
        self.exchanges: dict[str, RowExchange] = {}
        self.looks_ahead = looks_ahead
        self._warn = warn
        self._after_announcement = after_announcement
        self._ahead: Ahead | None = None
        self._valid = True  # what was prefetched may be used
        self._segment = START  # of the forward's compute, for the recorder

    # -- the forward ---------------------------------------------------------------------------------------------------

    def begin_forward(self, program: IdsProgram, leaves: Sequence[Any], following: Ahead | None) -> Values:
        """The values of the batch's unique and ids phases; has its rows on the way.

        Args:
            following: the next batch, where it is known.

        Raises:
            PeerFailure: a rank could not go on, on every rank.
        """
        ahead, self._ahead = self._ahead, None
        fresh = self._valid and not any(exchange.early_rows_stale for exchange in self.exchanges.values())
        found = ahead is not None and ahead.is_batch(leaves) and ahead.program is program and fresh
        expected = ahead is not None and fresh
        if found:
            assert ahead is not None
            values = ahead.values
        else:
            values = program.unique(leaves)
        unique = program.rows_of_batch(values)
        failure = None
        if not found:
            reports = (bad_id_report(*each) for each in zip(unique, program.tables, program.num_rows, strict=True))
            failure = next((report for report in reports if report is not None), None)
        now = [rows.numel() for rows in unique]
        coming = _sizes(following, len(now)) if self.looks_ahead else [-1] * len(now)
        with self.recorder.waiting("announcement", "ids"):
            everyone = self.communicator.announce([found, *now, *coming], failure)
        self.communicator.note_rows(program.tables, [row[1 : 1 + len(now)] for row in everyone])
        self._after_announcement()
        if not all(row[0] for row in everyone):
            if expected and not found:  # on this rank
                self._warn()
            self._forget_rows()
            self._bring_forward(stepped=True)
            if program.tables:
                sizes = [row[1 : 1 + len(now)] for row in everyone]
                program.routing(values, self.communicator.gather_rows_read(unique, sizes, program.num_rows, "ids"))
        else:
            assert ahead is not None
            self._route(ahead)
        self._valid = True
        self._bring_forward(stepped=False)
        self.launcher.enter_forward()
        sizes = [row[1 + len(now) :] for row in everyone]
        if following is not None and program.routes and all(size >= 0 for row in sizes for size in row):
            rows, num_rows = following.program.rows_of_batch(following.values), following.program.num_rows
            following.ticket = self.launcher.submit(
                "ids",
                lambda: self.communicator.gather_rows_read(rows, sizes, num_rows, "ids lane"),
                cost.gather_ids(tuple(map(sum, sizes)), max(num_rows)).sent_bytes,
            )
            self._ahead = following
        else:
            self.launcher.skip("ids")
        self.recorder.mark(BETWEEN)
        for route in program.routes:
            self.exchanges[route.table].request(values[route.ids], values[route.counts], route.dtype)
            self.recorder.mark(f"update {route.table}")
        return values

    def _bring_forward(self, *, stepped: bool) -> None:
        """Waits for gradients that the order has behind what this forward is still to submit.

        Args:
            stepped: also for those that a step has taken: any row may be looked up now.
        """
        late = [exchange for exchange in self.exchanges.values() if exchange.waiting or (stepped and self.looks_ahead)]
        if late:
            with self.launcher.hurrying():
                for exchange in late:
                    exchange.materialise()
                    if stepped:
                        exchange.apply_delayed()

    def begin_plain_forward(self) -> None:
        """The head of a forward that leaves nothing to the next step and has found nothing of the last one."""
        self._after_announcement()
        self.launcher.enter_forward()
        self.recorder.mark(BETWEEN)

    def _route(self, ahead: Ahead) -> None:
        """Runs the ids phase of a batch whose exchange of ids is under way."""
        if not ahead.routed:
            assert ahead.ticket is not None
            ahead.program.routing(ahead.values, InFlight(self.wait(ahead.ticket), None))
            ahead.routed = True

    def await_rows(self, table: str) -> Tensor:
        self.recorder.mark(self._segment)
        rows = self.exchanges[table].rows()
        self.recorder.mark(f"rows {table}")
        self._segment = f"forward {table}"
        return rows

    def await_update(self, bucket: int) -> None:
        self.recorder.mark(self._segment)
        self.buckets.await_update(bucket)
        self.recorder.mark(f"update bucket {bucket}")
        self._segment = f"forward bucket {bucket}"

    def end_forward(self) -> None:
        self.recorder.mark(self._segment)
        self._segment = START

    # -- the backward --------------------------------------------------------------------------------------------------

    def begin_backward(self, program: IdsProgram, values: Values) -> None:
        """Opens the window; applies what is left of the last step, and sends the next batch's early rows.

        Args:
            values: those of the batch whose backward it is.
        """
        self.launcher.open_window()
        self.recorder.window()
        self.synchronize()
        ahead, split = self._ahead, set()
        if ahead is not None:
            self._route(ahead)
            current = {route.table: values[route.ids] for route in program.routes}
            for route in ahead.program.routes:
                exchange = self.exchanges[route.table]
                if exchange.can_split(current.get(route.table)):
                    exchange.look_ahead(ahead.values[route.ids], ahead.values[route.counts], route.dtype)
                    split.add(route.table)
        for table in self.exchanges.keys() - split:
            self.exchanges[table].do_not_split()
        self.recorder.mark(EARLY)

    def end_backward(self) -> None:
        self.recorder.mark(END)
        self.launcher.leave_backward()

    # -- between steps -------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """`synchronize` for a caller outside of a step: nothing that is still to be submitted holds it up."""
        with self.launcher.hurrying():
            self.synchronize()

    def synchronize(self) -> None:
        """Applies every update that a step has taken. Waits only for what has been submitted."""
        for exchange in self.exchanges.values():
            exchange.apply_delayed()
        self.buckets.apply()

    def materialise(self) -> None:
        """Makes the gradients on their way ordinary ones, for code that is about to read or change them."""
        with self.launcher.hurrying():
            self.buckets.materialise()
            for exchange in self.exchanges.values():
                exchange.materialise()

    def discard(self) -> None:
        """Forgets gradients that no step has taken."""
        self.buckets.discard()
        for exchange in self.exchanges.values():
            exchange.discard()

    def parameters_may_change(self) -> None:
        """Rows that were sent early may be stale from now on."""
        self.settle()
        self._valid = False

    def expect_no_batch(self) -> None:
        """The next batch may be any."""
        self._ahead = None

    def leave(self) -> None:
        """Before a call that runs without the flow: updates are applied, what was looked up ahead is forgotten."""
        self.settle()
        self._ahead = None
        self._forget_rows()

    def close(self) -> None:
        """Ends it between two steps: updates are applied, gradients ordinary ones, whatever was sent has arrived."""
        self.leave()
        self.materialise()
        with self.communicator.watching():
            self.launcher.close()

    def _forget_rows(self) -> None:
        for exchange in self.exchanges.values():
            exchange.forget_rows()

    # -- exchanges that are waited for in the phase that launches them -------------------------------------------------

    def launch_rows(self, table: str, columns: Tensor, counts: Tensor, *_: object) -> Ticket:
        """`all_to_all_rows` of a table."""
        return self.exchanges[table].send_rows(columns, counts.tolist())

    def launch_gradients(self, table: str, flat: Tensor, counts: Tensor, embedding_dim: int, *_: object) -> Ticket:
        """`all_to_all_gradients` of a table."""
        self.recorder.mark(f"backward {table}")
        return self.exchanges[table].send_gradients("prior", flat, counts.tolist(), embedding_dim)

    def launch_bucket(self, bucket: int, flat: Tensor, *_: object) -> tuple[Tensor, list[Ticket]]:
        """`all_reduce_` or `exchange_gradient_` of a bucket."""
        self.recorder.mark(f"backward bucket {bucket}")
        return flat, self.buckets.reduce(bucket, flat)

    def wait_all(self, launch: tuple[Tensor, Sequence[Ticket]] | Ticket | InFlight) -> Tensor:
        """The value of a launch: one that goes through the launcher, or one of the thread's own."""
        if isinstance(launch, InFlight):
            return self.communicator.wait(launch)
        if isinstance(launch, Ticket):
            return self.wait(launch)
        flat, tickets = launch
        for ticket in tickets:
            self.wait(ticket)
        return flat

    def wait(self, ticket: Ticket) -> Tensor:
        """A ticket's value; where that takes time, the recorder knows."""
        if ticket.done:
            return ticket.wait()
        with self.communicator.watching(), self.recorder.waiting(ticket.name, ticket.lane):
            return ticket.wait()


def _sizes(following: Ahead | None, tables: int) -> list[int]:
    """Unique rows of the next batch by table; -1 where it is unknown, or holds an id that is to fail at its turn."""
    if following is None:
        return [-1] * tables
    unique = following.program.rows_of_batch(following.values)
    named = zip(unique, following.program.tables, following.program.num_rows, strict=True)
    if any(bad_id_report(*each) is not None for each in named):
        return [-1] * tables
    return [rows.numel() for rows in unique]
