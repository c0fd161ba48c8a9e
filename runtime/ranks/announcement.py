"""The announcement: what ranks tell each other at the head of each step.

Contract
    Every step begins with an announcement: marks, activity and sizes of every rank. A rank that cannot go on says so
    there, and all ranks raise the same error; no collective is left waiting.
    One rank's announcement is one value, and only `Announcement.encode` and `decode` know how it travels.
    The head of a backward, and the end of a forward that has failed, are told by the same exchange: whichever of them
    ranks come to, they meet, and none waits for what another one will never send.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from embrace_fx.runtime.kernels import bad_ids
from embrace_fx.runtime.ranks.checksums import diverged
from embrace_fx.runtime.ranks.communicator import Communicator, InFlight
from embrace_fx.runtime.ranks.failure import (
    ANNOUNCEMENT,
    DivergedReplicas,
    PeerFailure,
    PlanDoesNotFit,
)
from embrace_fx.runtime.ranks.gathering import gather_single
from embrace_fx.runtime.ranks.lone_calls import LoneCalls

STEP, BACKWARD, GAVE_UP, JOIN = range(4)
"""The kinds of an announcement: of a rank at the head of a step; at the head of a backward; in a forward that all ranks
have announced, and that it cannot finish; at the head of a call under `join`, where it may have run out of batches."""

TRAINING, ACCUMULATING, EVALUATING, JOINED = range(4)
"""The activities, of which all ranks must do the same: a call of the model can be one of three; a rank that has run out
of batches (`join`) makes none."""

_ACTIVITIES = ("training", "accumulating gradients (no_sync)", "evaluating (eval or no_grad)")

CHANGED_BUFFERS = -1
"""Announced of buffers: this rank has changed one besides what forwards write."""

_FAILED, _ASKS_TO_PLAN, _DOES_NOT_FIT, _KIND = 1, 2, 4, 3  # bits, and where those of the kind begin
_BITS = 8
"""What these, and the activity, take of their numbers."""

_WENT_ON = "expected a backward of this call, found that it went on to another call without one"
_NOT_JOINED = "expected every rank to call the model under join() where one does, found this one's call outside of it"


@dataclass(frozen=True, slots=True)
class Form:
    """The form in which announcements travel, the same on all ranks, or the exchange itself would hang.

    Attributes:
        tables: how many tables exchange ids, once planned.
        watched: other tables of which an announcement tells the rows read.
    """

    tables: int = 0
    watched: tuple[str, ...] = ()

    @property
    def sizes(self) -> int:
        """The most that a step tells: its state, and the rows of this batch and the next one."""
        return 1 + 2 * self.tables


@dataclass(frozen=True, slots=True)
class Announcement:
    """One rank's announcement, as its caller builds it and as the others read it.

    Attributes:
        kind: `STEP`, `BACKWARD`, `GAVE_UP` or `JOIN`.
        activity: `TRAINING`, `ACCUMULATING`, `EVALUATING` or `JOINED`.
        failure: why the rank cannot take part; of another rank "" until it has told why. None: it can.
        asks_to_plan: it would have another plan made.
        does_not_fit: its batch does not fit the plan, which all are to change before this step.
        steps: of optimizers, that it has taken; 0 where ranks may differ (`join`).
        digest: of its replicas, where they are to be compared; else 0.
        program: what the step launches, as a number that is the same where the same is launched; 0: nothing. Of a
            backward which call's it is, as of `Gate`.
        buffers: which of them this rank would share, as a number, or `CHANGED_BUFFERS`.
        rows_seen: of watched tables, how many of their rows the batch reads; below 0: unknown.
        sizes: what the step tells besides.
        checksums: what `digest` is of; asked for where digests differ.
    """

    kind: int = STEP
    activity: int = 0
    failure: str | None = None
    asks_to_plan: bool = False
    does_not_fit: bool = False
    steps: int = 0
    digest: int = 0
    program: int = 0
    buffers: int = 0
    rows_seen: Mapping[str, int] = field(default_factory=dict)
    sizes: tuple[int, ...] = ()
    checksums: Mapping[str, int] = field(default_factory=dict)

    def encode(self, form: Form) -> list[int]:
        """Returns this as numbers, as many of each rank."""
        marks = self.kind << _KIND | _FAILED * (self.failure is not None)
        marks |= _ASKS_TO_PLAN * self.asks_to_plan | _DOES_NOT_FIT * self.does_not_fit
        head = marks | self.steps << _BITS, self.activity | self.digest << _BITS, self.program, self.buffers
        seen = [self.rows_seen.get(name, -1) for name in form.watched]
        return [*head, *seen, *self.sizes, *[0] * (form.sizes - len(self.sizes))]

    @classmethod
    def decode(cls, numbers: Sequence[int], form: Form, sizes: int) -> Announcement:
        """Reads what `encode` has written.

        Args:
            sizes: how many sizes were told.
        """
        first, second, program, buffers, *others = numbers
        steps, marks = divmod(first, 1 << _BITS)
        digest, activity = divmod(second, 1 << _BITS)
        watched = len(form.watched)
        return cls(
            marks >> _KIND,
            activity,
            "" if marks & _FAILED else None,
            bool(marks & _ASKS_TO_PLAN),
            bool(marks & _DOES_NOT_FIT),
            steps,
            digest,
            program,
            buffers,
            dict(zip(form.watched, others, strict=False)),
            tuple(others[watched : watched + sizes]),
        )


def activity_of(*, train: bool, reduces: bool) -> int:
    """Returns the activity of a call.

    Args:
        reduces: whether its backward reduces gradients.
    """
    return EVALUATING if not train else TRAINING if reduces else ACCUMULATING


class Announcements:
    """The announcements of these ranks.

    Attributes:
        form: in which they travel; of the plan in use.
        of_step: what the coming step announces of this rank, but its sizes.
        made: how many there have been, on every rank.
        asked_to_plan: any rank would have another plan made, as of the last announcement.
        buffers_differ: as of the last one, ranks would share different buffers, or one has changed its own.
        rows_read: table -> rows that each rank reads, as far as announced.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.form = Form()
        self.of_step = Announcement()
        self.made = 0
        self.asked_to_plan = False
        self.buffers_differ = False
        self.trouble: Callable[[], str | None] = lambda: None
        self.rows_read: dict[str, tuple[int, ...]] = {}
        self._waiting_since_s: float | None = None
        self._lone_calls: LoneCalls | None = None

    def announce_step(self, sizes: Sequence[int], failure: str | None = None) -> list[tuple[int, ...]]:
        """Every rank's `sizes`, at the head of a step; raises as `announce` does.

        Args:
            failure: found since `of_step` was built.
        """
        own = self.of_step
        return self.announce(replace(own, sizes=tuple(sizes), failure=own.failure or failure or self.trouble()))

    def announce(self, own: Announcement) -> list[tuple[int, ...]]:
        """Every rank's `sizes`, at the head of a step.

        Raises:
            PeerFailure: any rank has a failure, or the ranks are not doing the same thing; on all ranks.
            DivergedReplicas: what ranks should hold alike they do not; on all ranks.
            PlanDoesNotFit: any rank's batch does not; on all ranks.
        """
        communicator = self.communicator
        communicator.check_open()
        if communicator.world_size == 1:
            if own.failure is not None:
                raise PeerFailure({0: own.failure})
            if own.does_not_fit:
                raise PlanDoesNotFit
            return [own.sizes]
        self.made += 1
        communicator.progress.begin_step()
        self._look_out()
        self._waiting_since_s = time.monotonic()
        try:
            everyone = self._meet(own)
        finally:
            self._waiting_since_s = None
        self.asked_to_plan = any(each.asks_to_plan for each in everyone)
        self.rows_read = {name: tuple(each.rows_seen[name] for each in everyone) for name in self.form.watched}
        if any(each.failure is not None for each in everyone):
            raise PeerFailure(communicator.reports(own.failure))
        check_activities([each.activity for each in everyone])
        if any(each.does_not_fit for each in everyone):
            raise PlanDoesNotFit
        check_programs([each.program for each in everyone])
        digests = {each.digest for each in everyone}
        if 0 not in digests and len(digests) > 1:
            raise DivergedReplicas(diverged(communicator.gather(dict(own.checksums), dict[str, int])))
        check_steps([each.steps for each in everyone])
        buffers = {each.buffers for each in everyone}
        self.buffers_differ = len(buffers) > 1 or CHANGED_BUFFERS in buffers
        return [each.sizes for each in everyone]

    def meet(self, activity: int) -> list[int]:
        """Exchanges what every rank is about to do, `JOINED` on one that has run out of batches. Collective, ahead of a
        step.
        """
        self.communicator.check_open()
        return [each.activity for each in self._meet(Announcement(JOIN, activity))]

    def _meet(self, own: Announcement) -> list[Announcement]:
        """Every rank's announcement, once all are where this one is."""
        everyone = self._exchange(own)
        while any(each.kind in (BACKWARD, GAVE_UP) for each in everyone):  # they come here next
            self._warn(self.reports(everyone, None))
            everyone = self._exchange(own)
        if len({each.kind for each in everyone}) > 1:
            outside = [rank for rank, each in enumerate(everyone) if each.kind == STEP]
            raise PeerFailure(dict.fromkeys(outside, _NOT_JOINED))
        return everyone

    def _look_out(self) -> None:
        """Starts the watch for calls that other ranks cannot come to (`embrace_fx.runtime.ranks.lone_calls`)."""
        group = self.communicator.group
        if self._lone_calls is not None or group is None:
            return
        itself = weakref.ref(self)

        def answer(failure: str) -> None:
            if (announcements := itself()) is not None:
                announcements.answer(failure)

        def look(store: Any, name: str) -> None:
            announcements = itself()
            if announcements is None:
                return
            if announcements._lone_calls is None:
                rank = announcements.communicator.rank
                announcements._lone_calls = LoneCalls(store, f"{name}/waiting", rank, group, answer)
            announcements._lone_calls.look(announcements.made, announcements._waiting_since_s)

        self.communicator.look_each_time(look)

    def answer(self, failure: str) -> None:
        """Makes an announcement that others have begun, from another thread, while this rank's own stands elsewhere."""
        self.made += 1
        self.communicator.progress.begin_step()
        self._meet(Announcement(failure=failure))
        self.communicator.reports(failure)

    def _exchange(self, own: Announcement) -> list[Announcement]:
        everyone, work = self.launch(own)
        with self.communicator.watching(ANNOUNCEMENT):
            work.wait()
        form, sizes = self.form, len(own.sizes)
        return [Announcement.decode(row, form, sizes) for row in everyone.tolist()]

    def launch(self, own: Announcement) -> tuple[Tensor, Any]:
        """Starts the exchange: (announcements of all ranks (N, length), the work to wait for before reading them)."""
        communicator = self.communicator
        numbers = torch.tensor(own.encode(self.form), dtype=torch.int64, device="cpu")
        everyone = numbers.new_empty((communicator.world_size, numbers.numel()))
        work = gather_single(everyone.view(-1), numbers, communicator.host_group(), async_op=True)
        return everyone, work

    # -- in the middle of a call ---------------------------------------------------------------------------------------

    def give_up(self, failure: str) -> None:
        """Tells the others that this rank cannot finish a forward that it has announced. Of at least two ranks."""
        self.reports(self._exchange(Announcement(GAVE_UP)), failure)

    def reports(self, everyone: Sequence[Announcement], failure: str | None) -> dict[int, str]:
        """Collects the reasons that keep ranks from going on as the others do. Collective where one of them says
        why.
        """
        found = {rank: _WENT_ON for rank, each in enumerate(everyone) if each.kind in (STEP, JOIN)}
        if any(each.kind == GAVE_UP for each in everyone):
            found |= self.communicator.reports(failure)
        return found

    def _warn(self, reports: Mapping[int, str]) -> None:
        """Tells this rank, which goes on, of a call that all ranks have given up."""
        told = "; ".join(f"rank {rank}: {text.removesuffix('.')}" for rank, text in sorted(reports.items()))
        warnings.warn(f"The call before this one was given up on all ranks: {told}.", RuntimeWarning, stacklevel=2)

    def note_rows(self, tables: Sequence[str], sizes: Sequence[Sequence[int]]) -> None:
        """Keeps what was announced: `sizes` by rank, by table; below 0 where it is unknown."""
        self.rows_read.update(zip(tables, zip(*sizes, strict=True), strict=False))

    def all_gather_ids(
        self, unique: Sequence[Tensor], num_rows: Sequence[int], group: str, group_size: int, tables: Sequence[str]
    ) -> InFlight:
        """The op of that name: the announcement tells the sizes."""
        counts = [u.numel() for u in unique]
        everyone = self.announce_step(counts, bad_id_report(unique, tables, num_rows))
        self.note_rows(tables, everyone)
        return self.communicator.gather_rows_read(unique, everyone, num_rows, group)


