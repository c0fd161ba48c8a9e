"""The handshake before each step: ranks announce to each other what they do next, and raise if they differ.

Contract
    Every step begins with an exchange of flags, activity and sizes. A rank that has failed reports it there, and all
    ranks raise the same error, so that no collective is left waiting.
    A rank's announcement is one value. Only `HandshakeMessage.encode` and `decode` define its form on the wire.
    The start of a backward, a failed forward and a read of a sharded table use the same exchange. Ranks that do
    different things therefore meet in it, and none waits for data that another rank never sends.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from embrace_fx.runtime.ranks.bad_batches import describe_bad_id
from embrace_fx.runtime.ranks.communicator import Communicator, InFlight
from embrace_fx.runtime.ranks.failure import ANNOUNCEMENT, DeadRank, PeerFailure, PlanDoesNotFit, StuckRank
from embrace_fx.runtime.ranks.gathering import gather_single
from embrace_fx.runtime.ranks.mismatch_watchdog import MismatchWatchdog
from embrace_fx.runtime.ranks.questions import SharedRead
from embrace_fx.runtime.ranks.step_checks import check_activities, check_programs, check_steps
from embrace_fx.vocabulary.joined_table import JoinedTable

STEP, BACKWARD, GAVE_UP, JOIN, QUESTION = range(5)
"""The kinds of an announcement: the start of a step; the start of a backward; an announced forward that failed; the
start of a call under `join`, where a rank may have no more batches; a read of a sharded table
(`embrace_fx.runtime.ranks.questions`)."""

TRAINING, ACCUMULATING, EVALUATING, JOINED = range(4)
"""The activities, which must be equal on all ranks: three kinds of calls, and `JOINED` for a rank without batches
(`join`), which makes no call."""

CHANGED_BUFFERS = -1
"""Sent in place of the hash of buffers: this rank has changed a buffer outside of a forward."""

# Masks of the three flags, and the position of the lowest bit of `kind`, in an encoded message.
_FAILED, _ASKS_TO_PLAN, _DOES_NOT_FIT, _KIND = 1, 2, 4, 3
_BITS = 8
"""The number of bits for the flags."""

_WENT_ON = "this rank called the model again without a backward for the last call"
_CAUGHT_ALONE = (
    "this rank caught the error of a failed call and continued, but other ranks stopped because of it: {}. Catch the "
    "error on every rank, around both the call and its backward, or check batches before the call"
)
_NOT_JOINED = (
    "this rank called the model outside of join(), but another rank called it inside join(). Enter join() on every rank"
)


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """The layout of the announcements that ranks exchange before each step. It must be equal on all ranks, because the
    exchange would otherwise hang.

    Attributes:
        tables: the number of tables whose ids are exchanged under the plan.
        watched: names of other tables for which ranks announce how many rows they look up.
    """

    tables: int = 0
    watched: tuple[str, ...] = ()

    @property
    def sizes(self) -> int:
        """The maximum length of `HandshakeMessage.sizes`: one state and, for each table, the number of rows that this
        batch reads and the number of rows that the next batch reads.
        """
        return 1 + 2 * self.tables


@dataclass(slots=True)
class HandshakeMessage:
    """One rank's announcement of what it does next.

    Attributes:
        kind: what the rank does next: `STEP`, `BACKWARD`, `GAVE_UP`, `JOIN` or `QUESTION`.
        activity: `TRAINING`, `ACCUMULATING`, `EVALUATING` or `JOINED`.
        failure: the reason why the rank has failed. None if it has not failed; "" if the reason is not known, because
            only the fact is sent.
        asks_to_plan: whether the rank requests a new plan.
        does_not_fit: whether the rank's batch does not fit the plan. All ranks then change the plan before the step.
        steps: the number of the rank's optimizer steps so far; 0 under `join`, where ranks may differ.
        program: a hash of the collectives that the step launches, or 0. For `BACKWARD`, the number of its call (see
            `BackwardBarrier`). For `QUESTION`, the hash of the read.
        buffers: a hash of the names of the buffers to synchronize, or `CHANGED_BUFFERS`.
        collective_ops: the number of ops on sharded tables that the rank has run and that all ranks must run. Negative
            if it is not sent.
        rows_seen: name of a table in `MessageFormat.watched` -> how many of its rows the batch reads. Negative if this
            is not known.
        sizes: further numbers of the step, such as how many ids the rank sends for each table.
    """

    kind: int = STEP
    activity: int = 0
    failure: str | None = None
    asks_to_plan: bool = False
    does_not_fit: bool = False
    steps: int = 0
    program: int = 0
    buffers: int = 0
    collective_ops: int = -1
    rows_seen: Mapping[str, int] = field(default_factory=dict)
    sizes: tuple[int, ...] = ()

    def encode(self, form: MessageFormat) -> list[int]:
        """Encodes the announcement as integers. Their number depends only on `form`, so it is equal on all ranks."""
        marks = self.kind << _KIND | _FAILED * (self.failure is not None)
        marks |= _ASKS_TO_PLAN * self.asks_to_plan | _DOES_NOT_FIT * self.does_not_fit
        head = marks | self.steps << _BITS, self.activity, self.program, self.buffers, self.collective_ops
        seen = [self.rows_seen.get(name, -1) for name in form.watched] if form.watched else ()
        return [*head, *seen, *self.sizes, *[0] * (1 + 2 * form.tables - len(self.sizes))]

    @classmethod
    def decode(cls, numbers: Sequence[int], form: MessageFormat, sizes: int) -> HandshakeMessage:
        """Decodes the integers that `encode` has returned.

        Args:
            sizes: the length of the announcement's `sizes`. The integers do not contain this length.
        """
        first, activity, program, buffers, collective_ops, *others = numbers
        steps, marks = divmod(first, 1 << _BITS)
        watched = len(form.watched)
        return cls(
            marks >> _KIND,
            activity,
            "" if marks & _FAILED else None,
            bool(marks & _ASKS_TO_PLAN),
            bool(marks & _DOES_NOT_FIT),
            steps,
            program,
            buffers,
            collective_ops,
            dict(zip(form.watched, others, strict=False)),
            tuple(others[watched : watched + sizes]),
        )


def activity_code(*, train: bool, reduces: bool) -> int:
    """Returns the code of a call's mode: `TRAINING`, `ACCUMULATING` or `EVALUATING`.

    Args:
        train: whether the call trains.
        reduces: whether the backward of the call reduces gradients.
    """
    return EVALUATING if not train else TRAINING if reduces else ACCUMULATING


_HEAD = 5
"""The leading numbers of an announcement, which are equal on all ranks in a correct step."""

Exchange = tuple[list[int], Tensor, Any]
"""A handshake in flight: this rank's numbers, all ranks' numbers (N, length), and the work to wait for first."""


@dataclass(frozen=True, slots=True)
class _PendingHandshake:
    """A handshake in progress: this rank's announcement, the exchange in flight, and a function to call once all ranks
    have announced the step.
    """

    own: HandshakeMessage
    launched: Exchange
    then: Callable[[], None]


class StepHandshake:
    """Exchanges announcements with the other ranks before each step. They say what each rank does next, and whether it
    has failed.

    Attributes:
        form: which numbers an announcement contains, under the current plan.
        of_step: this rank's announcement for the next step, without `sizes`.
        asked_to_plan: whether any rank has requested a new plan in the last handshake.
        buffers_differ: whether the last handshake has shown that ranks synchronize different buffers or that a rank has
            changed its own buffers.
        trouble: function that returns the reason why this rank cannot run the next step, if another thread has found
            one, otherwise None.
        rows_read: name of a table -> how many rows each rank reads. Only for tables for which this is announced.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.form = MessageFormat()
        self.of_step = HandshakeMessage()
        self.asked_to_plan = False
        self.buffers_differ = False
        self.trouble: Callable[[], str | None] = lambda: None
        self.rows_read: dict[str, tuple[int, ...]] = {}
        self._watchdog = MismatchWatchdog()
        self._ahead: _PendingHandshake | None = None
        self._given_up: str | None = None  # why the last call failed on this rank, as sent to the others
        communicator.set_read_announcer(self.announce_read)

    def announce_step(self, sizes: Sequence[int], failure: str | None = None) -> list[tuple[int, ...]]:
        """Announces the next step with this rank's `sizes`, and returns the sizes of every rank. Raises like
        `announce`.

        Args:
            failure: an error that this rank found after it had set `of_step`, or None.
        """
        return self._announce(self._message(sizes, failure))

    def announce_ahead(self, then: Callable[[], None]) -> None:
        """Announces the next step without waiting for the other ranks. `wait` waits for them.

        Args:
            then: called once all ranks have announced that they continue.
        """
        own = self._message((), None)
        if own.failure is not None or self.communicator.world_size == 1:
            self._announce(own)
            then()
            return
        self.wait()
        self._ahead = _PendingHandshake(own, self._start_exchange(own), then)

    def wait(self) -> None:
        """Waits for the handshake that `announce_ahead` has started, and calls its `then`. Does nothing if there is
        none. Raises like `announce`.
        """
        if (ahead := self._ahead) is not None:
            self._ahead = None
            self._finish_exchange(ahead.own, ahead.launched)
            ahead.then()

    def _message(self, sizes: Sequence[int], failure: str | None) -> HandshakeMessage:
        """Returns this rank's announcement for the next step, with `sizes`, and with an error text if this rank has
        failed.
        """
        own = self.of_step
        own.failure = own.failure or failure or self.trouble()
        own.sizes, own.collective_ops = tuple(sizes), self.communicator.collective_ops
        return own

    def announce(self, message: HandshakeMessage) -> list[tuple[int, ...]]:
        """Exchanges announcements without a step. Returns the `sizes` in every rank's announcement.

        Raises:
            PeerFailure: a rank has failed, or ranks do different things. Raised on every rank.
            PlanDoesNotFit: a rank's batch does not fit the plan. Raised on every rank.
        """
        found = self._announce(message)
        self.communicator.progress.preparations += 1
        return found

    def _announce(self, message: HandshakeMessage) -> list[tuple[int, ...]]:
        """Exchanges announcements, and returns the `sizes` in every rank's announcement. Raises like `announce`."""
        if self._ahead is not None:
            self.wait()
        if self.communicator.world_size == 1:
            self.communicator.check_open()
            if message.failure is not None:
                raise PeerFailure({0: message.failure})
            if message.does_not_fit:
                raise PlanDoesNotFit
            return [message.sizes]
        return self._finish_exchange(message, self._start_exchange(message))

    def watch(self) -> None:
        """Starts a watchdog that detects calls which only some ranks make. Does nothing if it is already running. All
        ranks must call this in the same order.
        """
        self._watchdog.watch(self.communicator, self._check_mismatch)

    def _start_exchange(self, message: HandshakeMessage) -> Exchange:
        """Counts this rank's announcement, and starts exchanging it with all ranks. Returns the exchange in flight."""
        communicator = self.communicator
        communicator.check_open()
        self._watchdog.announced += 1
        if not self._watchdog.name:
            self.watch()
        communicator.progress.begin_step()
        return self.launch(message)

    def _finish_exchange(self, message: HandshakeMessage, launched: Exchange) -> list[tuple[int, ...]]:
        """Waits for the announcements of all ranks. Returns the `sizes` in each of them, or raises like `announce`.

        The announcements are decoded only if they differ between ranks, or if a rank reports something, such as a
        failure.
        """
        rows, head = self._wait_for_numbers(launched), launched[0][:_HEAD]
        if head[0] & (_FAILED | _ASKS_TO_PLAN | _DOES_NOT_FIT) or [row[:_HEAD] for row in rows].count(head) < len(rows):
            return self._check_messages(message, self._exchange_until_aligned(message, rows))
        watched = self.form.watched  # fast path: all ranks sent equal numbers, and none reports a failure
        first, self.asked_to_plan, self._given_up = _HEAD + len(watched), False, None
        self.buffers_differ = message.buffers == CHANGED_BUFFERS
        seen = zip(*[row[_HEAD:first] for row in rows], strict=True) if watched else ()
        self.rows_read = dict(zip(watched, seen, strict=True))
        return [tuple(row[first : first + len(message.sizes)]) for row in rows]

    def _check_messages(self, message: HandshakeMessage, messages: Sequence[HandshakeMessage]) -> list[tuple[int, ...]]:
        """Compares the announcements of all ranks. Returns the `sizes` in each of them. Raises like `announce` if a
        rank has failed or ranks do different things.

        Args:
            message: this rank's announcement.
            messages: the announcements of all ranks.
        """
        self.asked_to_plan = any(each.asks_to_plan for each in messages)
        self.rows_read = {name: tuple(each.rows_seen[name] for each in messages) for name in self.form.watched}
        self._given_up = message.failure
        if any(each.failure is not None for each in messages):
            raise PeerFailure(self.communicator.reports(message.failure))
        check_activities([each.activity for each in messages])
        if any(each.does_not_fit for each in messages):
            self.communicator.progress.preparations += 1  # the step begins with the next announcement
            raise PlanDoesNotFit
        check_programs([each.program for each in messages])
        check_steps(messages, self.communicator)
        buffers = {each.buffers for each in messages}
        self.buffers_differ = len(buffers) > 1 or CHANGED_BUFFERS in buffers
        return [each.sizes for each in messages]

    def gather_activities(self, activity: int) -> list[int]:
        """Gathers the mode in which each rank calls the model next, or `JOINED` for a rank without more batches.
        Collective.

        Args:
            activity: the mode of this rank.
        """
        self.wait()
        self.communicator.check_open()
        own = HandshakeMessage(JOIN, activity)
        return [each.activity for each in self._exchange_until_aligned(own, self._wait_for_numbers(self.launch(own)))]

    def _exchange_until_aligned(
        self, message: HandshakeMessage, rows: Sequence[Sequence[int]]
    ) -> list[HandshakeMessage]:
        """Repeats the exchange until all ranks announce the same kind of step. Returns their announcements.

        Args:
            message: this rank's announcement.
            rows: for each rank, the integers that it sent in the first exchange.
        """
        everyone = self._decode_all(message, rows)
        while (kinds := {each.kind for each in everyone}) & {BACKWARD, GAVE_UP, QUESTION}:
            if QUESTION in kinds:
                raise PeerFailure(self.reports(everyone, message.failure))
            self._log_abandoned_call(self.reports(everyone, None))  # the ranks that gave up will join the next exchange
            everyone = self._decode_all(message, self._wait_for_numbers(self.launch(message)))
        if len({each.kind for each in everyone}) > 1:
            outside = [rank for rank, each in enumerate(everyone) if each.kind == STEP]
            raise PeerFailure(dict.fromkeys(outside, _NOT_JOINED))
        return everyone

    def _check_mismatch(self, store: Any, name: str) -> None:
        """Checks once whether ranks wait for each other in different calls. The thread that detects dead ranks calls
        this.

        Args:
            store: a store of torch.distributed that only this thread uses.
            name: a prefix for keys that is unique, and equal on all ranks.
        """
        self._watchdog.check(store, name, self._answer_with_failure)

    def _answer_with_failure(self, failure: str) -> PeerFailure:
        """Announces an error to ranks that wait for this rank, whose main thread is blocked in another collective.
        Another thread calls this. Returns the error that every rank then raises.

        Args:
            failure: the text of the error.
        """
        self._watchdog.announced += 1
        self.communicator.progress.begin_step()
        own = HandshakeMessage(failure=failure)
        try:
            self._exchange_until_aligned(own, self._wait_for_numbers(self.launch(own)))
        except PeerFailure as told:  # raised if another rank reads a sharded table on its own
            return told
        return PeerFailure(self.communicator.reports(failure))

    def _decode_all(self, message: HandshakeMessage, rows: Sequence[Sequence[int]]) -> list[HandshakeMessage]:
        """Decodes the announcements of all ranks from the integers that each rank has sent (`rows`)."""
        form, sizes = self.form, len(message.sizes)
        return [HandshakeMessage.decode(row, form, sizes) for row in rows]

    def _wait_for_numbers(self, launched: Exchange) -> list[list[int]]:
        """Waits for an exchange of announcements. Returns, for each rank, the integers that it has sent."""
        _, everyone, work = launched
        try:
            try:
                self._watchdog.wait_for(work, self.communicator.host_group())
            except RuntimeError as error:
                self.communicator.name_ranks(error, ANNOUNCEMENT)
                raise
        except DeadRank as error:
            if self._given_up is None:
                raise
            raise PeerFailure(
                {self.communicator.rank: _CAUGHT_ALONE.format(self._given_up.removesuffix("."))}
            ) from error
        found: list[list[int]] = everyone.tolist()
        return found

    def launch(self, message: HandshakeMessage) -> Exchange:
        """Starts exchanging this rank's announcement with those of all ranks. Returns the exchange in flight."""
        communicator, encoded = self.communicator, message.encode(self.form)
        numbers = torch.tensor(encoded, dtype=torch.int64, device="cpu")
        everyone = numbers.new_empty((communicator.world_size, numbers.numel()))
        work = gather_single(everyone.view(-1), numbers, communicator.host_group(), async_op=True)
        return encoded, everyone, work

    # -- in the middle of a call ---------------------------------------------------------------------------------------

    def give_up(self, failure: str) -> None:
        """Announces that this rank's forward has failed, with the error text `failure`, after the step was announced.
        Requires at least two ranks.
        """
        self.wait()
        self._given_up = failure
        own = HandshakeMessage(GAVE_UP)
        self.reports(self._decode_all(own, self._wait_for_numbers(self.launch(own))), failure)

    def announce_read(self, what: str, value: Tensor | None, reduce_op: Any) -> Tensor | None:
        """Announces a read of a sharded table, which all ranks must make together. Returns the values of all ranks,
        reduced to one value, or None if the announcements contain no values.

        Args:
            what, value, reduce_op: the attributes of `embrace_fx.runtime.ranks.questions.SharedRead`.

        Raises:
            PeerFailure: not all ranks make this read. Raised on every rank.
        """
        question = SharedRead(what, value, reduce_op)
        own = HandshakeMessage(QUESTION, program=question.hash, sizes=question.encode_value(self.form.sizes))
        self.wait()
        self.communicator.check_open()
        self._watchdog.announced += 1
        try:
            everyone = self._decode_all(own, self._wait_for_numbers(self.launch(own)))
        except (DeadRank, StuckRank) as error:
            raise type(error)(f"{question.error_if_alone()} ({error})") from error
        if any(each.kind != QUESTION or each.program != own.program for each in everyone):
            gave_up = any(each.kind == GAVE_UP for each in everyone)
            raise PeerFailure(self.reports(everyone, None if gave_up else question.error_if_alone()))
        return question.reduce_values([each.sizes for each in everyone])

    def reports(self, messages: Sequence[HandshakeMessage], failure: str | None) -> dict[int, str]:
        """Returns, for each rank that cannot continue, the reason. Collective if a rank has given up its forward or
        reads a sharded table.

        Args:
            messages: the announcements of all ranks.
            failure: the reason why this rank cannot continue, or None.
        """
        kinds, found = {each.kind for each in messages}, dict[int, str]()
        if QUESTION in kinds:
            self.communicator.collective_ops = 0  # all ranks count their ops on shards from zero again
        else:
            found = {rank: _WENT_ON for rank, each in enumerate(messages) if each.kind in (STEP, JOIN)}
        if kinds & {GAVE_UP, QUESTION}:
            found |= self.communicator.reports(failure)
        return found

    def _log_abandoned_call(self, reports: Mapping[int, str]) -> None:
        """Logs that all ranks have abandoned the previous call.

        Args:
            reports: the reasons by rank.
        """
        told = "; ".join(f"rank {rank}: {text.removesuffix('.')}" for rank, text in sorted(reports.items()))
        warnings.warn(f"All ranks abandoned the previous call: {told}.", RuntimeWarning, stacklevel=2)

    def record_rows(self, tables: Sequence[str], sizes: Sequence[Sequence[int]]) -> None:
        """Stores how many rows of each of `tables` the ranks read. `sizes` contains these numbers for each rank; they
        are negative if unknown.
        """
        self.rows_read.update(zip(tables, zip(*sizes, strict=True), strict=False))

    def all_gather_ids(
        self,
        unique: Sequence[Tensor],
        num_rows: Sequence[int],
        group: str,
        group_size: int,
        tables: Sequence[str],
        spaces: Mapping[str, JoinedTable],
    ) -> InFlight:
        """Implements the op `all_gather_ids`. Announces the step, with the number of ids that this rank sends, and
        starts gathering the ids of all ranks. Returns the ids in flight.

        Args:
            unique: for each of `tables`, the unique ids (U,) that this rank reads.
            num_rows: for each of `tables`, its number of rows.
            group: the communication class.
            group_size: the number of ranks; unused.
            spaces: name of a joined table (several tables stored as one) -> its description.
        """
        counts = [u.numel() for u in unique]
        everyone = self.announce_step(counts, describe_bad_id(unique, tables, num_rows, spaces))
        self.record_rows(tables, everyone)
        return self.communicator.gather_rows_read(unique, everyone, num_rows, group)
