"""A watchdog that detects ranks which wait for each other in different calls, and raises on all of them.

    rank 0   evaluates: its handshake waits for rank 1; or it raises on an op that parts do not support
    rank 1   waits in torch.distributed.barrier() for rank 0

A rank that has waited for a moment, or raises, writes that to the store, with the number of collectives it has begun in
each process group. A second rank, blocked in a collective that the first has not begun, prints the reason. If the first
rank waits, the second also announces a failure from another thread: the first raises, reaches the barrier, and both
continue with nothing applied. If the first rank exits, the second's collective raises the same reason.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed.c10d_logger import _c10d_logger

from embrace_fx.runtime.ranks.communicator import Communicator
from embrace_fx.runtime.ranks.failure import PeerFailure, place_of_main_thread
from embrace_fx.vocabulary.plain_data import from_plain, to_plain

PATIENCE_S = 0.25
"""Seconds of a wait before the rank writes it to the store."""

_TOGETHER = {
    "torch/distributed/distributed_c10d.py": ("barrier", "all_reduce", "all_gather", "reduce_scatter", "all_to_all"),
    "torch/distributed/utils.py": ("_verify_param_shape", "_sync_module_states"),  # DDP's constructor calls it
}
"""File -> prefixes of its functions that return only after all ranks have called them."""
_WAITS, _RAISES = "/waits", "/raises"
"""Suffixes of the store's keys for a rank that waits, and for one that raises."""

_ELSEWHERE = (
    "another rank calls the model or reads a sharded table while this rank is in {} at {}. Call the model, "
    "full_state_dict(), gradient clipping and norms on all ranks. To evaluate on one rank, enter `with model.whole() "
    "as plain:` on all ranks, and call plain on one. If loaders differ in length, use model.join()"
)


@dataclass(frozen=True)
class _StoppedRank:
    """What a rank writes to torch.distributed's store when it has waited long for other ranks, or is about to raise an
    error.

    Attributes:
        rank: the rank in the model's process group.
        announced: how many handshakes (exchanges before a step) the rank has begun.
        reason: the error that the rank raises, or "" if it waits in its last handshake.
        begun: name of a process group -> how many collectives the rank has begun in it.
    """

    rank: int
    announced: int
    reason: str
    begun: dict[str, int]