def check_activities(activities: Sequence[int]) -> None:
    """Raises where ranks call the model for different things.

    Args:
        activities: of every rank.

    Raises:
        PeerFailure: saying what each rank does.
    """
    if len(set(activities)) > 1:
        raise PeerFailure(
            {r: f"expected all ranks to do the same, found this one {_ACTIVITIES[a]}" for r, a in enumerate(activities)}
        )


def check_programs(programs: Sequence[int]) -> None:
    """Raises where ranks are about to launch other collectives than rank 0.

    Raises:
        PeerFailure: saying what each of them should do.
    """
    others = [rank for rank, program in enumerate(programs) if program != programs[0]]
    if others:
        raise PeerFailure(dict.fromkeys(others, OTHER_PROGRAM))


OTHER_PROGRAM = (
    "expected every rank's graph to launch the same collectives, in a call of the model, found others than on rank 0: "
    "their batches led the forward along another path, or the ranks have registered other hooks. Make the forward "
    "communicate alike on every rank, in the same dtype, and register the same hook"
)


def check_steps(steps: Sequence[int]) -> None:
    """Raises where ranks have taken different numbers of optimizer steps.

    Raises:
        PeerFailure: saying how many each rank has taken.
    """
    if len(set(steps)) > 1:
        raise PeerFailure(
            {
                rank: f"expected as many optimizer steps on every rank, found {count} taken on this one: their "
                "parameters differ. Load a checkpoint on every rank"
                for rank, count in enumerate(steps)
            }
        )


def unreadable(error: Exception) -> str:
    """The report of a rank that cannot compute its batch's ids."""
    return f"expected ids that can be computed from the batch, found {type(error).__name__}: {error}; look at the batch"


def bad_id_report(ids: Sequence[Tensor], tables: Sequence[str], num_rows: Sequence[int]) -> str | None:
    """Reports an id outside the table that it is for, of ids by table; None where all are inside."""
    for found, table, rows in zip(bad_ids(ids, num_rows), tables, num_rows, strict=True):
        if found is not None:
            return (
                f"expected ids from 0 to {rows - 1}, in a lookup of {table} ({rows} rows), found {found}; "
                "look at the batch, or give the table more rows"
            )
    return None
