"""The launcher on streams: the order of the thread's launcher, by events, and never a wait of the host."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Mapping
from functools import partial

import pytest
import torch
from hypothesis import given

from embrace_fx.runtime.launch.launch_queue import Ticket
from embrace_fx.runtime.launch.launcher import Launcher
from embrace_fx.runtime.launch.recorder import Recorder
from embrace_fx.runtime.launch.stream_queue import StreamQueue
from embrace_fx.runtime.ranks.communicator import Communicator, InFlight
from embrace_fx.runtime.ranks.groups import LANE_GROUP
from embrace_fx.vocabulary.operation_id import Lane
from embrace_fx.vocabulary.schedule import IN_FLIGHT
from tests.support.launches import ID, LANE_OF, LONG_S, NAMES, OF_FORWARD, ORDER, windows
from tests.support.streams.noted_streams import NotedStreams
from tests.support.streams.stream_order import hazards, too_many_in_flight
from tests.support.streams.stream_program import Launch, StreamProgram, WaitEvent


class Device:
    """A launcher with streams that record what is enqueued."""

    def __init__(
        self,
        recorder: Recorder | None = None,
        channel: Mapping[Lane, str] = LANE_GROUP,
        streams: NotedStreams | None = None,
    ) -> None:
        self.streams = streams or NotedStreams()
        self.left = threading.Event()  # set when a launch is made
        self.queue = StreamQueue(recorder or Recorder(), self.streams, channel)
        self.launcher = Launcher(ORDER, OF_FORWARD, self.queue, Communicator(None))

    def submit(self, *names: str) -> list[Ticket]:
        return [self.launcher.submit(ID[name], self._launch(name), 100) for name in names]

    def _launch(self, name: str) -> Callable[[], InFlight]:
        # `launch` must not refer to `self`, because pending launches would keep it alive.
        sent, streams, left = torch.ones(2), self.streams, self.left

        def launch() -> InFlight:
            streams.steps.append(Launch(LANE_OF[name], name))
            left.set()
            return InFlight(torch.tensor(len(name)), None, reads=(sent,))

        return launch

    @property
    def launched(self) -> list[str]:
        return [launch.op for launch in self.program().launches()]

    def program(self) -> StreamProgram:
        return self.streams.program("launched by hand")


def test_a_launch_waits_for_where_it_was_submitted_and_for_the_one_before_on_another_stream() -> None:
    device = Device()
    device.submit("bucket 0")
    assert device.launched == []
    device.submit("early rows", "prior")
    assert device.launched == ["early rows", "prior", "bucket 0"]
    events = {step.event.partition(" #")[0] for step in device.program().steps if isinstance(step, WaitEvent)}
    assert IN_FLIGHT == 1
    assert events == {"bucket 0 ready", "early rows ready", "prior ready", "prior done"}
    assert hazards(device.program()) == []


@given(windows())
def test_all_that_is_submitted_is_launched_in_order_and_few_are_on_the_way(
    windows: list[tuple[list[str], list[str]]],
) -> None:
    device, expected = Device(), []

    for submitted, skipped in windows:
        device.launcher.skip([ID[name] for name in skipped])
        device.submit(*submitted)
        expected += [name for name in NAMES if name in submitted]
        device.launcher.open_window()

    assert device.launched == expected
    assert device.queue.was_in_order()
    assert hazards(device.program()) == []
    assert too_many_in_flight(device.program(), IN_FLIGHT) == []


def test_to_wait_for_what_is_held_back_launches_it_out_of_turn() -> None:
    device = Device()
    early, bucket = device.submit("early rows", "bucket 0")
    bucket.wait()
    assert device.launched == ["early rows", "bucket 0"]  # "prior" may still be submitted
    assert not device.queue.was_in_order()
    assert device.queue.was_in_order()  # asking resets the record
    early.wait()


def test_a_class_keeps_its_order_whoever_waits() -> None:
    device = Device()
    (rows,) = device.submit("rows")
    with pytest.raises(RuntimeError, match="'rows' was awaited before it could be launched"):
        rows.wait()


def test_no_stream_waits_for_a_launch_of_a_later_place() -> None:
    """On another rank, the later launch may wait for the earlier one."""
    device = Device()
    device.submit("bucket 1", "delayed")
    device.queue.issue(out_of_turn=True)  # as waiting for a launch does
    assert device.launched == ["delayed"]
    device.submit("early rows", "prior", "bucket 0", "ids", "rows")

    assert device.launched[0] == "delayed"
    place = {name: k for k, name in enumerate(NAMES)}
    waits: list[str] = []
    for step in device.program().steps:
        if isinstance(step, WaitEvent) and " done #" in step.event:
            waits.append(step.event.partition(" done")[0])
        elif isinstance(step, Launch):
            assert all(place[name] < place[step.op] for name in waits), (step.op, waits)
            waits = []
    assert not device.queue.was_in_order()


def test_what_no_schedule_orders_leaves_between_what_was_issued_and_what_will_be() -> None:
    device = Device()
    device.submit("early rows")
    assert device.queue.in_turn is not None
    with device.streams.on("ids", "flags"), device.queue.in_turn():
        device.streams.steps.append(Launch("ids", "flags"))
    with device.streams.on("ids", "more flags"), device.queue.in_turn():
        device.streams.steps.append(Launch("ids", "more flags"))
    device.submit("prior", "bucket 0")
    assert device.launched == ["early rows", "flags", "more flags", "prior", "bucket 0"]
    assert too_many_in_flight(device.program(), IN_FLIGHT) == []


def test_classes_of_one_channel_keep_one_order_whoever_is_in_a_hurry() -> None:
    """They meet on one communicator: where one of them overtook the other on a rank, neither would be what it is."""
    device = Device(channel={"ids": "a", "embedding": "a", "dense": "b", "delayed": "b"})
    device.submit("delayed", "rows")
    device.queue.issue(out_of_turn=True)
    assert device.launched == []
    device.submit("early rows", "prior", "bucket 0")
    device.queue.issue(out_of_turn=True)
    assert device.launched == ["early rows", "prior", "bucket 0", "delayed"]
    device.submit("ids")
    device.queue.issue(out_of_turn=True)
    assert device.launched[4:] == ["ids", "rows"]


def test_all_ranks_catch_up_together() -> None:
    device = Device()
    device.submit("delayed", "bucket 0")
    device.queue.enqueue_submitted()
    assert device.launched == ["bucket 0", "delayed"]
    assert device.queue.was_in_order()
    device.submit("bucket 1", "ids")
    device.launcher.close()
    assert not device.queue.unwaited


@pytest.mark.parametrize("first", [["early rows", "bucket 0"], ["early rows", "bucket 0", "delayed"], ["delayed"]])
def test_what_left_out_of_turn_is_before_all_that_leaves_once_all_ranks_have_caught_up(first: list[str]) -> None:
    """If a loop reads a dense parameter, delayed gradients leave; late rows of the next forward stand before them."""
    device = Device()
    device.submit(*first)
    device.queue.issue(out_of_turn=True)  # as waiting for a launch does
    assert not device.queue.was_in_order()
    device.queue.enqueue_submitted()
    device.submit(*(name for name in NAMES if name not in first))

    assert too_many_in_flight(device.program(), IN_FLIGHT) == []


class Store(dict[str, bytes]):
    """Replaces the store that the ranks share."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)


