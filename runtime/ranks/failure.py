"""Makes all ranks raise, with the culprit's name, when a rank fails, dies or hangs."""

from __future__ import annotations

import contextlib
import json
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from embrace_fx.vocabulary import plain_data
from embrace_fx.vocabulary.plain_data import from_plain, to_plain

ANNOUNCEMENT = "announcement"
"""The name of what every step begins with."""

BACKWARD = "backward"
"""The name of what every backward begins with."""

CLOSED = (
    "This compiled model is closed, by close() or by another compile() of its model, and its process groups have "
    "ended. Use what the other compile() returned, or compile again."
)
"""Why a model that has been closed does nothing."""

FORKED = (
    "The model was called, or a sharded table read, in a forked child process, which other ranks do not know. Read it "
    "before the fork, on every rank: full_tensor() of a table, or model.full_state_dict(). Or fork inside `with "
    "model.whole():`."
)
"""Why a model does nothing in a forked child."""

_LIBRARIES = tuple(
    str(path)
    for path in (
        Path(torch.__file__).parent,
        Path(plain_data.__file__).parents[1],
        Path(__file__).parents[1],
        sysconfig.get_paths()["stdlib"],
    )
)
"""Folders of files that are not the user's."""

_PATIENCE_S = 5.0
_FAREWELL_S = 5.0
_LISTEN_S = 0.25
_POLL_S = 0.1


class PeerFailure(RuntimeError):
    """Raised on every rank when any rank has failed in a step, before anything was applied.

    Attributes:
        by_rank: what each failed rank reported.
    """

    def __init__(self, by_rank: Mapping[int, str]) -> None:
        self.by_rank = dict(by_rank)
        reports = "; ".join(f"rank {rank}: {text.removesuffix('.')}" for rank, text in sorted(by_rank.items()))
        super().__init__(f"{reports}. Nothing of this step was applied, on any rank.")

    def __reduce__(self) -> tuple[type[PeerFailure], tuple[dict[int, str]]]:
        return PeerFailure, (self.by_rank,)


class PlanDoesNotFit(Exception):
    """Raised on every rank, in place of the step, where a rank's batch does not fit the plan, which is then changed."""


class DivergedReplicas(RuntimeError):
    """Raised on every rank by `check_replicas`, when it finds that replicas differ."""

    def __init__(self, found: str) -> None:
        super().__init__(f"{found}. Load a checkpoint on every rank, and check that machine.")

    def __reduce__(self) -> tuple[type[RuntimeError], tuple[str]]:
        return RuntimeError, (str(self),)


class DeadRank(RuntimeError):
    """A collective failed because a rank is gone."""


class StuckRank(RuntimeError):
    """A collective failed although every rank's process lives: some rank did not reach it in time."""


TOLD = "All ranks have been told. Nothing of this step was applied, on any rank."
"""The note on an error that one rank raises and the others are informed of."""


def is_of_ranks(error: BaseException) -> bool:
    """Returns whether an error also raises on other ranks, or can no longer be reported to them."""
    return isinstance(error, PeerFailure | DeadRank | StuckRank | DivergedReplicas)


def failure_text(failure: Exception) -> str:
    """Prints a failure for other ranks; the library's own errors are printed without their type."""
    return str(failure) if isinstance(failure, RuntimeError) else f"{type(failure).__name__}: {failure}"


class LaunchLog:
    """This rank's progress: its launches and steps.

    Attributes:
        step: number of announcements begun.
        optimizer_steps: number of steps that changed parameters, since a checkpoint was loaded.
        launched: name of a launch -> the step of its last one; the last launch is the last entry.
        launches: number of launches so far.
    """

    def __init__(self) -> None:
        self.step = 0
        self.optimizer_steps = 0
        self._last: dict[object, int] = {}  # keys are turned into names when they are read
        self.launches = 0

    @property
    def launched(self) -> dict[str, int]:
        return {str(name): step for name, step in dict(self._last).items()}

    def begin_step(self) -> None:
        self.step += 1
        self.note(ANNOUNCEMENT)

    def note(self, name: object) -> None:
        self.launches += 1
        self._last.pop(name, None)
        self._last[name] = self.step


@dataclass(frozen=True)
class RankStatus:
    """The signature of a living rank: its progress, and the line that its main thread executes."""

    launched: dict[str, int]
    launches: int
    place: str

    @property
    def last(self) -> str:
        """The last launch, with its number among all."""
        name, step = next(reversed(self.launched.items()), ("none", 0))
        return f"number {self.launches}, {name!r} of step {step}"


