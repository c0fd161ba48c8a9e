"""How a launcher ends: launches that fail, what is under way, and its thread."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from embrace_fx.runtime.launch import launch_queue
from embrace_fx.runtime.ranks.communicator import InFlight
from tests.support.cases import long_but
from tests.support.launches import ID, LONG_S, Link, make, rest, submit


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


@pytest.mark.parametrize(
    "names", long_but(("waiting",), {"unused": ((),), "on the way": (("early rows",),), "waiting": (("prior",),)})
)
def test_the_thread_ends_with_the_launcher(names: tuple[str, ...]) -> None:
    before = set(threading.enumerate())
    launcher, link = make(), Link()
    (thread,) = set(threading.enumerate()) - before
    submit(launcher, link, *names)
    rest(launcher)
    del launcher
    gc.collect()
    thread.join(LONG_S)
    assert not thread.is_alive()


def test_what_is_under_way_ends_before_the_thread_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_queue, "_FAREWELL_S", LONG_S)
    launcher, link = make(), Link()
    tickets = submit(launcher, link, "early rows", "prior", "bucket 0", "rows")
    link.expect("early rows", "prior")

    def end_all() -> None:
        for name in ("early rows", "prior", "bucket 0", "rows"):
            link.end(name)

    threading.Thread(target=end_all).start()
    del launcher
    gc.collect()

    assert all(ticket.done for ticket in tickets)


class LateFuture:
    """The future of a collective whose thread releases the callback only when the test allows it."""

    def __init__(self) -> None:
        self.may_drop, self.dropped = threading.Event(), threading.Event()

    def value(self) -> None:
        """Returns None: the collective succeeded."""

    def add_done_callback(self, callback: Callable[[object], None]) -> None:
        threading.Thread(target=self._run, args=[[callback]]).start()

    def _run(self, callbacks: list[Callable[[object], None]]) -> None:
        callbacks[0](self)
        self.may_drop.wait(LONG_S)
        callbacks.clear()
        self.dropped.set()


def test_the_end_comes_after_the_threads_of_collectives_have_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Releasing a callback needs the interpreter: after its end, the process would die from SIGABRT."""
    monkeypatch.setattr(launch_queue, "_FAREWELL_S", LONG_S)
    launcher, future = make(), LateFuture()
    launched = InFlight(torch.zeros(1), SimpleNamespace(get_future=lambda: future))
    launcher.submit(ID["early rows"], lambda: launched, 0)

    looked: list[bool] = []

    def sleep(_: float) -> None:
        looked.append(future.dropped.is_set())
        future.may_drop.set()
        future.dropped.wait(LONG_S)

    monkeypatch.setattr(
        launch_queue, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic, perf_counter=time.perf_counter)
    )
    launcher.queue._end()

    assert looked[0] is False
    assert future.dropped.is_set()
