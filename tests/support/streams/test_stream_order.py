"""The checker of stream programs finds whatever is not ordered by an event."""

from __future__ import annotations

import re

import pytest

from tests.support.streams.stream_order import hazards
from tests.support.streams.stream_program import Kernels, Launch, Record, Step, StreamProgram, WaitEvent


def program(*steps: Step) -> StreamProgram:
    return StreamProgram("a program", steps)


MADE = Kernels("backward", writes=("bucket",))
READY = (Record("ready", "compute"), WaitEvent("ready", "dense"))
REDUCED = Launch("dense", "reduce", ("bucket",), ("bucket",))
DONE = (Record("done", "dense"), WaitEvent("done", "compute"))
READ = Kernels("update", reads=("bucket",))

SOUND = program(MADE, *READY, REDUCED, *DONE, READ)


def test_events_on_both_sides_order_a_launch() -> None:
    assert hazards(SOUND) == []


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        (program(MADE, READY[0], REDUCED, *DONE, READ), "'bucket' is written by launch 'reduce'.* after 'backward'"),
        (program(MADE, *READY, REDUCED, DONE[0], READ), "'bucket' is read by 'update'.* after launch 'reduce'"),
        (program(MADE, *READY, REDUCED, DONE[1], DONE[0], READ), "'compute' waits for event 'done'"),
        (program(READY[0], MADE, READY[1], REDUCED, *DONE, READ), "'bucket' is written by launch 'reduce'"),
        (program(MADE, *READY, DONE[0], REDUCED, DONE[1], READ), "'bucket' is read by 'update'"),
        (
            program(MADE, *READY, REDUCED, *DONE[:1], WaitEvent("ready", "compute"), READ),
            "'bucket' is read by 'update'",
        ),
        (program(MADE, *READY, REDUCED, MADE), "'bucket' is written by 'backward'.* after launch 'reduce'"),
    ],
    ids=[
        *("no wait before the launch", "no wait before the read", "wait before record", "recorded too early"),
        *("recorded before the launch", "the wrong event", "reused too early"),
    ],
)
def test_what_no_event_orders_is_found(broken: StreamProgram, expected: str) -> None:
    assert re.search(expected, "\n".join(hazards(broken)))


def test_readers_on_several_streams_need_no_order_but_the_next_writer_waits_for_all() -> None:
    reads = [
        step for k in "ab" for step in (WaitEvent("ready", k), Kernels("read", ("bucket",), stream=k), Record(k, k))
    ]
    assert hazards(program(MADE, READY[0], *reads)) == []
    assert hazards(program(MADE, READY[0], *reads, WaitEvent("a", "compute"), WaitEvent("b", "compute"), MADE)) == []
    (found,) = hazards(program(MADE, READY[0], *reads, WaitEvent("a", "compute"), MADE))
    assert "after 'read' on stream 'b'" in found
