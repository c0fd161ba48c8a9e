"""The launcher: one order on every rank, few launches on the way, and nothing that waits for what never comes."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.futures import Future

from embrace_fx.runtime.launch import launcher as launcher_module
from embrace_fx.runtime.launch.launcher import Launcher, Ticket
from embrace_fx.runtime.launch.recorder import Recorder
from embrace_fx.runtime.ranks.communicator import Communicator, InFlight
from embrace_fx.runtime.ranks.groups import LANE_GROUP
from embrace_fx.vocabulary.schedule import IN_FLIGHT, Lane, OperationId
from tests.support.ranks import run_ranks

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


@pytest.fixture(autouse=True)
def _no_standstill(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine must not look like one on which nothing moves."""
    monkeypatch.setattr(launcher_module, "STANDSTILL_S", 1e6)
    monkeypatch.setattr(launcher_module, "_FAREWELL_S", 2 * SHORT_S)  # what a test leaves on the way never completes


# -- the order ---------------------------------------------------------------------------------------------------------


def test_what_is_submitted_waits_for_its_turn() -> None:
    launcher, link = make(), Link(instant=True)

    submit(launcher, link, "bucket 0")
    link.expect()
    submit(launcher, link, "early rows", "prior")
    link.expect("early rows", "prior", "bucket 0")


def test_few_are_on_the_way() -> None:
    launcher, link = make(), Link()

    submit(launcher, link, *reversed(NAMES))
    assert IN_FLIGHT == 2
    link.expect("early rows", "prior")
    link.end("prior")
    link.expect("early rows", "prior", "bucket 0")
    link.end("bucket 0")
    link.end("early rows")
    link.expect(*NAMES[:5])


def test_a_ticket_yields_the_value_once_it_has_arrived() -> None:
    launcher, link = make(), Link()
    (ticket,) = submit(launcher, link, "early rows")
    found: list[Tensor] = []
    reader = threading.Thread(target=lambda: found.append(ticket.wait()))

    reader.start()
    link.expect("early rows")
    assert not found
    link.end("early rows")
    reader.join(LONG_S)

    assert ticket.done
    assert [int(value) for value in found] == [len("early rows")]
    assert 0 < ticket.started_s <= ticket.ended_s


def test_a_skipped_launch_holds_up_nothing() -> None:
    launcher, link = make(), Link(instant=True)

    submit(launcher, link, "bucket 0")
    launcher.skip(ID["early rows"])
    link.expect()
    launcher.skip(ID["prior"])
    link.expect("bucket 0")


def test_after_the_backward_only_launches_of_the_forward_are_to_come() -> None:
    launcher, link = make(), Link(instant=True)

    submit(launcher, link, "prior", "bucket 1")
    launcher.leave_backward()
    link.expect("prior")
    submit(launcher, link, "ids")
    link.expect("prior", "ids", "bucket 1")


def test_a_new_window_ends_the_one_before() -> None:
    launcher, link = make(), Link(instant=True)

    submit(launcher, link, "rows")
    launcher.open_window()
    submit(launcher, link, "early rows", "rows")
    link.expect("rows", "early rows")


def test_windows_follow_each_other() -> None:
    launcher, link = make(), Link()

    submit(launcher, link, "bucket 0", "rows", "early rows")
    launcher.open_window()
    submit(launcher, link, "prior")
    launcher.skip(ID["early rows"])
    link.expect("early rows", "bucket 0")
    link.end("early rows")
    link.expect("early rows", "bucket 0", "rows")
    link.end("bucket 0")
    link.expect("early rows", "bucket 0", "rows", "prior")


def test_a_forward_belongs_to_the_backward_before_it() -> None:
    launcher, link = make(), Link(instant=True)

    launcher.open_window()
    submit(launcher, link, "prior")
    launcher.enter_forward()
    submit(launcher, link, "rows", "ids")
    link.expect("prior", "ids", "rows")


def test_a_forward_without_a_backward_before_it_has_a_window_of_its_own() -> None:
    launcher, link = make(), Link(instant=True)

    for _ in range(2):
        launcher.enter_forward()
        submit(launcher, link, "ids", "rows")

    link.expect("ids", "rows", "ids", "rows")


def test_another_order_holds_from_the_next_window_on() -> None:
    launcher, link = make(), Link(instant=True)

    launcher.reorder(reversed(ORDER))
    tickets = submit(launcher, link, *reversed(NAMES))
    link.expect(*NAMES)
    launcher.open_window()
    tickets += submit(launcher, link, *NAMES)
    link.expect(*NAMES, *reversed(NAMES))
    assert {ticket.id for ticket in tickets} == set(ORDER)


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


