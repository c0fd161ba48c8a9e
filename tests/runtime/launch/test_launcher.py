"""The launcher: one order on every rank, few launches on the way, and nothing that waits for what never comes."""

from __future__ import annotations

import contextlib
import threading
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch.futures import Future

from embrace_fx.runtime.launch import launch_queue
from embrace_fx.runtime.launch.launch_queue import LARGE_BYTES, Dropped
from embrace_fx.runtime.ranks.communicator import InFlight
from tests.support.launches import ID, LONG_S, NAMES, ORDER, Link, make, rest, stand_still, submit, windows


@pytest.mark.parametrize(
    ("sent_bytes", "thread"), [(LARGE_BYTES - 1, "MainThread"), (LARGE_BYTES, "embrace_fx launcher")]
)
def test_what_is_large_leaves_beside_the_thread_that_submits_it(sent_bytes: int, thread: str) -> None:
    launcher, threads = make(), list[str]()

    def launch() -> InFlight:
        threads.append(threading.current_thread().name)
        return InFlight(torch.zeros(1), None)

    rest(launcher)
    launcher.submit(ID["early rows"], launch, sent_bytes).wait()
    assert threads == [thread]


def test_only_a_wait_for_what_has_not_ended_is_recorded() -> None:
    launcher, link = make(), Link(instant=True)
    (ticket,) = submit(launcher, link, "early rows")
    ticket.wait()
    with mock.patch.object(launcher.recorder, "timed", return_value=torch.zeros(0)) as timed:
        assert launcher.wait(ticket).numel()
        launcher.wait(SimpleNamespace(done=False, id=ticket.id, wait=None))  # type: ignore[arg-type]
    assert timed.call_count == 1


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
    launcher.skip([ID["early rows"]])
    link.expect()
    launcher.skip([ID["prior"]])
    link.expect("bucket 0")


def test_after_the_backward_only_launches_of_the_forward_are_to_come() -> None:
    launcher, link = make(), Link(instant=True)
    submit(launcher, link, "prior", "bucket 1")
    launcher.end_backward()
    link.expect("prior")
    submit(launcher, link, "ids")
    link.expect("prior", "ids", "bucket 1")


def test_another_order_holds_from_the_next_window_on() -> None:
    launcher, link = make(), Link(instant=True)
    launcher.reorder(reversed(ORDER))
    tickets = submit(launcher, link, *reversed(NAMES))
    link.expect(*NAMES)
    launcher.open_window()
    tickets += submit(launcher, link, *NAMES)
    link.expect(*NAMES, *reversed(NAMES))
    assert {ticket.id for ticket in tickets} == set(ORDER)


def test_one_is_on_the_way_until_it_takes_longer_than_before(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: now_s[0], monotonic=time.monotonic, sleep=time.sleep)
    monkeypatch.setattr(launch_queue, "time", clock)
    launcher, link = make(), Link()
    submit(launcher, link, "early rows")
    now_s[0] = 1.0
    link.end("early rows")
    submit(launcher, link, "prior", "bucket 0")  # both are on the way, because nobody knows how long they take
    link.expect(*NAMES[:3])
    link.end("bucket 0")
    link.end("prior")
    launcher.open_window()
    submit(launcher, link, *NAMES[:3])
    for late_s, launched in ((0.0, NAMES[:1]), (1.4, NAMES[:1]), (1.5, NAMES[:2])):
        now_s[0] = 1.0 + late_s
        launcher.queue.issue()
        assert link.launched == [*NAMES[:3], *launched]
    link.end("early rows")
    assert link.launched == [*NAMES[:3], *NAMES[:2]]  # "prior" has taken no time before, and is not late yet
    assert {str(launch): s for launch, s in launcher.queue.took_s.items()} == {
        **dict.fromkeys(NAMES[:3], 0),
        "early rows": 1,
    }