def place_of_main_thread() -> str:
    """Returns the innermost line of the user's code in the main thread, else the innermost line: "loader.py:88"."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    lines = list(traceback.walk_stack(frame))
    own = [(f, line) for f, line in lines if not f.f_code.co_filename.startswith(_LIBRARIES)]
    if not lines:
        return "a thread that has ended"
    found, line = (own or lines)[0]
    return f"{Path(found.f_code.co_filename).name}:{line}"


class LivenessCheck:
    """Finds the dead ranks after a collective broke.

    The first rank to meet the error starts the check in the store. A thread on every rank sees it and signs, even while
    the rank's main thread is blocked in a collective. A rank that does not sign within a few seconds is dead. The rank
    that writes the verdict waits until the others have read it: the store may live in its own process.

    Args:
        store: the process group's store. The check talks to it over a connection of its own, in its own thread.
        name: unique among the communicators of one store.
        progress: what this rank signs with.
    """

    def __init__(self, store: Any, name: str, rank: int, world_size: int, progress: LaunchLog) -> None:
        self.name, self.rank, self.world_size = name, rank, world_size
        self._progress = progress
        self._statuses: dict[int, RankStatus] = {}
        self._store: Any = store.clone()
        self._called = f"embrace_fx/{name}/called"
        self._verdict = f"embrace_fx/{name}/verdict"
        self._signatures = [f"embrace_fx/{name}/alive/{r}" for r in range(world_size)]
        self._readers = [f"embrace_fx/{name}/read/{r}" for r in range(world_size)]
        self._missing: list[int] = []
        self.looks: list[Callable[[Any], None]] = []  # called by the thread at each look
        self._wake, self._decided = threading.Event(), threading.Event()
        self._closed = False
        self._listener = threading.Thread(target=self._listen, name="embrace_fx liveness check", daemon=True)
        self._listener.start()

    def close(self) -> None:
        """Ends the thread: one that still asks the store when the interpreter goes ends the process by abort()."""
        self._closed = True
        self._wake.set()
        if self._listener is not threading.current_thread():
            self._listener.join(_FAREWELL_S)

    def missing(self) -> list[int]:
        """Returns the ranks that do not answer."""
        if threading.current_thread() is self._listener:  # no other thread would run the check
            return []
        self._wake.set()
        self._decided.wait()
        return self._missing

    def _listen(self) -> None:
        try:
            while not self._wake.wait(_LISTEN_S) and not self._store.check([self._called]):
                for look in list(self.looks):
                    look(self._store)
            if not self._closed:
                self._missing = self._call()
        except RuntimeError:
            self._missing = [0]  # the store is gone: without a launcher that holds it, it lived in rank 0's process
        self._decided.set()

    def _call(self) -> list[int]:
        self._store.set(self._called, "1")
        progress = self._progress
        own = RankStatus(progress.launched, progress.launches, place_of_main_thread())
        self._store.set(self._signatures[self.rank], json.dumps(to_plain(own)))
        self._await(lambda: self._store.check(self._signatures) or self._store.check([self._verdict]), _PATIENCE_S)
        if not self._store.check([self._verdict]):
            silent = [r for r, name in enumerate(self._signatures) if not self._store.check([name])]
            self._store.set(self._verdict, ",".join(map(str, silent)))
        missing = [int(r) for r in self._store.get(self._verdict).decode().split(",") if r]
        with contextlib.suppress(RuntimeError, ValueError):
            signed = {r: self._store.get(self._signatures[r]) for r in range(self.world_size) if r not in missing}
            self._statuses = {r: from_plain(RankStatus, json.loads(text)) for r, text in signed.items()}
        with contextlib.suppress(RuntimeError):  # the store may disappear from here on
            self._store.set(self._readers[self.rank], "1")
            living = [name for r, name in enumerate(self._readers) if r not in missing]
            self._await(lambda: self._store.check(living), _FAREWELL_S)
        return missing

    def _await(self, condition: Callable[[], bool], patience_s: float) -> None:
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline and not condition():
            time.sleep(_POLL_S)

    def raise_named(self, error: RuntimeError, what: str) -> NoReturn:
        """Raises the error of a broken collective, with the names of ranks."""
        if missing := self.missing():
            raise DeadRank(
                f"Rank(s) {', '.join(map(str, missing))} no longer answer, says rank {self.rank} ({error}). Look at "
                "their logs, and restart the job from a checkpoint."
            ) from error
        raise StuckRank(
            f"A collective timed out on rank {self.rank}: {self._who_is_stuck(what)} ({error}). Look at the lines "
            "named, and restart the job from a checkpoint."
        ) from error

    def _who_is_stuck(self, what: str) -> str:
        """Names the ranks behind this one, each by the first launch that it has not reached; if none is, all places."""
        own, found = self._progress.launched, []
        for r, each in self._statuses.items():
            absent = [name for name, step in own.items() if each.launched.get(name, 0) < step]
            if absent:
                name = what if what in absent else absent[0]
                found.append(
                    f"rank {r} has not launched {name!r} of step {own[name]}: it stands in {each.place}, and its last "
                    f"launch is {each.last}"
                )
        if found:
            return "; ".join(found)
        places = "; ".join(f"rank {r} stands in {each.place}" for r, each in self._statuses.items() if r != self.rank)
        return f"every rank lives: {places}" if places else "a rank stopped taking part"


class Watching(contextlib.AbstractContextManager[None]):
    """A context manager that names the ranks that no longer answer, or are stuck, in the error of a broken collective.

    Args:
        what: the launch that is waited for inside, by its name in `LaunchLog`.
    """

    def __init__(self, liveness: LivenessCheck, what: object = "") -> None:
        self._liveness, self._what = liveness, what

    def __enter__(self) -> None:
        """There is nothing to prepare."""

    def __exit__(self, kind: Any, error: BaseException | None, *_: object) -> None:
        if isinstance(error, RuntimeError) and not is_of_ranks(error):
            self._liveness.raise_named(error, str(self._what))
