"""Makes all ranks raise an error that names the failed rank when one fails, dies or hangs."""

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
"""Launch name of the handshake that begins every step."""

BACKWARD = "backward"
"""Launch name of the barrier that begins every backward."""

CLOSED = (
    "This compiled model is closed, because close() was called, or because its module was compiled again. Use the "
    "model that the later compile() returned, or call compile() again."
)
"""The error of a closed model."""

_LIBRARIES = tuple(
    str(path)
    for path in (
        Path(torch.__file__).parent,
        Path(plain_data.__file__).parents[1],
        Path(__file__).parents[1],
        sysconfig.get_paths()["stdlib"],
    )
)
"""Folders whose files are not user code."""

PATIENCE_S = 5.0
"""How long a check waits for a rank's status before it calls the rank dead."""

_FAREWELL_S = 5.0
_LISTEN_S = 0.25
_POLL_S = 0.1


class PeerFailure(RuntimeError):
    """Raised on every rank if any rank fails in a step, before the step changes anything.

    Attributes:
        by_rank: the error text of each rank that failed.
    """

    def __init__(self, by_rank: Mapping[int, str]) -> None:
        self.by_rank = dict(by_rank)
        reports = "; ".join(f"rank {rank}: {text.removesuffix('.')}" for rank, text in sorted(by_rank.items()))
        super().__init__(f"{reports}. Nothing of this step was applied, on any rank.")

    def __reduce__(self) -> tuple[type[PeerFailure], tuple[dict[int, str]]]:
        return PeerFailure, (self.by_rank,)


class PlanDoesNotFit(Exception):
    """Raised on every rank, instead of running a step, if a rank's batch does not fit the plan for which the model was
    compiled. The caller then changes the plan.
    """


class DivergedReplicas(RuntimeError):
    """Raised on every rank by `check_replicas` if replicas differ between ranks."""

    def __init__(self, found: str) -> None:
        super().__init__(f"{found}. Load a checkpoint on every rank, and check the machines of the ranks that differ.")

    def __reduce__(self) -> tuple[type[RuntimeError], tuple[str]]:
        return RuntimeError, (str(self),)


class DeadRank(RuntimeError):
    """Raised if a collective failed because the process of a rank is gone."""


class StuckRank(RuntimeError):
    """Raised if a collective failed because some rank did not reach it in time, although the processes of all ranks
    exist.
    """


TOLD = "All ranks raise this error. Nothing of this step was applied on any rank."
"""Note added to an error that one rank raises and reports to the others."""


def is_known_to_all_ranks(error: BaseException) -> bool:
    """Returns whether no rank needs to be informed of an error, because all ranks raise it or cannot be reached any
    more.
    """
    return isinstance(error, PeerFailure | DeadRank | StuckRank | DivergedReplicas)


def failure_text(failure: Exception) -> str:
    """Returns the text of an exception, to be sent to other ranks. It begins with the type of the exception, except for
    `RuntimeError`s, such as those of this package.
    """
    return str(failure) if isinstance(failure, RuntimeError) else f"{type(failure).__name__}: {failure}"


class LaunchLog:
    """Counts this rank's launched collectives and its steps, so that its progress can be compared with that of other
    ranks.

    Attributes:
        step: the number of announcements so far, equal on all ranks. Ranks exchange an announcement before each step,
            and sometimes without a step.
        preparations: the number of announcements without a step, such as in the first call or for a new plan.
        optimizer_steps: the number of optimizer steps that changed parameters, since a checkpoint was loaded.
        launches: the number of launched collectives so far.
    """

    def __init__(self) -> None:
        self.step = 0
        self.preparations = 0
        self.optimizer_steps = 0
        self._last: dict[object, int] = {}  # launch id -> step; ids are converted to names only when they are read
        self.launches = 0

    @property
    def launched(self) -> dict[str, int]:
        """Maps the name of each launch to the value of `step` at the time when it was last made."""
        return {str(name): step for name, step in dict(self._last).items()}

    def begin_step(self) -> None:
        """Records an announcement, which begins a step."""
        self.step += 1
        self.record(ANNOUNCEMENT)

    def record(self, name: object) -> None:
        """Records a launch."""
        self.launches += 1
        self._last.pop(name, None)
        self._last[name] = self.step


@dataclass(frozen=True)
class RankStatus:
    """What a living rank reports about itself: its progress, and the line of code that its main thread is executing.

    Attributes:
        launched: name of each launch -> the value of `LaunchLog.step` at the time when it was last made.
        launches: the number of launches so far.
        preparations: the number of announcements without a step.
        place: the line, as "file:line".
    """

    launched: dict[str, int]
    launches: int
    preparations: int
    place: str

    @property
    def last_launch(self) -> str:
        """What the rank has launched last: a clause for errors, with the launch's number, name and step."""
        if not self.launched:
            return "has not launched anything"
        name, step = next(reversed(self.launched.items()))
        return f"its last launch was number {self.launches}, {name!r} of step {step - self.preparations}"


