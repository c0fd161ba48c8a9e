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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntFlag
from typing import Any

import torch
from torch import Tensor

from embrace_fx.runtime.kernels import bad_ids
from embrace_fx.runtime.ranks.checksums import digest_of, diverged
from embrace_fx.runtime.ranks.communicator import Communicator, InFlight
from embrace_fx.runtime.ranks.failure import (
    ANNOUNCEMENT,
    DivergedReplicas,
    PeerFailure,
    PlanDoesNotFit,
)
from embrace_fx.runtime.ranks.gathering import gather_single
from embrace_fx.runtime.ranks.lone_calls import LoneCalls

ACTIVITIES = TRAINING, ACCUMULATING, EVALUATING = (
    "training",
    "accumulating gradients (no_sync)",
    "evaluating (eval or no_grad)",
)
"""What a call of the model can be; all ranks must do the same."""


JOINED = 3
"""In place of an activity: the rank has run out of batches (`join`)."""

CHANGED_BUFFERS = -1
"""Announced of buffers: this rank has changed one besides what forwards write."""


class Mark(IntFlag):
    """One bit each for what a rank says of itself."""

    FAILED = 1
    """It cannot take part in this step; why follows."""
    ASKS_TO_PLAN = 2
    """It would have another plan made."""
    IN_BACKWARD = 4
    """It stands at the head of a backward, and not of a call."""
    GAVE_UP = 8
    """It stands in a forward that all ranks have announced, and cannot finish it; why follows."""
    DOES_NOT_FIT = 16
    """Its batch does not fit the plan, which all are to change before this step."""


_BITS = 8
"""What marks and activity take of their numbers."""

_ELSEWHERE = Mark.IN_BACKWARD | Mark.GAVE_UP

_WENT_ON = "expected a backward of this call, found that it went on to another call without one"


@dataclass(frozen=True, slots=True)
class Announcement:
    """An announcement of one rank.

    Attributes:
        marks: what it says of itself.
        activity: index into `ACTIVITIES`.
        steps: of optimizers, that this rank has taken.
        digest: of its replicas, where they are to be compared; else 0.
        program: what the step launches, as a number; 0: it runs no program.
        buffers: which of them this rank would share, as a number, or `CHANGED_BUFFERS`.
        rows_seen: of each watched table, how many of its rows the batch reads; -1: unknown.
        sizes: what the step tells besides.
    """

    marks: Mark
    activity: int
    steps: int
    digest: int
    program: int
    buffers: int
    rows_seen: tuple[int, ...]
    sizes: tuple[int, ...]

    def encode(self, length: int) -> list[int]:
        """This as numbers, padded: all ranks' are of one length, or the exchange itself would hang.

        Args:
            length: of sizes, at most.
        """
        padding = [0] * (length - len(self.sizes))
        marks, activity = self.marks | self.steps << _BITS, self.activity | self.digest << _BITS
        return [marks, activity, self.program, self.buffers, *self.rows_seen, *self.sizes, *padding]

    @classmethod
    def decode(cls, numbers: Sequence[int], watched: int, sizes: int) -> Announcement:
        """Reads what `encode` has written.

        Args:
            watched: how many tables are watched.
            sizes: how many sizes were told.
        """
        (steps, marks), (digest, activity) = (divmod(number, 1 << _BITS) for number in numbers[:2])
        program, buffers, *others = numbers[2:]
        seen, told = tuple(others[:watched]), tuple(others[watched : watched + sizes])
        return cls(Mark(marks), activity, steps, digest, program, buffers, seen, told)