@given(windows())
def test_all_that_is_submitted_is_launched_in_order(windows: list[tuple[list[str], list[str]]]) -> None:
    launcher, link = make(), Link(instant=True)
    tickets, expected = [], []

    for submitted, skipped in windows:
        launcher.skip(*(ID[name] for name in skipped))
        tickets += submit(launcher, link, *submitted)
        expected += [name for name in NAMES if name in submitted]
        launcher.open_window()
    for ticket in tickets:
        ticket.wait()

    assert link.launched == expected


# -- where the order gives way -----------------------------------------------------------------------------------------


def test_who_waits_is_not_held_up_by_what_is_still_to_be_submitted() -> None:
    launcher, link = make(), Link(instant=True)
    submit(launcher, link, "prior", "delayed", "bucket 1", "rows")

    link.expect()
    with launcher.hurrying():
        link.expect("delayed")  # the others wait for launches of their classes, which keep their order
        submit(launcher, link, "early rows")
        link.expect("delayed", "early rows", "prior", "rows")


def test_the_order_holds_again_after_a_hurry() -> None:
    launcher, link = make(), Link(instant=True)

    with launcher.hurrying():
        pass
    submit(launcher, link, "delayed")

    link.expect()


def test_a_hurry_into_the_next_window_keeps_the_order_of_a_class() -> None:
    launcher, link = make(), Link()
    submit(launcher, link, *NAMES)
    launcher.open_window()
    submit(launcher, link, "prior", "bucket 0", "early rows")

    with launcher.hurrying():
        for name in (*NAMES, "early rows", "prior", "bucket 0"):
            while name not in link._works:
                time.sleep(0.001)
            link.end(name)

    assert link.launched == [*NAMES, "early rows", "prior", "bucket 0"]


def test_where_nothing_moves_classes_overtake_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher_module, "STANDSTILL_S", 0.1)
    launcher, link = make(), Link(instant=True)

    before = time.perf_counter()
    _, delayed, _ = submit(launcher, link, "prior", "delayed", "rows")
    link.expect("delayed")
    time.sleep(0.3)

    assert link.launched == ["delayed"]  # "prior" and "rows" stay behind "early rows", which may still come
    assert delayed.started_s - before >= 0.1
    submit(launcher, link, "early rows")
    link.expect("delayed", "early rows", "prior", "rows")


def test_where_nothing_moves_more_are_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks may have launched other classes first."""
    monkeypatch.setattr(launcher_module, "STANDSTILL_S", 0.1)
    launcher, link = make(), Link()

    submit(launcher, link, "early rows", "prior", "bucket 0")

    link.expect("early rows", "prior", "bucket 0")


# -- errors, the end ---------------------------------------------------------------------------------------------------


def broken() -> InFlight:
    raise RuntimeError("no route to host")


def test_every_waiter_hears_of_a_launch_that_fails() -> None:
    launcher, link = make(), Link()
    early, prior = submit(launcher, link, "early rows", "prior")
    link.expect("early rows", "prior")
    heard: list[str] = []

    def wait() -> None:
        with pytest.raises(RuntimeError) as raised:
            early.wait()
        heard.append(str(raised.value))

    waiter = threading.Thread(target=wait)
    waiter.start()
    last = launcher.submit(ID["bucket 0"], broken, 0)
    link.end("prior")
    waiter.join(LONG_S)

    assert heard == ["no route to host"]
    for ticket in (prior, last, *submit(launcher, link, "ids")):
        with pytest.raises(RuntimeError, match="no route to host"):
            ticket.wait()


def test_every_waiter_hears_of_a_collective_that_fails_under_way() -> None:
    launcher, link = make(), Link()
    early, prior = submit(launcher, link, "early rows", "prior")
    link.expect("early rows", "prior")

    link.end("early rows", RuntimeError("connection closed by peer"))

    for ticket in (early, prior):
        with pytest.raises(RuntimeError, match="connection closed by peer"):
            ticket.wait()


@pytest.mark.parametrize("names", [(), ("early rows",), ("prior",)], ids=["unused", "on the way", "waiting"])
def test_the_thread_ends_with_the_launcher(names: tuple[str, ...]) -> None:
    before = set(threading.enumerate())
    launcher, link = make(), Link()
    (thread,) = set(threading.enumerate()) - before
    submit(launcher, link, *names)
    time.sleep(SHORT_S)

    del launcher
    gc.collect()
    thread.join(LONG_S)

    assert not thread.is_alive()


def test_what_is_under_way_ends_before_the_thread_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher_module, "_FAREWELL_S", LONG_S)
    launcher, link = make(), Link()
    tickets = submit(launcher, link, "early rows", "prior", "bucket 0", "rows")
    link.expect("early rows", "prior")

    def end_all() -> None:
        for name in ("early rows", "prior", "bucket 0", "rows"):
            while name not in link._works:
                time.sleep(0.001)
            link.end(name)

    threading.Thread(target=end_all).start()
    del launcher
    gc.collect()

    assert all(ticket.done for ticket in tickets)


class LateFuture:
    """Of a collective whose thread drops the callback some time after it has run."""

    def __init__(self) -> None:
        self.dropped_s = 0.0

    def value(self) -> None:
        """Nothing went wrong."""

    def add_done_callback(self, callback: Callable[[object], None]) -> None:
        threading.Thread(target=self._run, args=[[callback]]).start()

    def _run(self, callbacks: list[Callable[[object], None]]) -> None:
        callbacks[0](self)
        time.sleep(SHORT_S)
        callbacks.clear()
        self.dropped_s = time.monotonic()


def test_the_end_comes_after_the_threads_of_collectives_have_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take the interpreter to do so, and a process whose interpreter is gone would end with SIGABRT."""
    monkeypatch.setattr(launcher_module, "_FAREWELL_S", LONG_S)
    launcher, future = make(), LateFuture()
    launched = InFlight(torch.zeros(1), SimpleNamespace(get_future=lambda: future))
    launcher.submit(ID["early rows"], lambda: launched, 0)

    launcher._stop()

    assert 0.0 < future.dropped_s <= time.monotonic()