class MismatchWatchdog:
    """Detects ranks that wait for each other in different calls. A thread of each rank calls `check`.

    Attributes:
        announced: how many handshakes (exchanges before a step) this rank has begun.
        name: a prefix of keys in the store, equal on all ranks; "" until the watchdog runs.
        waiting_since_s: when the current wait for a handshake began, in seconds of `time.monotonic`. None if this rank
            does not wait.
    """

    def __init__(self) -> None:
        self.announced = 0
        self._rank = 0
        self.name = ""
        self.waiting_since_s: float | None = None
        self._written = 0  # the number of the last handshake that was reported as a long wait
        self._found: tuple[FrameType, PeerFailure] | None = None  # a collective that cannot complete, and the reason

    def watch(self, communicator: Communicator, look: Callable[[Any, str], None]) -> None:
        """Starts the watchdog, unless it runs already or there are no other ranks.

        Args:
            look: a method that calls `check`. A thread calls it a few times per second.
        """
        if self.name or not (name := communicator.run_periodically(look)):
            return  # the watchdog runs already, or there are no other ranks
        self._rank, self.name = communicator.rank, name
        communicator.refuse = self.refuse
        itself = weakref.ref(self)

        def explain(_: logging.LogRecord) -> bool:
            """Raises an error with the reason why a collective failed, if the reason is known. Runs as a logging
            filter, because torch logs the error of a collective before it raises it. Returns True, so that torch logs
            the error.
            """
            if (error := sys.exc_info()[1]) is not None and (found := itself()) is not None:
                found.explain(error)
            return True

        _c10d_logger.addFilter(explain)  # torch logs the error of a collective before it raises the error
        weakref.finalize(self, _c10d_logger.removeFilter, explain)

    def wait_for(self, work: Any, group: dist.ProcessGroup) -> None:
        """Waits for the exchange of a handshake. Records when the wait began.

        Args:
            work: torch's handle of the exchange.
            group: the process group of the exchange. The watchdogs of other models read it from the stack frame.
        """
        self.waiting_since_s = time.monotonic()
        try:
            work.wait()
        finally:
            self.waiting_since_s = None

    def check(self, store: Any, name: str, answer: Callable[[str], PeerFailure]) -> None:
        """Writes to the store that this rank waits in a handshake, if it has waited long. If this rank is in another
        collective, checks whether the collective cannot complete because another rank has stopped.

        Args:
            store: a store of torch.distributed that only this thread uses.
            name: a prefix for keys that is unique, and equal on all ranks.
            answer: sends the text of a failure to the rank that waits, and returns the error that both ranks then
                raise.
        """
        self.name = name
        if (since_s := self.waiting_since_s) is not None:
            if time.monotonic() - since_s > PATIENCE_S and self._written != self.announced:
                self._write_record(store, _WAITS)
                self._written = self.announced
            return
        top = sys._current_frames().get(threading.main_thread().ident or 0)
        frames = []  # do not read line numbers, because the main thread continues to run
        while top is not None:
            frames.append(top)
            top = top.f_back
        frame = _find_collective(frames)
        if self._found is not None and self._found[0] is not frame:
            self._found = None
        if frame is None or self._found is not None:
            return
        if self._find_stopped_rank(store, frame, _WAITS, self.announced + 1) is not None:
            waits = frame.f_code is _HANDSHAKE
            what = "another model's call" if waits else f"torch.distributed.{frame.f_code.co_name}()"
            self._found = frame, answer(_ELSEWHERE.format(what, place_of_main_thread()))
        elif (other := self._find_stopped_rank(store, frame, _RAISES, self.announced)) is not None:
            self._found = frame, PeerFailure({other.rank: other.reason})
        else:
            return
        print(f"embrace_fx: {self._found[1]}", file=sys.stderr, flush=True)

    def refuse(self, reason: str) -> None:
        """Writes to torch.distributed's store that this rank is about to raise an error. Ranks that wait for this rank
        read it.

        Args:
            reason: the error's text.
        """
        with contextlib.suppress(RuntimeError):  # the store may no longer exist
            self._write_record(dist.distributed_c10d._get_default_store(), _RAISES, reason)

    def explain(self, error: BaseException) -> None:
        """Raises an error with the reason why a collective failed, if it failed because another rank did not take part
        in it. Otherwise does nothing.

        Args:
            error: the error that the collective raised.

        Raises:
            PeerFailure: names the other rank and its reason.
        """
        frame = _find_collective(frame for frame, _ in traceback.walk_tb(error.__traceback__))
        if frame is None:
            return
        if self._found is not None and self._found[0] is frame:
            raise self._found[1] from error
        other = None
        with contextlib.suppress(RuntimeError):  # the store may no longer exist
            other = self._find_stopped_rank(dist.distributed_c10d._get_default_store(), frame, _RAISES, self.announced)
        if other is not None:
            raise PeerFailure({other.rank: other.reason}) from error

    def _write_record(self, store: Any, what: str, reason: str = "") -> None:
        """Writes this rank's record to the store.

        Args:
            what: the suffix of the key: `_WAITS` or `_RAISES`.
            reason: the error that the rank is about to raise, or "" if it waits.
        """
        begun = {str(name): _collectives_begun(group) for group, name in dist.distributed_c10d._world.pg_names.items()}
        store.set(self.name + what, json.dumps(to_plain(_StoppedRank(self._rank, self.announced, reason, begun))))

    def _find_stopped_rank(self, store: Any, frame: FrameType, what: str, announced: int) -> _StoppedRank | None:
        """Returns the record of another rank that stopped before it began the collective in which this rank waits.
        Returns None if there is no such rank.

        Args:
            frame: the stack frame of the collective.
            what: the suffix of the record's key: `_WAITS` or `_RAISES`.
            announced: the number of handshakes that the other rank must have begun.
        """
        if not store.check([self.name + what]):
            return None
        other: _StoppedRank = from_plain(_StoppedRank, json.loads(store.get(self.name + what).decode()))
        group = _group_of(frame)
        is_behind = other.begun.get(group.group_name, _collectives_begun(group)) < _collectives_begun(group)
        return other if is_behind and other.announced == announced and other.rank != self._rank else None


_HANDSHAKE = MismatchWatchdog.wait_for.__code__
"""The function in which ranks wait in a handshake, which may be another model's."""


def _collectives_begun(group: dist.ProcessGroup) -> int:
    """Returns how many collectives this rank has begun in a process group, or 0 if its backends do not count them."""
    try:
        return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]
    except RuntimeError:
        return 0


def _find_collective(frames: Iterable[FrameType]) -> FrameType | None:
    """Returns the first of these stack frames that runs a collective of all ranks of a process group, or None."""
    for frame in frames:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        for there, names in _TOGETHER.items():  # inlined, because it runs a few times a second
            if file.endswith(there) and name.startswith(names):
                return frame
        if frame.f_code is _HANDSHAKE:
            return frame
    return None


def _group_of(frame: FrameType) -> dist.ProcessGroup:
    """Returns the process group of the collective that runs in a stack frame."""
    of = frame.f_locals
    found = of.get("group") or of.get("process_group") or dist.group.WORLD
    assert isinstance(found, dist.ProcessGroup)
    return found