def test_what_one_rank_has_leave_out_of_its_turn_leaves_on_the_others_where_they_stand_there() -> None:
    """They may be in a barrier of the user's. In another place they would launch in another order than that rank."""
    asks, before, there, store = Device(), Device(), Device(), Store()
    _, ticket = asks.submit("bucket 0", "delayed")
    before.submit("delayed")
    there.submit("bucket 0", "delayed")

    ticket.wait()
    for device in (asks, before, there):
        device.queue.agree_on_order(store, "name")

    assert there.left.wait(LONG_S)
    with there.queue.lock:  # the lock is free once all launches are made
        assert there.launched == asks.launched == ["bucket 0", "delayed"]
    assert not there.queue.was_in_order()
    assert before.launched == []
    before.submit("bucket 0")
    before.queue.agree_on_order(store, "name")
    assert before.left.wait(LONG_S)


def test_however_long_nothing_moves_nothing_leaves_out_of_its_turn_by_itself() -> None:
    """Ranks that stand still do so at different times."""
    device, store = Device(), Store()
    device.submit("delayed")
    device.queue.agree_on_order(store, "name")
    device.queue.issue()
    assert device.launched == []
    assert device.queue.moved_s == float("inf")


def test_models_that_share_a_device_launch_in_the_order_of_the_calls() -> None:
    one = Device()
    other = Device(streams=one.streams)
    one.submit("early rows", "prior", "bucket 0")
    other.submit("early rows", "prior", "bucket 0")
    (ticket,) = other.submit("bucket 1")
    one.submit("delayed")
    ticket.wait()  # launched out of order
    one.submit("ids")
    assert too_many_in_flight(one.program(), IN_FLIGHT) == []
    assert other.queue.tells == (0, len(NAMES) - 4)


def test_a_backward_holds_nothing_back_if_models_share_a_device() -> None:
    """Another rank may not wait for the launch here. There it would leave after the other model's launches."""
    one, ranks = Device(), [Communicator(None) for _ in range(2)]
    shared = [one.queue.shares_device]
    one.streams.models.update(ranks)
    other = Device(streams=one.streams)
    one.launcher.open_window()
    shared += [one.queue.shares_device, other.queue.shares_device]
    assert shared == [False, True, True]
    (ticket,) = one.submit("bucket 1")  # comes after the ids, which only the next forward submits
    one.launcher.end_backward(holds=False)
    other.submit("early rows")

    ticket.wait()

    assert one.launched == ["bucket 1", "early rows"]
    assert one.queue.was_in_order()
    assert hazards(one.program()) == []
    assert too_many_in_flight(one.program(), IN_FLIGHT) == []
    ranks[0].close()
    one.launcher.open_window()
    assert not one.queue.shares_device


def test_what_a_launch_reads_lives_until_its_end_has_been_waited_for() -> None:
    device = Device()
    sent = torch.ones(2)
    alive = weakref.ref(sent)
    launch = partial(InFlight, torch.ones(1), None, None, (sent,))
    ticket = device.launcher.submit(ID["early rows"], launch, 0)
    del sent, launch
    gc.collect()
    assert alive() is not None
    ticket.wait()
    gc.collect()
    assert alive() is None


def test_what_nobody_waits_for_lives_until_it_is_waited_for_in_passing() -> None:
    device = Device()
    device.submit("early rows")
    for _ in range(3):
        device.launcher.open_window()
    waits = [step.event for step in device.program().steps if isinstance(step, WaitEvent) and step.stream == "compute"]
    assert [event.partition(" #")[0] for event in waits] == ["early rows done"]


def test_every_caller_hears_of_a_launch_that_fails() -> None:
    device = Device()

    def broken() -> InFlight:
        raise RuntimeError("no route to host")

    (held,) = device.submit("bucket 0")
    with pytest.raises(RuntimeError, match="no route to host"):
        device.launcher.submit(ID["early rows"], broken, 0)
    with pytest.raises(RuntimeError, match="no route to host"):
        device.submit("prior")
    with pytest.raises(RuntimeError, match="no route to host"):
        held.wait()