class Announcements:
    """The announcements of these ranks: what the next one of this rank is to say, and what all said in the last.

    Attributes:
        activity: of the coming step, as index into `ACTIVITIES`.
        failure: found before the step's announcement, which reports it.
        program: that the coming step runs, as a number that is the same where the same is launched; 0: none.
        buffers: which buffers the coming step would share, as a number, or `CHANGED_BUFFERS`.
        buffers_differ: as of the last announcement, ranks would share different ones, or one has changed its own.
        authority: the rank whose buffers count.
        uneven: ranks may have taken different numbers of optimizer steps (`join`).
        tables: how many tables exchange ids, once planned.
        watched: other tables of which an announcement tells the rows read.
        rows_seen: of those, in the coming step; of a table that is not there, unknown.
        rows_read: table -> rows that each rank reads, as far as announced.
        asks_to_plan: this rank would have another plan made.
        checksums: of this rank's replicas, where the coming step is to compare them; else empty.
        made: how many there have been, on every rank.
        asked_to_plan: any rank would, as of the last announcement.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.activity = 0
        self.failure: str | None = None
        self.program = 0
        self.buffers = 0
        self.buffers_differ = False
        self.authority = 0
        self.uneven = False
        self.tables = 0
        self.watched: tuple[str, ...] = ()
        self.rows_seen: dict[str, int] = {}
        self.rows_read: dict[str, tuple[int, ...]] = {}
        self.asks_to_plan = False
        self.asked_to_plan = False
        self.checksums: dict[str, int] = {}
        self.made = 0
        self._waiting_since_s: float | None = None
        self._lone_calls: LoneCalls | None = None

    def announce(
        self, sizes: Sequence[int], failure: str | None = None, *, does_not_fit: bool = False
    ) -> list[tuple[int, ...]]:
        """Every rank's `sizes`, at the head of a step.

        Args:
            does_not_fit: this rank's batch does not fit the plan.

        Raises:
            PeerFailure: any rank has a `failure`, or the ranks are not doing the same thing; on all ranks.
            DivergedReplicas: what ranks should hold alike they do not; on all ranks.
            PlanDoesNotFit: any rank's batch does not; on all ranks.
        """
        communicator = self.communicator
        communicator.check_open()
        failure, self.failure = self.failure or failure, None
        if communicator.world_size == 1:
            if failure is not None:
                raise PeerFailure({0: failure})
            if does_not_fit:
                raise PlanDoesNotFit
            return [tuple(sizes)]
        own = self._own(sizes, failure is not None, does_not_fit)
        self.made += 1
        communicator.progress.begin_step()
        self._look_out()
        self._waiting_since_s = time.monotonic()
        try:
            everyone = self._meet(own)
        finally:
            self._waiting_since_s = None
        self.asked_to_plan = any(each.marks & Mark.ASKS_TO_PLAN for each in everyone)
        self.rows_read = {}
        self.note_rows(self.watched, [each.rows_seen for each in everyone])
        if any(each.marks & Mark.FAILED for each in everyone):
            failures = communicator.gather(failure, str | None)
            raise PeerFailure({rank: text for rank, text in enumerate(failures) if text is not None})
        check_activities([each.activity for each in everyone])
        if any(each.marks & Mark.DOES_NOT_FIT for each in everyone):
            raise PlanDoesNotFit
        check_programs([each.program for each in everyone])
        checksums, self.checksums = self.checksums, {}
        digests = {each.digest for each in everyone}
        if 0 not in digests and len(digests) > 1:
            raise DivergedReplicas(diverged(communicator.gather(checksums, dict[str, int])))
        if not self.uneven:
            check_steps([each.steps for each in everyone])
        buffers = {each.buffers for each in everyone}
        self.buffers_differ = len(buffers) > 1 or CHANGED_BUFFERS in buffers
        return [each.sizes for each in everyone]

    def _meet(self, own: Announcement) -> list[Announcement]:
        """Every rank's announcement, once all are at the head of a step."""
        everyone = self._exchange(own)
        while any(each.marks & _ELSEWHERE for each in everyone):  # they come here next
            self._warn(self.reports(everyone, None))
            everyone = self._exchange(own)
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
        communicator = self.communicator
        self.made += 1
        communicator.progress.begin_step()
        self._meet(self.elsewhere(Mark.FAILED))
        communicator.gather(failure, str | None)

    def meet(self, activity: int) -> list[int]:
        """Exchanges what every rank is about to do, `JOINED` on one that has run out of batches. Collective, ahead of a
        step.
        """
        communicator = self.communicator
        communicator.check_open()
        own = torch.tensor([activity], device="cpu")
        everyone = own.new_empty(communicator.world_size)
        with communicator.watching(ANNOUNCEMENT):
            gather_single(everyone, own, communicator.host_group())
        found: list[int] = everyone.tolist()
        return found

    def _own(self, sizes: Sequence[int], failed: bool, does_not_fit: bool) -> Announcement:
        marks = Mark.FAILED * failed | Mark.ASKS_TO_PLAN * self.asks_to_plan | Mark.DOES_NOT_FIT * does_not_fit
        seen, self.rows_seen = self.rows_seen, {}
        of_watched = tuple(seen.get(name, -1) for name in self.watched)
        program, self.program = self.program, 0
        steps, digest = self.communicator.progress.optimizer_steps, digest_of(self.checksums)
        return Announcement(Mark(marks), self.activity, steps, digest, program, self.buffers, of_watched, tuple(sizes))

    def _exchange(self, own: Announcement) -> list[Announcement]:
        everyone, work = self.launch(own)
        with self.communicator.watching(ANNOUNCEMENT):
            work.wait()
        watched, sizes = len(own.rows_seen), len(own.sizes)
        return [Announcement.decode(row, watched, sizes) for row in everyone.tolist()]

    def launch(self, own: Announcement) -> tuple[Tensor, Any]:
        """Starts the exchange: (announcements of all ranks (N, length), the work to wait for before reading them)."""
        communicator = self.communicator
        # A step with the next batch's sizes in it has most to say.
        numbers = torch.tensor(own.encode(1 + 2 * self.tables), dtype=torch.int64, device="cpu")
        everyone = numbers.new_empty((communicator.world_size, numbers.numel()))
        work = gather_single(everyone.view(-1), numbers, communicator.host_group(), async_op=True)
        return everyone, work

    # -- in the middle of a call ---------------------------------------------------------------------------------------

    def give_up(self, failure: str) -> None:
        """Tells the others that this rank cannot finish a forward that it has announced. Of at least two ranks."""
        self.reports(self._exchange(self.elsewhere(Mark.GAVE_UP)), failure)

    def elsewhere(self, mark: Mark, program: int = 0) -> Announcement:
        """An announcement of a rank that stands elsewhere while others may announce a step."""
        return Announcement(mark, self.activity, 0, 0, program, 0, (-1,) * len(self.watched), ())

    def reports(self, everyone: Sequence[Announcement], failure: str | None) -> dict[int, str]:
        """Collects the reasons that keep ranks from going on as the others do. Collective where one of them says
        why.
        """
        found = {rank: _WENT_ON for rank, each in enumerate(everyone) if not each.marks & _ELSEWHERE}
        if any(each.marks & Mark.GAVE_UP for each in everyone):
            failures = self.communicator.gather(failure, str | None)
            found |= {rank: text for rank, text in enumerate(failures) if text is not None}
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
        everyone = self.announce(counts, bad_id_report(unique, tables, num_rows))
        self.note_rows(tables, everyone)
        return self.communicator.gather_rows_read(unique, everyone, num_rows, group)


def check_activities(activities: Sequence[int]) -> None:
    """Raises where ranks call the model for different things.

    Args:
        activities: index into `ACTIVITIES` of every rank.

    Raises:
        PeerFailure: saying what each rank does.
    """
    if len(set(activities)) > 1:
        raise PeerFailure(
            {r: f"expected all ranks to do the same, found this one {ACTIVITIES[a]}" for r, a in enumerate(activities)}
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
