"""Communication that runs from one step into the next: ids of the batch to come, rows, row gradients, buckets.

Contract
    On every rank the same calls in the same order. Compute is the calling thread's, the launcher's thread only sends.
    What the ranks must agree on to go on (is the batch the one looked ahead to, on all of them?) rides along in the
    announcement at the head of each step.
    Every program has a flow. One without launches leaves nothing to the next step, as on a single process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx

from embrace_fx.cost import links as cost
from embrace_fx.runtime.flow.bucket_updates import Buckets
from embrace_fx.runtime.flow.next_batch import IdsProgram, NextBatch, announce_batch, read_batch
from embrace_fx.runtime.flow.owed import PendingUpdate
from embrace_fx.runtime.flow.row_exchange import RowExchange
from embrace_fx.runtime.launch.launch_queue import LaunchQueue
from embrace_fx.runtime.launch.launcher import Launcher
from embrace_fx.runtime.launch.recorder import Clock, Recorder
from embrace_fx.runtime.launch.ticket import Ticket
from embrace_fx.runtime.ranks.backward_barrier import BackwardBarrier
from embrace_fx.runtime.ranks.step_handshake import StepHandshake
from embrace_fx.runtime.tables.member import Member
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

Absent = Callable[[ForwardVariant], Sequence[OperationId]]
Kernels = Callable[[fx.Node], Callable[..., Any] | None]


class CommPipeline:
    """Everything in flight between two steps: launches, prefetched rows, and updates that the next forward applies.

    Args:
        exchanges: table or row space -> its exchange.
        buckets: the buckets of the plan.
        looks_ahead: whether rows are cut into prior and delayed ones.
        warn: called if a batch is not the one that was prepared.
        after_announcement: called in each step once every rank is known to continue.

    Attributes:
        of_table: table -> its exchange. Tables of a row space share one.
        awaits_ids: whether the running backward still has to call `await_ids`.
        is_within_steps: whether every step awaits its own launches, so that none goes through the launcher.
        shares_failures: whether a rank's failure in the middle of a phase is reported to the others, for which hosts
            must know how far they are.
        exchanges_at_once: whether sparse exchanges of buckets run to their end where they are launched.
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
        self.announcements = announcements
        self.communicator = announcements.communicator
        self.launcher = launcher
        self.recorder = launcher.recorder
        self.exchanges = exchanges
        self.of_table = {table.name: exchange for exchange in exchanges.values() for table in exchange.table.members}
        self.buckets = buckets
        self._owed: tuple[PendingUpdate, ...] = (*(each.gradient for each in exchanges.values()), *buckets.all)
        self.looks_ahead = looks_ahead
        self._warn = warn
        self.after_announcement = after_announcement
        self._ahead: NextBatch | None = None
        self._coming: NextBatch | None = None  # the next batch, from a forward's announcement to its submission
        self._has_cut = False  # whether the last backward has cut the next batch's rows
        self._left = False  # whether delayed gradients of the last backward are still to be applied
        self._valid = True  # whether prefetched rows may be used
        self._handed_out = False  # whether the caller got parameters, which it may have written
        self._shares_device = False  # whether another model launches on any rank's device
        self.awaits_ids = False
        self.is_within_steps = not launcher.order
        self.shares_failures = self.communicator.world_size > 1
        self._forward, self._backward = (WHOLE_FORWARD, WHOLE_BACKWARD) if self.is_within_steps else (START, END)

    def make_clock(self) -> Clock:
        """Makes a clock for recordings of compute on this pipeline's device."""
        return Clock()

    def make_queue(self, recorder: Recorder, device: torch.device, at_once: int) -> LaunchQueue:
        """Makes a queue for launches on this pipeline's device.

        Args:
            at_once: as for `LaunchQueue`.
        """
        return LaunchQueue(recorder, at_once=at_once)

    # -- the forward ---------------------------------------------------------------------------------------------------

    def begin_forward(
        self, program: IdsProgram, leaves: Sequence[Any], following: NextBatch | None, absent: Absent
    ) -> tuple[Values, ForwardVariant]:
        """Returns the values of the batch's unique and ids phases, and the variant of the forward, the same on all
        ranks.

        Args:
            following: the next batch, if known.
            absent: variant -> the launches that its forward leaves out, as `Launcher.missing_from` lists them.

        Raises:
            PeerFailure: a rank cannot continue; raised on every rank.
        """
        expected = self._usable_next_batch()
        is_batch = expected is not None and expected.is_batch(leaves)
        found = expected is not None and is_batch and expected.program is program
        if expected is not None and found:
            values, bad = expected.values, None
        else:
            values, bad = read_batch(self.announcements, program, leaves)
        rows = program.rows_of_batch(values)
        coming = following.sizes() if following is not None and self.looks_ahead else None
        everyone = announce_batch(self.announcements, self.launcher, rows, coming, bad, found=found)
        self.announcements.record_rows(program.tables, everyone.rows)
        self.after_announcement()
        self._shares_device = everyone.shares_device
        if everyone.overtook:
            self.launcher.queue.enqueue_submitted()
        if expected is not None and everyone.found:
            expected.route(self.launcher.wait)
        else:
            if expected is not None and not is_batch:  # this rank has called the model with another batch
                self._warn()
            self._forget_rows()
            if program.tables:
                ids = self.communicator.gather_rows_read(rows, everyone.rows, program.num_rows, "ids")
                program.route(values, self.communicator.wait(ids))
        self._valid, self._handed_out = True, False
        self._wait_for_unstepped()
        self.launcher.begin_forward()
        self._coming = None
        if following is not None and program.routes and min(chain.from_iterable(everyone.coming), default=0) >= 0:
            following.announced = everyone.coming
            of_ranks = program.rows_of_ranks(values)
            following.current = {table: self.exchanges[table].routing(*found) for table, found in of_ranks.items()}
            self._coming = following
        variant = ForwardVariant(self._arrival(), self._coming is not None)
        if variant.arrives == "other":  # the rows would wait for gradients that come later in the order
            self.launcher.queue.enqueue_submitted()
        self.launcher.skip(absent(variant))
        self._begin_compute()
        return values, variant

    def _usable_next_batch(self) -> NextBatch | None:
        """Returns the prepared next batch, if the rows already sent for it may still be used."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None and not ahead.may_be_used(self.launcher.wait):
            ahead = None  # no rank uses a prepared batch that has a bad id
        exchanges = self.exchanges.values()
        if not self._valid or not all(exchange.usable for exchange in exchanges):
            return None
        if ahead is not None and self._handed_out:
            return ahead if all(exchange.still_equal() for exchange in exchanges) else None
        return ahead

    def _arrival(self) -> Arrival:
        """Returns how the rows of this batch arrive: "cut", "whole" or "other", as in `ForwardVariant`."""
        cut, self._has_cut = self._has_cut, False
        if cut:
            return "cut"
        left, self._left = self._left, False
        return "other" if left else "whole"

    def _begin_compute(self) -> None:
        """Records, for the measured times, that the forward's compute begins."""
        self.recorder.mark(BETWEEN)
        self.recorder.begin_segment(self._forward)

    def _wait_for_unstepped(self) -> None:
        """Waits for gradients that no step has applied, because they come before this forward's launches in the
        order.
        """
        waiting = [each.gradient for each in self.exchanges.values() if each.gradient.waiting]
        if waiting:
            with self.launcher.flushing():
                for gradient in waiting:
                    gradient.wait()

    def look_ahead(self, program: IdsProgram, leaves: Sequence[Any]) -> NextBatch:
        """Finds the rows of a batch before its turn."""
        return NextBatch(program, leaves, program.unique(leaves))

    def kernels(self, graph: TrainingGraph, tables: Mapping[str, Member]) -> Kernels:
        """Returns the function that finds what a node of a graph runs in place of its op's kernel, if anything."""
        return lambda node: None

    def await_launch(self, ticket: Ticket) -> Tensor:
        """Waits for a launch that the same phase has submitted, and returns its value."""
        recorder = self.recorder
        recorder.pause_segment()
        value = self.launcher.wait(ticket)
        if recorder.segment is not None:
            recorder.mark(compute_id("rows", ticket.id.what))
            recorder.begin_segment(compute_id("forward", ticket.id.what))
        return value

    def begin_plain_forward(self) -> None:
        """Begins a forward whose step awaits all of its own communication."""
        self.launcher.begin_forward()
        self._begin_compute()

    def mark_forward(self) -> None:
        """Records a forward that ran outside of a program, as on the eager route."""
        self.recorder.mark(self._forward)

    def end_forward(self) -> None:
        """Records that a forward has ended."""
        self.recorder.end_forward()

    def next_backward(self, program: IdsProgram, values: Values) -> BackwardVariant:
        """Chooses the variant of the next backward, the same on all ranks.

        Args:
            values: the values of the backward's batch.
        """
        if not self.looks_ahead:
            return BackwardVariant()
        ahead = self._ahead if self._ahead is not None and not self._ahead.routed else None
        coming = ahead is not None
        if ahead is not None and not ahead.may_be_used(self.launcher.wait):
            ahead = self._ahead = None
        read = {table: ids for table, (ids, _) in program.rows_of_ranks(values).items()}
        known = ahead.program.routes if ahead is not None else ()
        cut = bool(known) and all(
            name in known and exchange.can_split(read.get(name))
            for name, exchange in self.exchanges.items()
            if exchange.overlaps
        )
        return BackwardVariant(self._left, coming, cut)

    def open_window(self, gate: BackwardBarrier | None, absent: Sequence[OperationId]) -> None:
        """Opens the launch window at the head of a backward.

        Args:
            gate: finds out whether every rank is in this backward. Nothing is launched before.
            absent: the launches that the backward leaves out, as `Launcher.missing_from` lists them.
        """
        self.awaits_ids = True
        self.launcher.open_window(held=gate is not None)
        self.launcher.skip(absent)
        if gate is not None:
            self.launcher.release_after(gate.future, gate.all_are_here)

    def begin_backward(self, program: IdsProgram, variant: BackwardVariant) -> None:
        """Applies the pending updates that no node of the program applies."""
        self.recorder.mark(OWN_CODE)  # counts the code since the forward, such as losses, as the loop's own
        self.recorder.begin_window()
        self._has_cut = self._left = self.looks_ahead and variant.cut
        for bucket in self.buckets.all:
            bucket.apply()
        nodes_apply = self.looks_ahead and variant.left
        for name, exchange in self.exchanges.items():
            exchange.gradient.begin_backward()
            if name not in program.routes or not nodes_apply:
                exchange.gradient.apply()
        if not self.is_within_steps:
            self.recorder.mark(EARLY)

    def end_backward(self) -> None:
        """Ends a backward. From now on, other launches no longer wait for those that it has not submitted."""
        self.mark_end()
        self.launcher.end_backward(holds=not self._shares_device)

    def mark_end(self) -> None:
        """Records that the compute since the last mark belongs to the end of the backward."""
        self.recorder.mark(self._backward)

    def give_up_forward(self) -> None:
        """Forgets a failed forward, whose launches have all been submitted."""
        self._coming = self._ahead = None
        self.recorder.drop_segment()
        self._forget_rows()

    def give_up_backward(self) -> None:
        """Forgets a backward, whose launches on all ranks have been submitted or dropped."""
        self._ahead = None
        self._left = self.looks_ahead  # delayed gradients of this backward or the previous one
        self._forget_rows()
        self.buckets.drop_submitted()
        self.drop()
        self.launcher.open_window()

    # -- the next batch, as nodes of an overlapped program call for it -------------------------------------------------

    def submit_ids(self, *_: object) -> None:
        """Submits the exchange of the next batch's ids, which every rank has announced."""
        ahead, self._coming = self._coming, None
        assert ahead is not None
        self._ahead = ahead
        ahead.ticket = self.launcher.submit(
            IDS,
            lambda: ahead.exchange(self.communicator, self.exchanges),
            cost.gather_ids(tuple(map(sum, ahead.announced)), max(ahead.program.num_rows)).sent_bytes,
        )

    def await_ids(self, *_: object) -> None:
        """Waits for the next batch's routing, by which its rows and this batch's gradients are cut, if this backward
        cuts them.
        """
        self.awaits_ids = False
        ahead = self._ahead
        if ahead is not None and not ahead.route(self.launcher.wait):
            ahead = self._ahead = None
        if ahead is not None and self._has_cut:
            for table, found in ahead.program.rows_of_ranks(ahead.values).items():
                self.exchanges[table].cut_batches(*found, ahead.cuts.get(table))
        self.recorder.mark(EARLY)

    # -- between steps -------------------------------------------------------------------------------------------------

    @property
    def has_pending_tables(self) -> bool:
        """Returns whether a table has an update still to be applied, or early rows in flight."""
        return any(exchange.sent or exchange.gradient.step is not None for exchange in self.exchanges.values())

    def apply_buckets(self) -> None:
        """Applies pending updates of dense parameters, as `apply` does."""
        with self._any_order():
            for bucket in self.buckets.all:
                bucket.apply()

    def apply(self) -> None:
        """Applies every update that a step has left. Launches not submitted yet do not delay this."""
        with self._any_order():
            for each in self._owed:
                each.apply()

    def wait(self) -> None:
        """Waits for the gradients that no step has taken, for code that is about to read or change them."""
        if True in [each.waiting for each in self._owed]:
            with self._any_order():
                for each in self._owed:
                    each.wait()

    def drop(self) -> None:
        """Forgets gradients that no step has taken."""
        for each in self._owed:
            each.drop()

    @contextlib.contextmanager
    def _any_order(self) -> Iterator[None]:
        """Opens a context in which a wait does not need the launches that come earlier in the order, because it may
        happen anywhere in a step.
        """
        with outside_of_modes(), self.launcher.flushing():
            yield

    def before_writes(self) -> None:
        """Prepares for the caller to write parameters: from now on, prefetched rows are compared with the table, or
        sent again.
        """
        self._handed_out = True

    def resend_rows(self) -> None:
        """Makes prefetched rows be sent again, because the optimizer state from which they were computed changes."""
        self._valid = False

    def expect_no_batch(self) -> None:
        """Drops everything prepared for the next batch, because any batch may come."""
        self._ahead = None

    def finish_pending(self) -> None:
        """Applies updates, waits for gradients, and drops prefetched rows, before a call that does not use the
        pipeline.
        """
        self.apply()
        self.wait()
        self._ahead = None
        self._forget_rows()

    def close(self) -> None:
        """Ends the flow between two steps: applies updates, and waits for gradients and all launches."""
        self.finish_pending()
        with self.communicator.watching():
            self.launcher.close()

    def _forget_rows(self) -> None:
        """Forgets the rows that this batch's exchanges hold."""
        self._has_cut = False
        for exchange in self.exchanges.values():
            exchange.drop()


def within_steps(
    announcements: StepHandshake, make: Callable[..., CommPipeline] = CommPipeline, recorder: Recorder | None = None
) -> CommPipeline:
    """Makes the pipeline of steps that launch each collective immediately, and wait for it in the same step.

    Args:
        make: makes a pipeline for the model's device.
    """
    launcher = Launcher((), (), LaunchQueue(recorder or Recorder()), announcements.communicator)
    buckets = Buckets((), lambda names: [], announcements.communicator, launcher, {})
    return make(announcements, launcher, {}, buckets, looks_ahead=False)
