"""Launches by name, and a link whose transfers end when a test says so."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch.futures import Future

from embrace_fx.runtime.launch import launch_queue
from embrace_fx.runtime.launch.launch_queue import Ticket
from embrace_fx.runtime.launch.launcher import Launcher
from embrace_fx.runtime.launch.recorder import Recorder
from embrace_fx.runtime.ranks.communicator import Communicator, InFlight
from embrace_fx.vocabulary.operation_id import Lane, OperationId

LANE_OF: dict[str, Lane] = {
    "early rows": "embedding",
    "prior": "embedding",
    "bucket 0": "dense",
    "delayed": "delayed",
    "ids": "ids",
    "bucket 1": "dense",
    "rows": "embedding",
}

NAMES = tuple(LANE_OF)
ORDER = tuple(OperationId("all_reduce", name, lane=lane) for name, lane in LANE_OF.items())
ID = {str(each): each for each in ORDER}
OF_FORWARD = (ID["ids"], ID["rows"])
LONG_S = 10.0
"""Longer than anything takes."""


class Work:
    """A collective under way, as torch hands it out."""

    def __init__(self) -> None:
        self.future: Future[Any] = Future()

    def get_future(self) -> Future[Any]:
        return self.future


class Watched(threading.Condition):
    """A launcher's condition, which tells when its thread has seen all that has changed, and waits for more."""

    def __init__(self, lock: threading.RLock) -> None:
        super().__init__(lock)
        self._told, self._seen = 0, -1
        self._rests = threading.Condition()

    def notify_all(self) -> None:
        self._told += 1
        super().notify_all()

    def wait(self, timeout: float | None = None) -> bool:
        if threading.current_thread().name == "embrace_fx launcher":
            with self._rests:
                self._seen = self._told
                self._rests.notify_all()
        return super().wait(timeout)

    def rest(self) -> None:
        """Waits until the thread has launched whatever is due."""
        with self._rests:
            assert self._rests.wait_for(lambda: self._seen == self._told, LONG_S)


class Link:
    """What is launched, in order; each launch is on its way until the test ends it.

    Args:
        instant: launches complete on the spot.
    """

    def __init__(self, instant: bool = False) -> None:
        self.launched: list[str] = []
        self._instant = instant
        self.rest: Callable[[], None] = lambda: None  # waits until all launches that are due have been made
        self._works: dict[str, Work] = {}
        self._changed = threading.Condition()

    def launch(self, name: str) -> Callable[[], InFlight]:
        def on_the_way() -> InFlight:
            with self._changed:
                self._works[name] = work = Work()
                self.launched.append(name)
                self._changed.notify_all()
            return InFlight(torch.tensor(len(name)), None if self._instant else work)

        return on_the_way

    def end(self, name: str, error: Exception | None = None) -> None:
        """Ends a launch, once it is on its way."""
        with self._changed:
            assert self._changed.wait_for(lambda: name in self._works, LONG_S)
            future = self._works.pop(name).future
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    def expect(self, *names: str) -> None:
        """Waits for these launches, in this order, and sees that no other follows."""
        self.rest()
        assert self.launched == list(names)


def make(order: tuple[OperationId, ...] = ORDER, recorder: Recorder | None = None) -> Launcher:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            launch_queue,
            "threading",
            SimpleNamespace(Condition=Watched, RLock=threading.RLock, Thread=threading.Thread),
        )
        queue = launch_queue.LaunchQueue(recorder or Recorder())
        return Launcher(order, OF_FORWARD, queue, Communicator(None))


def rest(launcher: Launcher) -> None:
    """Waits until a launcher has launched whatever is due."""
    changed = launcher.queue.changed
    assert isinstance(changed, Watched)
    changed.rest()


def stand_still(launcher: Launcher) -> None:
    """Lets a launcher believe that nothing has moved for long."""
    with launcher.queue.changed:
        launcher.queue.moved_s = float("-inf")
        launcher.queue.changed.notify_all()


def submit(launcher: Launcher, link: Link, *names: str) -> list[Ticket]:
    changed = launcher.queue.changed
    link.rest = changed.rest if isinstance(changed, Watched) else lambda: None
    return [launcher.submit(ID[name], link.launch(name), 100) for name in names]


@st.composite
def windows(draw: st.DrawFn) -> list[tuple[list[str], list[str]]]:
    """Windows: what is submitted, and what is skipped, each in the order in which that happens."""
    found = []
    for _ in range(draw(st.integers(1, 4))):
        submitted = draw(st.lists(st.sampled_from(NAMES), unique=True))
        others = [name for name in NAMES if name not in submitted]
        skipped = draw(st.lists(st.sampled_from(others), unique=True)) if others else []
        found.append((submitted, skipped))
    return found
