"""Detects ranks that are about to wait for each other in different process groups.

Contract
    A rank writes the group that it waits in. It raises only if another rank waits in another group, both ranks belong
    to both groups, and neither has entered the other's group: they would wait for each other until a timeout. If a rank
    is only late, the others wait in the group, as in any collective.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import torch.distributed as dist

from embrace_fx.vocabulary.plain_data import from_plain, to_plain

_LOOKS_S = (0.5, 1.0, 2.0)
"""Seconds between the start of a wait and each check of the other ranks' waits."""

_LONGEST_PAUSE_S = 0.2

_FIRST = 8
"""The first ranks check all others, and all check the first ranks, so that checks grow linearly with the ranks."""


class OtherGroup(ValueError, RuntimeError):
    """Raised on two ranks that would wait for each other forever, because they are in the first collectives of
    different process groups.
    """


@dataclass(frozen=True)
class _WaitRecord:
    """What a rank writes to the store while it waits for the first collective of a process group.

    Attributes:
        group: the group's name, equal on all of its ranks.
        described: a description of the group, for error messages.
        ranks: the global ranks of the group.
        arrival: how often this rank has waited in this group so far.
        token: a text that is unique for this wait.
    """

    group: str
    described: str
    ranks: tuple[int, ...]
    arrival: int
    token: str


@contextlib.contextmanager
def check_group_deadlock(store: Any, group: dist.ProcessGroup) -> Iterator[None]:
    """Opens a context for the first collective of a process group. On entry, waits for the other ranks of the group,
    and raises if one of them waits for this rank in a different group.

    Args:
        store: the job's store. The check opens its own connection.

    Raises:
        OtherGroup: two ranks wait for each other in different groups. Raised on both.
    """
    meeting = _DeadlockCheck(store.clone(), group)
    try:
        meeting.run()
        yield
    except OtherGroup:
        meeting.withdraw()
        raise
    except RuntimeError as error:
        if reason := meeting.error_from_other_rank():  # a rank that arrived later has written it and exited
            raise OtherGroup(reason) from error
        raise
    finally:
        meeting.remove_record()


class _DeadlockCheck:
    """One rank's check for a deadlock before the first collective of a process group."""

    def __init__(self, store: Any, group: dist.ProcessGroup) -> None:
        self._store = store
        self._rank = dist.get_rank()
        self._ranks: Sequence[int] = dist.get_process_group_ranks(group)
        self._group = group.group_name
        listed = ", ".join(map(str, self._ranks[:_FIRST])) + (", ..." if len(self._ranks) > _FIRST else "")
        kind = "the default group" if group is dist.group.WORLD else "a group"
        self._described = f"{kind} {self._group!r} of ranks {listed}"
        self._prefix = f"embrace_fx/meeting/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._arrival = 0
        self._token = uuid4().hex

    def run(self) -> None:
        """Waits until all ranks of the group have arrived at its first collective. Returns early if some are late or
        the store fails, because the collective itself then raises an error.

        Raises:
            OtherGroup: a rank of the group waits for this rank in a different group.
        """
        try:
            self._write_arrival()
            self._wait_for_arrivals()
        except OtherGroup:
            raise
        except RuntimeError:
            return

    def _write_arrival(self) -> None:
        """Writes to the store that this rank has arrived at its group."""
        self._arrival = self._store.add(self._arrivals_key(self._group, self._rank), 1)
        waiting = _WaitRecord(self._group, self._described, tuple(self._ranks), self._arrival, self._token)
        self._store.set(self._record_key(self._rank), json.dumps(to_plain(waiting)))
        if self._store.add(self._shared_key("arrived"), 1) == len(self._ranks):
            self._store.set(self._shared_key("complete"), "1")

    def _wait_for_arrivals(self) -> None:
        """Waits until all ranks of the group have arrived, checking for a deadlock in between."""
        pause_s = 0.01
        for patience_s in _LOOKS_S:
            deadline_s = time.monotonic() + patience_s
            while time.monotonic() < deadline_s:
                # Poll instead of waiting, because TCPStore warns when a wait times out.
                if self._store.check([self._shared_key("complete")]):
                    return
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            self._check_cycle()

    def _check_cycle(self) -> None:
        """Raises `OtherGroup` if this rank and another rank of its group wait for each other in different groups."""
        if reason := self.error_from_other_rank():  # another rank has found the deadlock first
            raise OtherGroup(reason)
        for rank in self._ranks if self._rank in self._ranks[:_FIRST] else self._ranks[:_FIRST]:
            other = self._record_of(rank)
            if other is None or other.group == self._group or self._rank not in other.ranks:
                continue
            # Check in this order, so that neither rank can still enter the other's group.
            came_here = self._store.add(self._arrivals_key(self._group, rank), 0) >= self._arrival
            been_there = self._store.add(self._arrivals_key(other.group, self._rank), 0) >= other.arrival
            if not came_here and not been_there:
                message = (
                    f"Ranks that train together use different process groups: {self._described} on rank {self._rank} "
                    f"and {other.described} on rank {rank}, so each waits for the other. Pass the same "
                    "process_group or device_mesh on both."
                )
                self._store.set(self._verdict_key(other.token), message)
                raise OtherGroup(message)

    def _record_of(self, rank: int) -> _WaitRecord | None:
        """Returns the record that another rank has written to the store. Returns None if that rank is not waiting in a
        group, or if `rank` is this rank.
        """
        if rank == self._rank or not self._store.check([self._record_key(rank)]):
            return None
        if not (text := self._store.get(self._record_key(rank)).decode()):
            return None
        found: _WaitRecord = from_plain(_WaitRecord, json.loads(text))
        return found

    def error_from_other_rank(self) -> str:
        """Returns the error text that another rank has written for this wait. Returns "" if there is none, or if the
        store no longer exists.
        """
        with contextlib.suppress(RuntimeError):
            if self._store.check([self._verdict_key(self._token)]):
                found: str = self._store.get(self._verdict_key(self._token)).decode()
                return found
        return ""

    def withdraw(self) -> None:
        """Removes this rank's arrival from the counts in the store, so that all ranks have equal counts at the next
        attempt.
        """
        with contextlib.suppress(RuntimeError):
            self._store.add(self._shared_key("arrived"), -1)
            self._store.add(self._arrivals_key(self._group, self._rank), -1)

    def remove_record(self) -> None:
        """Removes this rank's record from the store."""
        with contextlib.suppress(RuntimeError):
            self._store.set(self._record_key(self._rank), "")

    def _arrivals_key(self, group: str, rank: int) -> str:
        """Returns the store's key for the number of times that a rank has arrived at a group."""
        return f"{self._prefix}/{group}/arrivals/{rank}"

    def _record_key(self, rank: int) -> str:
        """Returns the store's key for a rank's record."""
        return f"{self._prefix}/waits/{rank}"

    def _verdict_key(self, token: str) -> str:
        """Returns the store's key for the error that another rank writes for the wait that `token` identifies."""
        return f"{self._prefix}/reason/{token}"

    def _shared_key(self, what: str) -> str:
        """Returns the store's key for a value that the ranks of this group share for their current arrival.

        Args:
            what: the name of the value.
        """
        return f"{self._prefix}/{self._group}/{self._arrival}/{what}"