@pytest.mark.parametrize("agreed", [True, False])
def test_launches_of_a_backward_wait_until_all_ranks_are_known_to_be_in_it(agreed: bool) -> None:
    launcher, link, here = make(), Link(instant=True), Future[None]()
    launcher.open_window(held=True)
    launcher.release_after(here, lambda: agreed)
    tickets = submit(launcher, link, "early rows", "prior")
    link.expect()
    here.set_result(None)
    tickets += submit(launcher, link, "bucket 0")
    for ticket in tickets:
        with contextlib.nullcontext() if agreed else pytest.raises(Dropped):
            ticket.wait()
    link.expect(*(NAMES[:3] if agreed else ()))


@given(windows())
def test_all_that_is_submitted_is_launched_in_order(windows: list[tuple[list[str], list[str]]]) -> None:
    launcher, link = make(), Link(instant=True)
    tickets, expected = [], []
    for submitted, skipped in windows:
        launcher.skip([ID[name] for name in skipped])
        tickets += submit(launcher, link, *submitted)
        expected += [name for name in NAMES if name in submitted]
        launcher.open_window()
    for ticket in tickets:
        ticket.wait()
    assert link.launched == expected


def test_who_waits_is_not_held_up_by_what_is_still_to_be_submitted() -> None:
    launcher, link = make(), Link(instant=True)
    _, delayed, *_ = submit(launcher, link, "prior", "delayed", "bucket 1", "rows")
    link.expect()
    with launcher.flushing():
        delayed.wait()
    link.expect("delayed")
    submit(launcher, link, "early rows")
    link.expect("delayed", "early rows", "prior")


def test_nothing_but_what_is_waited_for_overtakes_what_is_still_to_be_submitted() -> None:
    """Another rank need not be in a hurry: with other launches on its way it would wait for this one's."""
    launcher, link = make(), Link(instant=True)
    *_, last = submit(launcher, link, "delayed", "bucket 1", "bucket 0")
    with launcher.flushing():
        last.wait()
    link.expect("bucket 0")


def test_the_order_holds_again_after_a_hurry() -> None:
    launcher, link = make(), Link(instant=True)
    with launcher.flushing():
        pass
    submit(launcher, link, "delayed")
    link.expect()


def test_a_hurry_into_the_next_window_keeps_the_order_of_a_class() -> None:
    launcher, link = make(), Link()
    submit(launcher, link, *NAMES)
    launcher.open_window()
    submit(launcher, link, "prior", "bucket 0", "early rows")
    with launcher.flushing():
        for name in (*NAMES, "early rows", "prior", "bucket 0"):
            link.end(name)
    assert link.launched == [*NAMES, "early rows", "prior", "bucket 0"]


def test_where_nothing_moves_classes_overtake_each_other() -> None:
    launcher, link = make(), Link(instant=True)
    submit(launcher, link, "prior", "delayed", "rows")
    link.expect()
    stand_still(launcher)
    link.expect("delayed")
    stand_still(launcher)
    link.expect("delayed")  # "prior" and "rows" wait for "early rows", which may still be submitted
    submit(launcher, link, "early rows")
    link.expect("delayed", "early rows", "prior")
    stand_still(launcher)
    link.expect("delayed", "early rows", "prior", "rows")


def test_where_nothing_moves_more_are_on_the_way() -> None:
    """The other ranks may have started launches of other classes first."""
    launcher, link = make(), Link()
    submit(launcher, link, "early rows", "prior", "bucket 0")
    link.expect("early rows", "prior")
    stand_still(launcher)
    link.expect("early rows", "prior", "bucket 0")


def test_a_pause_in_which_nothing_waits_is_no_standstill(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr(launch_queue, "STANDSTILL_S", LONG_S)
    clock = SimpleNamespace(perf_counter=lambda: now_s[0], monotonic=time.monotonic, sleep=time.sleep)
    monkeypatch.setattr(launch_queue, "time", clock)
    launcher, link = make(), Link()
    submit(launcher, link, "early rows")
    link.expect("early rows")
    link.end("early rows")
    now_s[0] = 10 * LONG_S
    submit(launcher, link, "bucket 0")
    link.expect("early rows")