# -- the recorder ------------------------------------------------------------------------------------------------------


def test_the_recorder_hears_of_each_launch() -> None:
    recorder = Recorder()
    launcher, link = make(recorder=recorder), Link()
    recorder.start()
    (before,) = submit(launcher, link, "early rows")
    recorder.window()
    (ticket,) = submit(launcher, link, "prior")
    link.expect("early rows", "prior")
    for name in ("prior", "early rows"):
        link.end(name)
    ticket.wait()

    (told,) = recorder.stop().transfers
    assert before.window == -1  # submitted before the first window
    assert (told.launch, told.window, told.sent_bytes) == (ID["prior"], 0, 100)
    assert (told.started_s, told.ended_s) == (ticket.started_s, ticket.ended_s)


# -- ranks -------------------------------------------------------------------------------------------------------------


def submits_at_its_own_pace(rank: int, world_size: int, standstill_s: float) -> dict[str, list[str]]:
    """Windows of sums. A rank whose launches of a class came in another order would add up other things."""
    communicator = Communicator(dist.group.WORLD)
    communicator.open_lanes()
    launcher_module.STANDSTILL_S, before = standstill_s, launcher_module.STANDSTILL_S
    by_class: dict[str, list[str]] = {launch.lane: [] for launch in ORDER}
    shared, own = random.Random(0), random.Random(rank)
    launcher = make()

    def sums(each: OperationId, window: int) -> Callable[[], InFlight]:
        def launch() -> InFlight:
            by_class[each.lane].append(f"{each} {window}")
            return communicator.all_reduce_(torch.tensor([term(each, window)]), "sum", LANE_GROUP[each.lane])

        return launch

    submissions: list[tuple[Ticket, int]] = []
    for window in range(12):
        submitted = [each for each in ORDER if shared.random() < 0.7]
        hurries = shared.random() < 0.2
        own.shuffle(submitted)
        for each in submitted:
            time.sleep(own.choice([0.0, 0.0, 0.004]))
            ticket = launcher.submit(each, sums(each, window), 0)
            submissions.append((ticket, world_size * term(each, window)))
        launcher.open_window()
        if hurries:
            with launcher.hurrying():
                for ticket, _ in submissions:
                    ticket.wait()
    for ticket, expected in submissions:
        assert ticket.wait().item() == expected
    launcher_module.STANDSTILL_S = before
    return by_class


def term(launch: OperationId, window: int) -> int:
    """Another number for each launch."""
    return 100 * window + ORDER.index(launch)


@pytest.mark.parametrize("standstill_s", [1e6, 0.002], ids=["in order", "overtaking"])
def test_ranks_launch_each_class_in_the_same_order(standstill_s: float) -> None:
    first, *others = run_ranks(3, submits_at_its_own_pace, standstill_s)

    assert all(other == first for other in others)
    assert min(map(len, first.values())) > 5
