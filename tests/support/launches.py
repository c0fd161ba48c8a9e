"""Launches by name, and a link whose transfers end when a test says so."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch.futures import Future

from embrace_fx.runtime.launch.launcher import Launcher, Ticket
from embrace_fx.runtime.launch.recorder import Recorder
from embrace_fx.runtime.ranks.communicator import InFlight
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
LONG_S, SHORT_S = 10.0, 0.05
"""Longer than anything takes; long enough for a thread to do what it should not."""


class Work:
    """A collective under way, as torch hands it out."""

    def __init__(self) -> None:
        self.future: Future[Any] = Future()

    def get_future(self) -> Future[Any]:
        return self.future


class Link:
    """What is launched, in order; each launch is on its way until the test ends it.

    Args:
        instant: launches complete on the spot.
    """

    def __init__(self, instant: bool = False) -> None:
        self.launched: list[str] = []
        self._instant = instant
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
        future = self._works.pop(name).future
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    def expect(self, *names: str) -> None:
        """Waits for these launches, in this order, and sees that no other follows."""
        with self._changed:
            self._changed.wait_for(lambda: len(self.launched) >= len(names), LONG_S)
        time.sleep(SHORT_S)
        assert self.launched == list(names)


def make(order: tuple[OperationId, ...] = ORDER, recorder: Recorder | None = None) -> Launcher:
    return Launcher(order, OF_FORWARD, recorder or Recorder())


def submit(launcher: Launcher, link: Link, *names: str) -> list[Ticket]:
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
