"""Ranks meet in the store before they meet in a process group, so that two ranks in different groups are named at once.

Contract
    A rank writes which group it waits in. It raises only if another rank waits in another group, both ranks belong to
    both groups, and neither has come to the other's: they would wait for each other until a timeout.
    For a rank that is only late, the others wait in the group, as in any collective.
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
"""How long a rank waits for the others before each look at where they wait."""

_LONGEST_PAUSE_S = 0.2

_FIRST = 8
"""Ranks that look at all others, who look at them: of thousands, not each looks at each."""


class OtherGroup(ValueError, RuntimeError):
    """Two ranks wait in different process groups, each for the other; raised on both."""


@dataclass(frozen=True)
class _Waiting:
    """A rank's wait in a group.

    Attributes:
        group: its name, the same on all of its ranks.
        described: for people.
        ranks: of the group, as numbered in the job.
        arrival: which one of this rank in this group it is.
        token: of this time alone.
    """

    group: str
    described: str
    ranks: tuple[int, ...]
    arrival: int
    token: str


@contextlib.contextmanager
def check_group_deadlock(store: Any, group: dist.ProcessGroup) -> Iterator[None]:
    """Opens a context for the first collective in a group, entered once its ranks are there, or have been waited for.

    Args:
        store: of the job. The meeting talks to it over a connection of its own.

    Raises:
        OtherGroup: a rank of the group waits for this one in another group.
    """
    meeting = _Meeting(store.clone(), group)
    try:
        meeting.meet()
        yield
    except OtherGroup:
        meeting.withdraw()
        raise
    except RuntimeError as error:
        if reason := meeting.verdict():  # written by a rank that came later and has ended since
            raise OtherGroup(reason) from error
        raise
    finally:
        meeting.end()


class _Meeting:
    """One rank's part in one meeting."""

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

    def meet(self) -> None:
        """Returns once all ranks are there, some are late, or the store has failed; the collective then reports it.

        Raises:
            OtherGroup: one waits for this rank elsewhere.
        """
        try:
            self._begin()
            self._wait()
        except OtherGroup:
            raise
        except RuntimeError:
            return

    def _begin(self) -> None:
        self._arrival = self._store.add(self._arrivals(self._group, self._rank), 1)
        waiting = _Waiting(self._group, self._described, tuple(self._ranks), self._arrival, self._token)
        self._store.set(self._place(self._rank), json.dumps(to_plain(waiting)))
        if self._store.add(self._of_all("arrived"), 1) == len(self._ranks):
            self._store.set(self._of_all("complete"), "1")

    def _wait(self) -> None:
        pause_s = 0.01
        for patience_s in _LOOKS_S:
            deadline_s = time.monotonic() + patience_s
            while time.monotonic() < deadline_s:
                if self._store.check([self._of_all("complete")]):  # a wait that times out makes TCPStore warn
                    return
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            self._look()

    def _look(self) -> None:
        if reason := self.verdict():  # the rank that found it first has ended
            raise OtherGroup(reason)
        for rank in self._ranks if self._rank in self._ranks[:_FIRST] else self._ranks[:_FIRST]:
            other = self._waiting(rank)
            if other is None or other.group == self._group or self._rank not in other.ranks:
                continue
            # In this order: neither rank will still come to the other's group.
            came_here = self._store.add(self._arrivals(self._group, rank), 0) >= self._arrival
            been_there = self._store.add(self._arrivals(other.group, self._rank), 0) >= other.arrival
            if not came_here and not been_there:
                message = (
                    f"Ranks that train together use different process groups: {self._described} on rank {self._rank} "
                    f"and {other.described} on rank {rank}, so that each waits for the other. Pass the same "
                    "process_group or device_mesh on both."
                )
                self._store.set(self._note(other.token), message)
                raise OtherGroup(message)

    def _waiting(self, rank: int) -> _Waiting | None:
        if rank == self._rank or not self._store.check([self._place(rank)]):
            return None
        if not (text := self._store.get(self._place(rank)).decode()):
            return None
        found: _Waiting = from_plain(_Waiting, json.loads(text))
        return found

    def verdict(self) -> str:
        """Reads what another rank has found of this one's group; "" where none has, or the store is gone."""
        with contextlib.suppress(RuntimeError):
            if self._store.check([self._note(self._token)]):
                found: str = self._store.get(self._note(self._token)).decode()
                return found
        return ""

    def withdraw(self) -> None:
        """Takes this arrival back: the next one in this group is counted as the others count it."""
        with contextlib.suppress(RuntimeError):
            self._store.add(self._of_all("arrived"), -1)
            self._store.add(self._arrivals(self._group, self._rank), -1)

    def end(self) -> None:
        """Removes from the store that this rank waits."""
        with contextlib.suppress(RuntimeError):
            self._store.set(self._place(self._rank), "")

    def _arrivals(self, group: str, rank: int) -> str:
        return f"{self._prefix}/{group}/arrivals/{rank}"

    def _place(self, rank: int) -> str:
        return f"{self._prefix}/waits/{rank}"

    def _note(self, token: str) -> str:
        return f"{self._prefix}/reason/{token}"

    def _of_all(self, what: str) -> str:
        return f"{self._prefix}/{self._group}/{self._arrival}/{what}"
