"""Communication that overlaps the next step: ids of the next batch, rows, row gradients, and buckets of dense
gradients.

Contract
    On every rank the same calls in the same order. Compute is the calling thread's, the launcher's thread only sends.
    What the ranks must agree on to go on (is the batch the one looked ahead to, on all of them?) rides along in the
    announcement at the head of each step.
    Every program has a flow. One without launches leaves nothing to the next step, as on a single process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import chain
from operator import or_
from typing import Any

import torch
from torch import Tensor, fx

from embrace_fx.cost import links as cost
from embrace_fx.runtime.flow.bucket_updates import Bucket, Buckets
from embrace_fx.runtime.flow.next_batch import ANNOUNCEMENT, IdsProgram, NextBatch
from embrace_fx.runtime.flow.row_exchange import RowExchange
from embrace_fx.runtime.flow.row_gradient import RowGradient
from embrace_fx.runtime.launch.launch_queue import LaunchQueue, Ticket
from embrace_fx.runtime.launch.launcher import Launcher
from embrace_fx.runtime.launch.recorder import Clock, Recorder
from embrace_fx.runtime.ranks.backward_barrier import BackwardBarrier
from embrace_fx.runtime.ranks.bad_batches import unreadable_batch
from embrace_fx.runtime.ranks.step_handshake import StepHandshake
from embrace_fx.runtime.tables.table import Member
from embrace_fx.vocabulary.graph import TrainingGraph, Values
from embrace_fx.vocabulary.modes import outside_of_modes
from embrace_fx.vocabulary.operation_id import (
    BETWEEN,
    EARLY,
    END,
    IDS,
    OWN_CODE,
    START,
    WHOLE_BACKWARD,
    WHOLE_FORWARD,
    OperationId,
    compute_id,
)
from embrace_fx.vocabulary.step_variant import Arrival, BackwardVariant, ForwardVariant

_OTHER_BATCH, _OVERTOOK, _SHARES_DEVICE = 1, 2, 4
"""Bits that a rank announces: it had not prepared its batch as the next one, it has launched out of the planned order
since the last backward, another model launches on its device."""

RowCounts = list[tuple[int, ...]]
"""For each rank, how many rows of each table a batch reads; -1 if this is unknown."""

Absent = Callable[[ForwardVariant], Sequence[OperationId]]
Kernels = Callable[[fx.Node], Callable[..., Any] | None]


class CommPipeline:
    """Runs the communication of a model's steps. Between two steps, it keeps the collectives in flight, the table rows
    that were already sent for the next batch (early rows), and the updates that the next forward applies.

    Args:
        exchanges: name of a table or joined table -> the exchange of its rows and gradients.
        looks_ahead: whether the next batch is known during a step, so that exchanges of rows are split in two.
        warn: called if the model is called with a batch other than the one that was prepared as its next batch.
        after_announcement: called in each step once all ranks have announced that they continue.

    Attributes:
        of_table: name of a table -> the exchange of its rows. Tables that are joined into one table share an exchange.
        awaits_ids: whether the running backward has not called `await_ids` yet.
        is_within_steps: whether every step waits for its own collectives, so that no launcher is needed.
        shares_failures: whether a rank that fails in the middle of a phase reports its failure to the other ranks.
        exchanges_at_once: whether the launch of a bucket's sparse exchange blocks until the exchange has ended.
    """

    exchanges_at_once = False

    def __init__(
        self,
        announcements: StepHandshake,
        launcher: Launcher,
        exchanges: Mapping[str, RowExchange],
        buckets: Buckets,
        *,
        looks_ahead: bool,
        warn: Callable[[], None] = lambda: None,
        after_announcement: Callable[[], None] = lambda: None,
    ) -> None:
        self.announcements, self.communicator = announcements, announcements.communicator
        self.launcher, self.recorder = launcher, launcher.recorder
        self.exchanges, self.buckets = exchanges, buckets
        self.of_table = {table.name: exchange for exchange in exchanges.values() for table in exchange.table.members}
        # Each has gradients in flight, which `.grad` refers to, or an update that an optimizer step has left to the
        # next forward, or neither.
        self._pending: tuple[RowGradient | Bucket, ...] = *(e.gradient for e in exchanges.values()), *buckets.all
        self.looks_ahead, self.after_announcement, self._warn = looks_ahead, after_announcement, warn
        self._ahead: NextBatch | None = None
        # The next batch, from the forward's announcement until its ids are submitted.
        self._coming: NextBatch | None = None
        # What is left of the last backward: "cut" if it has sent early rows of the next forward's batch, "other" if
        # there are only delayed gradients, "whole" if nothing is left.
        self._arrives: Arrival = "whole"
        self._valid = True  # whether rows that were sent early may still be used
        self._handed_out = False  # whether the caller got parameters, which it may have written
        self._shares_device = False  # whether another model launches on any rank's device
        self.awaits_ids = False
        self.is_within_steps = not launcher.order
        self.shares_failures = self.communicator.world_size > 1
        self._forward, self._backward = (WHOLE_FORWARD, WHOLE_BACKWARD) if self.is_within_steps else (START, END)

    def make_clock(self) -> Clock:
        """Returns a new clock that times compute on this pipeline's device, for recordings."""
        return Clock()

    def make_queue(self, recorder: Recorder, device: torch.device, at_once: int) -> LaunchQueue:
        """Returns a new queue of collectives on this pipeline's device, of which `at_once` may be in flight."""
        return LaunchQueue(recorder, at_once=at_once)

    # -- the forward ---------------------------------------------------------------------------------------------------

    def begin_forward(
        self, program: IdsProgram, leaves: Sequence[Any], following: NextBatch | None, absent: Absent
    ) -> tuple[Values, ForwardVariant]:
        """Begins a forward: announces the batch to all ranks. Returns the values computed from the batch's ids, by
        name, and the variant of the forward, which is the same on all ranks.

        Args:
            leaves: the flattened batch.
            following: the next batch, or None if it is not known.
            absent: function that returns the launches that a variant of the forward does not make.

        Raises:
            PeerFailure: a rank cannot continue. Raised on every rank.
        """
        expected = self._usable_next_batch()
        is_batch = expected is not None and expected.is_batch(leaves)
        found = expected is not None and is_batch and expected.program is program
        if expected is not None and found:
            values, bad = expected.values, None
            rows = expected.unique
        else:
            values, rows, bad = self._read_batch(program, leaves)
        coming = following.sizes() if following is not None and self.looks_ahead else None
        state, read_now, read_next = self._announce(rows, coming, bad, found=found)
        self.announcements.record_rows(program.tables, read_now)
        self.after_announcement()
        self._shares_device = bool(state & _SHARES_DEVICE)
        if state & _OVERTOOK:
            self.launcher.queue.enqueue_submitted()
        if expected is not None and not state & _OTHER_BATCH:
            expected.route(self.launcher.wait)
        else:
            if expected is not None and not is_batch:  # this rank has called the model with another batch
                self._warn()
            self._forget_rows()
            if program.tables:
                ids = self.communicator.gather_rows_read(rows, read_now, program.num_rows, "ids")
                program.route(values, self.communicator.wait(ids))
        self._valid, self._handed_out = True, False
        for exchange in self.exchanges.values():
            if exchange.gradient.waiting:  # gradients without an optimizer step precede this forward in the order
                with self.launcher.flushing():
                    exchange.gradient.wait()
        self.launcher.begin_forward()
        self._coming = None
        if following is not None and program.routes and min(chain.from_iterable(read_next), default=0) >= 0:
            following.announced = read_next
            for table, (ids_name, counts_name) in program.routes.items():
                following.current[table] = self.exchanges[table].routing(values[ids_name], values[counts_name])
            self._coming = following
        variant = ForwardVariant(self._arrives, self._coming is not None)
        self._arrives = "other" if variant.arrives == "cut" else "whole"
        if variant.arrives == "other":  # the rows would wait for gradients that come later in the launch order
            self.launcher.queue.enqueue_submitted()
        self.launcher.skip(absent(variant))
        self._begin_compute()
        return values, variant

    def _usable_next_batch(self) -> NextBatch | None:
        """Returns the batch that was prepared as the next one, if rows that were sent early are still valid."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and not ahead.may_be_used(self.launcher.wait):
            ahead = None  # no rank uses a prepared batch that has a bad id
        if ahead is None or not self._valid:
            return None
        for exchange in self.exchanges.values():
            if not exchange.is_usable(compare=self._handed_out):
                return None
        return ahead

    def _read_batch(self, program: IdsProgram, leaves: Sequence[Any]) -> tuple[Values, list[Tensor], str | None]:
        """Returns the values computed from the ids of a flattened batch, the unique rows of each table, and the
        description of an invalid id, if there is one.

        Raises:
            PeerFailure: this rank cannot compute the rows. The other ranks raise it too, at their announcement.
        """
        try:
            values = program.unique(leaves)
        except Exception as error:  # catch any error, because the other ranks must be informed
            self.announcements.announce_step((), unreadable_batch(error))
            raise
        unique = program.rows_of_batch(values)
        return values, unique, program.bad_id(unique)

    def _announce(
        self, rows: Sequence[Tensor], coming: Sequence[int] | None, failure: str | None, *, found: bool
    ) -> tuple[int, RowCounts, RowCounts]:
        """Announces this rank's batch to all ranks. Collective. Returns the bits that any rank has set, and how many
        rows each rank's batch reads, and its next batch.

        Args:
            rows: for each table, the unique rows that the batch reads.
            coming: for each table, how many rows the next batch reads, or None if the next batch is not known.
            failure: the reason why this rank cannot use its batch, or None.

        Raises:
            PeerFailure: a rank cannot continue. Raised on every rank.
        """
        now, queue = [each.numel() for each in rows], self.launcher.queue
        state = (not found) * _OTHER_BATCH + (not queue.was_in_order()) * _OVERTOOK
        own = [state + queue.shares_device * _SHARES_DEVICE, *now, *(coming or [-1] * len(now))]
        everyone = self.recorder.timed(ANNOUNCEMENT, self.announcements.announce_step, own, failure)
        states, end = [row[0] for row in everyone], 1 + len(now)
        return reduce(or_, states), [row[1:end] for row in everyone], [row[end:] for row in everyone]

    def _begin_compute(self) -> None:
        """Records, for time measurements, that the forward's compute begins."""
        self.recorder.mark(BETWEEN)
        self.recorder.begin_segment(self._forward)

    def look_ahead(self, program: IdsProgram, leaves: Sequence[Any]) -> NextBatch:
        """Finds the rows of each table that the next batch, given flattened, reads, before that batch's own step."""
        return NextBatch(program, leaves, program.unique(leaves))

    def kernels(self, graph: TrainingGraph, tables: Mapping[str, Member]) -> Kernels:
        """Returns a function that maps a graph node to a replacement for its op's kernel, here always None."""
        return lambda node: None

    def await_launch(self, ticket: Ticket) -> Tensor:
        """Waits for a collective that the same phase has submitted, and returns its result."""
        recorder = self.recorder
        recorder.pause_segment()
        value = self.launcher.wait(ticket)
        if recorder.segment is not None:
            recorder.mark(compute_id("rows", ticket.id.what))
            recorder.begin_segment(compute_id("forward", ticket.id.what))
        return value

    def begin_plain_forward(self) -> None:
        """Begins a forward whose step waits for all of its own communication."""
        self.launcher.begin_forward()
        self._begin_compute()

    def mark_forward(self) -> None:
        """Records, for time measurements, the end of a forward that ran eagerly."""
        self.recorder.mark(self._forward)

    def next_backward(self, program: IdsProgram, values: Values) -> BackwardVariant:
        """Returns the variant of the next backward, which is the same on all ranks, from values of its forward."""
        if not self.looks_ahead:
            return BackwardVariant()
        ahead = self._ahead if self._ahead is not None and not self._ahead.routed else None
        coming = ahead is not None
        if ahead is not None and not ahead.may_be_used(self.launcher.wait):
            ahead = self._ahead = None
        known = ahead.program.routes if ahead is not None else ()
        cut = bool(known)
        for name, exchange in self.exchanges.items():
            if cut and exchange.overlaps:
                ids = values[program.routes[name][0]] if name in program.routes else None
                cut = name in known and exchange.can_split(ids)
        return BackwardVariant(self._arrives != "whole", coming, cut)

    def open_window(self, gate: BackwardBarrier | None, absent: Sequence[OperationId]) -> None:
        """Begins a window, which is a backward and the next forward.

        Args:
            gate: the barrier that completes once all ranks have entered this backward. Nothing is launched before. None
                if launches need not wait.
            absent: the launches that this backward does not make.
        """
        self.awaits_ids = True
        self.launcher.open_window(held=gate is not None)
        self.launcher.skip(absent)
        if gate is not None:
            self.launcher.release_after(gate.future, gate.all_are_here)

    def begin_backward(self, program: IdsProgram, variant: BackwardVariant) -> None:
        """Begins a backward: applies the pending optimizer updates that no node of the backward applies."""
        self.recorder.mark(OWN_CODE)  # counts code since the forward, such as the loss, as the training loop's own
        self.recorder.begin_window()
        self._arrives = "cut" if self.looks_ahead and variant.cut else "whole"
        for bucket in self.buckets.all:
            bucket.apply()
        nodes_apply = self.looks_ahead and variant.left
        for name, exchange in self.exchanges.items():
            exchange.gradient.prior = None  # gradients are sent together unless `cut_batches` splits them
            if name not in program.routes or not nodes_apply:
                exchange.gradient.apply()
        if not self.is_within_steps:
            self.recorder.mark(EARLY)

    def end_backward(self) -> None:
        """Ends a backward. From now on, no launch waits for launches of this backward that were not submitted."""
        self.mark_end()
        self.launcher.end_backward(holds=not self._shares_device)

    def mark_end(self) -> None:
        """Records, for time measurements, that the last part of the backward's compute ends now."""
        self.recorder.mark(self._backward)

    def give_up_forward(self) -> None:
        """Resets the pipeline after a failed forward. All launches of the forward must have been submitted."""
        self._coming = self._ahead = None
        self.recorder.segment = None
        self._forget_rows()

    def give_up_backward(self) -> None:
        """Resets the pipeline after a failed backward, whose launches all ranks have submitted or dropped."""
        self._ahead = None
        self._forget_rows()
        self._arrives = "other" if self.looks_ahead else "whole"  # delayed gradients of this backward or the last one
        self.buckets.drop_submitted()
        self.drop()
        self.launcher.open_window()

    # -- the next batch, as nodes of an overlapped program call for it -------------------------------------------------

    def submit_ids(self, *_: object) -> None:
        """Submits the exchange of the next batch's ids. All ranks have announced how many ids they send."""
        ahead, self._coming = self._coming, None
        assert ahead is not None
        self._ahead = ahead
        ahead.ticket = self.launcher.submit(
            IDS,
            lambda: ahead.exchange(self.communicator, self.exchanges),
            cost.predict_id_exchange(tuple(map(sum, ahead.announced)), max(ahead.program.num_rows)).sent_bytes,
        )

    def await_ids(self, *_: object) -> None:
        """Waits for the next batch's ids. If this backward splits exchanges, also divides the next batch's rows into
        early and late ones, and this batch's gradients into those that the next batch needs and delayed ones.
        """
        self.awaits_ids = False
        ahead = self._ahead
        if ahead is not None and not ahead.route(self.launcher.wait):
            ahead = self._ahead = None
        if ahead is not None and self._arrives == "cut":
            for table, (ids, counts) in ahead.program.routes.items():
                self.exchanges[table].cut_batches(ahead.values[ids], ahead.values[counts], ahead.cuts.get(table))
        self.recorder.mark(EARLY)

    # -- between steps -------------------------------------------------------------------------------------------------

    @property
    def has_pending_tables(self) -> bool:
        """Whether any table has a pending update, or rows that were already sent for the next batch."""
        return any(exchange.sent or exchange.gradient.step is not None for exchange in self.exchanges.values())

    def apply_buckets(self) -> None:
        """Applies all pending updates of dense parameters."""
        with self._any_order():
            for bucket in self.buckets.all:
                bucket.apply()

    def apply(self) -> None:
        """Applies all pending updates of optimizer steps."""
        with self._any_order():
            for each in self._pending:
                each.apply()

    def wait(self) -> None:
        """Waits for in-flight gradients that no optimizer step has used yet, so that the caller can use them."""
        for each in self._pending:
            if each.waiting:
                with self._any_order():
                    each.wait()

    def drop(self) -> None:
        """Drops in-flight gradients that no optimizer step has used yet."""
        for each in self._pending:
            each.drop()

    @contextlib.contextmanager
    def _any_order(self) -> Iterator[None]:
        """Opens a context in which a launch that is awaited may be made before preceding ones are submitted."""
        with outside_of_modes(), self.launcher.flushing():
            yield

    def before_writes(self) -> None:
        """Prepares for writes to parameters, after which rows that were sent early may differ from the table."""
        self._handed_out = True

    def resend_rows(self) -> None:
        """Invalidates rows that were sent early, because the optimizer state that predicted them has changed."""
        self._valid = False

    def expect_no_batch(self) -> None:
        """Drops the batch that was prepared as the next one, because any batch may come next."""
        self._ahead = None

    def finish_pending(self) -> None:
        """Prepares for a call of the model that does not use the pipeline: leaves nothing pending or sent early."""
        self.apply()
        self.wait()
        self._ahead = None
        self._forget_rows()

    def close(self) -> None:
        """Ends the pipeline between two steps: applies updates, and waits for gradients and all launches."""
        self.finish_pending()
        with self.communicator.watching():
            self.launcher.close()

    def _forget_rows(self) -> None:
        """Drops all table rows in flight, such as those sent early for the next batch."""
        if self._arrives == "cut":
            self._arrives = "other"
        for exchange in self.exchanges.values():
            exchange.drop()


def within_steps(
    announcements: StepHandshake, make: Callable[..., CommPipeline] = CommPipeline, recorder: Recorder | None = None
) -> CommPipeline:
    """Returns a pipeline without overlap: each collective is launched immediately and awaited in the same step."""
    launcher = Launcher((), (), LaunchQueue(recorder or Recorder()), announcements.communicator)
    buckets = Buckets((), lambda names: [], announcements.communicator, launcher, {})
    return make(announcements, launcher, {}, buckets, looks_ahead=False)