def place_of_main_thread() -> str:
    """Returns the line of the user's code that the main thread is executing, such as "loader.py:88". If it executes no
    code of the user, returns the line in a library.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "a thread that has ended"
    lines = list(traceback.walk_stack(frame))
    own = [(f, line) for f, line in lines if not f.f_code.co_filename.startswith(_LIBRARIES)]
    found, line = (own or lines)[0]
    return f"{Path(found.f_code.co_filename).name}:{line}"


class LivenessCheck:
    """Finds out which ranks are dead after a collective has failed.

    The first rank whose collective failed starts the check in the store. A thread on every rank then writes a status to
    the store, even while the main thread is blocked in a collective. A rank without a status after a few seconds is
    dead. The rank that writes the result waits until the others have read it, because its process may run the store.

    Args:
        store: the process group's store. The check opens its own connection, in its own thread.
        name: a name that is unique among the communicators that use the store.
        progress: this rank's progress, to report to others.
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
        self.looks: list[Callable[[Any], None]] = []  # functions that the liveness thread calls in each iteration
        self._wake, self._decided = threading.Event(), threading.Event()
        self._closed = False
        self._listener = threading.Thread(target=self._listen, name="embrace_fx liveness check", daemon=True)
        self._listener.start()

    def close(self) -> None:
        """Ends the thread. A thread that reads the store while the interpreter exits would abort the process."""
        self._closed = True
        self._wake.set()
        if self._listener is not threading.current_thread():
            self._listener.join(_FAREWELL_S)

    def missing(self) -> list[int]:
        """Starts a check, or takes part in one that another rank has started. Returns the ranks that do not respond."""
        if threading.current_thread() is self._listener:  # the liveness thread cannot wait for its own check
            return []
        self._wake.set()
        self._decided.wait()
        return self._missing

    def _listen(self) -> None:
        """Runs the thread: waits until a rank starts a check, and takes part in it."""
        try:
            while not self._wake.wait(_LISTEN_S) and not self._store.check([self._called]):
                for look in list(self.looks):
                    look(self._store)
            if not self._closed:
                self._missing = self._run_check()
        except RuntimeError:
            self._missing = [0]  # rank 0 is lost: without a launcher, the store ran in its process
        self._decided.set()

    def _run_check(self) -> list[int]:
        """Starts or joins a check. Reports this rank's status, and returns the ranks that do not report their status in
        time.
        """
        self._store.set(self._called, "1")
        progress = self._progress
        own = RankStatus(progress.launched, progress.launches, progress.preparations, place_of_main_thread())
        self._store.set(self._signatures[self.rank], json.dumps(to_plain(own)))
        self._poll(lambda: self._store.check(self._signatures) or self._store.check([self._verdict]), PATIENCE_S)
        if not self._store.check([self._verdict]):
            silent = [r for r, name in enumerate(self._signatures) if not self._store.check([name])]
            self._store.set(self._verdict, ",".join(map(str, silent)))
        missing = [int(r) for r in self._store.get(self._verdict).decode().split(",") if r]
        with contextlib.suppress(RuntimeError, ValueError):
            signed = {r: self._store.get(self._signatures[r]) for r in range(self.world_size) if r not in missing}
            self._statuses = {r: from_plain(RankStatus, json.loads(text)) for r, text in signed.items()}
        with contextlib.suppress(RuntimeError):  # the store may end, if rank 0 runs it and ends
            self._store.set(self._readers[self.rank], "1")
            living = [name for r, name in enumerate(self._readers) if r not in missing]
            self._poll(lambda: self._store.check(living), _FAREWELL_S)
        return missing

    def _poll(self, condition: Callable[[], bool], patience_s: float) -> None:
        """Calls `condition` repeatedly until it returns True, but for at most `patience_s` seconds."""
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline and not condition():
            time.sleep(_POLL_S)

    def raise_named(self, error: RuntimeError, what: str) -> NoReturn:
        """Runs a check, and raises `DeadRank` or `StuckRank` with a text that names the dead or stuck ranks.

        Args:
            error: the error of the collective that failed, which becomes the cause of the raised error.
            what: the name of the collective.
        """
        if missing := self.missing():
            raise DeadRank(
                f"Rank(s) {', '.join(map(str, missing))} no longer answer rank {self.rank} ({error}). Check their "
                "logs, and restart the job from a checkpoint."
            ) from error
        raise StuckRank(
            f"A collective timed out on rank {self.rank}: {self._who_is_stuck(what)} ({error}). Check the source lines "
            "named here, and restart the job from a checkpoint."
        ) from error

    def _who_is_stuck(self, what: str) -> str:
        """Returns a clause for an error message. It says which ranks are behind this rank, and which collective each of
        them has not launched.

        Args:
            what: the name of the collective that failed.
        """
        own, found = self._progress.launched, []
        for r, each in self._statuses.items():
            absent = [name for name, step in own.items() if each.launched.get(name, 0) < step]
            if absent:
                name = what if what in absent else absent[0]
                found.append(
                    f"rank {r} has not launched {name!r} of step {own[name] - self._progress.preparations}: it is in "
                    f"{each.place}, and {each.last_launch}"
                )
        if found:
            return "; ".join(found)
        places = "; ".join(f"rank {r} is in {each.place}" for r, each in self._statuses.items() if r != self.rank)
        return f"all ranks are alive: {places}" if places else "a rank no longer takes part in collectives"


class NamesFailedRanks(contextlib.AbstractContextManager[None]):
    """A context for a collective. If the collective raises a `RuntimeError`, the context raises an error that names the
    dead or stuck ranks instead.

    Args:
        liveness: finds the dead or stuck ranks.
        what: the name under which `LaunchLog` records the collective.
    """

    def __init__(self, liveness: LivenessCheck, what: object = "") -> None:
        self._liveness, self._what = liveness, what

    def __enter__(self) -> None:
        """Does nothing."""

    def __exit__(self, kind: Any, error: BaseException | None, *_: object) -> None:
        if isinstance(error, RuntimeError) and not is_known_to_all_ranks(error):
            self._liveness.raise_named(error, str(self._what))
