"""Stream programs: what the four schedules enqueue, and a checker that finds whatever is not ordered by an event."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from embrace_fx.passes.scheduler.launch_order import schedule
from embrace_fx.vocabulary.schedule import IN_FLIGHT, SCHEDULES
from tests.support.golden import check_golden
from tests.support.streams.schedule_program import FLAGS, stream_program
from tests.support.streams.stream_order import (
    hazards,
    too_many_in_flight,
)
from tests.support.streams.stream_program import (
    HostRead,
    Kernels,
    Launch,
    Record,
    Step,
    StreamProgram,
    WaitEvent,
    story,
)
from tests.support.translators import steps_of_translator


def program(*steps: Step) -> StreamProgram:
    return StreamProgram("a program", steps)


MADE = Kernels("backward", writes=("bucket",))
READY = (Record("ready", "compute"), WaitEvent("ready", "dense"))
REDUCED = Launch("dense", "reduce", ("bucket",), ("bucket",))
DONE = (Record("done", "dense"), WaitEvent("done", "compute"))
READ = Kernels("update", reads=("bucket",))

SOUND = program(MADE, *READY, REDUCED, *DONE, READ)


# -- small programs ----------------------------------------------------------------------------------------------------


def test_events_on_both_sides_order_a_launch() -> None:
    assert hazards(SOUND) == []


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        (program(MADE, READY[0], REDUCED, *DONE, READ), "'bucket' to be written by launch 'reduce'.* after 'backward'"),
        (program(MADE, *READY, REDUCED, DONE[0], READ), "'bucket' to be read by 'update'.* after launch 'reduce'"),
        (
            program(MADE, *READY, REDUCED, DONE[1], DONE[0], READ),
            "event 'done' to be recorded before .*'compute' waits",
        ),
        (program(READY[0], MADE, READY[1], REDUCED, *DONE, READ), "'bucket' to be written by launch 'reduce'"),
        (program(MADE, *READY, DONE[0], REDUCED, DONE[1], READ), "'bucket' to be read by 'update'"),
        (
            program(MADE, *READY, REDUCED, *DONE[:1], WaitEvent("ready", "compute"), READ),
            "'bucket' to be read by 'update'",
        ),
        (program(MADE, *READY, REDUCED, MADE), "'bucket' to be written by 'backward'.* after launch 'reduce'"),
    ],
    ids=[
        *("no wait before the launch", "no wait before the read", "wait before record", "recorded too early"),
        *("recorded before the launch", "the wrong event", "reused too early"),
    ],
)
def test_what_no_event_orders_is_found(broken: StreamProgram, expected: str) -> None:
    assert re.search(expected, "\n".join(hazards(broken)))


def test_order_is_transitive_over_streams() -> None:
    through = (Record("done", "dense"), WaitEvent("done", "ids"), Record("later", "ids"), WaitEvent("later", "compute"))

    assert hazards(program(MADE, *READY, REDUCED, *through, READ)) == []


def test_readers_on_several_streams_need_no_order_but_the_next_writer_waits_for_all() -> None:
    reads = [
        step for k in "ab" for step in (WaitEvent("ready", k), Kernels("read", ("bucket",), stream=k), Record(k, k))
    ]

    assert hazards(program(MADE, READY[0], *reads)) == []
    assert hazards(program(MADE, READY[0], *reads, WaitEvent("a", "compute"), WaitEvent("b", "compute"), MADE)) == []
    (found,) = hazards(program(MADE, READY[0], *reads, WaitEvent("a", "compute"), MADE))
    assert "after 'read' on stream 'b'" in found


def test_the_host_reads_what_was_copied_before_its_event() -> None:
    copied = Kernels("copy", ("ids",), ("sizes",), "ids")

    assert hazards(program(copied, Record("copied", "ids"), HostRead("copied", ("sizes",)))) == []
    assert hazards(program(Record("copied", "ids"), copied, HostRead("copied", ("sizes",)))) != []
    assert hazards(program(copied, HostRead("copied", ("sizes",)))) != []


def test_launches_that_nothing_bounds_are_found() -> None:
    launches = [Launch(stream, stream) for stream in ("ids", "embedding", "dense")]
    ordered = (launches[0], Record("first", "ids"), launches[1], WaitEvent("first", "dense"), launches[2])

    assert too_many_in_flight(program(*ordered), 2) == []
    (found,) = too_many_in_flight(program(*launches), 2)
    assert "'dense' may begin before 'ids', launched 2 places earlier" in found


# -- the four schedules ------------------------------------------------------------------------------------------------


def predicted(name: str, windows: int = 2) -> StreamProgram:
    return stream_program(schedule(steps_of_translator(name), name), windows)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_program_of_a_schedule(name: str) -> None:
    check_golden(f"streams_{name}", story(predicted(name)))


@pytest.mark.parametrize("name", SCHEDULES)
def test_events_order_every_use_in_the_program_of_a_schedule(name: str) -> None:
    whole = predicted(name, windows=3)

    assert hazards(whole) == []
    assert too_many_in_flight(whole, IN_FLIGHT) == []


@pytest.mark.parametrize("name", SCHEDULES)
def test_launches_leave_in_the_order_of_the_schedule(name: str) -> None:
    found = schedule(steps_of_translator(name), name)

    launched = [launch.op for launch in stream_program(found, windows=2).launches() if launch.stream != "compute"]

    order = [op for op in found.launch_order if op != "ids" or name in ("vertical", "2d")]
    assert launched == [FLAGS, *order, FLAGS, *order]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_stream_needs_its_waits(name: str) -> None:
    whole = predicted(name)

    for stream in {step.stream for step in whole.records() if isinstance(step, WaitEvent)}:
        without = [step for step in whole.steps if not (isinstance(step, WaitEvent) and step.stream == stream)]
        assert hazards(replace(whole, steps=tuple(without))), stream


def _launch(name: str) -> Callable[[Step | str], bool]:
    return lambda step: isinstance(step, Launch) and step.op == name


def test_programs_broken_by_hand_are_found() -> None:
    whole = predicted("2d")
    steps = whole.steps
    late = next(k for k, step in enumerate(steps) if _launch("source.weight rows")(step))

    def broken(*changed: Step | str) -> list[str]:
        return hazards(replace(whole, steps=changed))

    assert "'source.weight rows sent'" in broken(*steps[: late - 2], *steps[late:])[0]  # no wait for the lookup
    wrong = WaitEvent("target.weight prior done@0", "compute")
    right = WaitEvent("source.weight prior done@0", "compute")
    assert "'source.weight prior'" in broken(*(wrong if step == right else step for step in steps))[0]
    unread = {WaitEvent(f"bucket 2 [{k}] done@0", "compute") for k in (0, 1)}
    assert "to be read by 'update bucket 2'" in broken(*(s for s in steps if s not in unread))[0]


def test_an_order_that_blocks_is_refused() -> None:
    found = schedule(steps_of_translator("none"), "none")
    order = [*(name for name in found.launch_order if not name.endswith("prior")), "source.weight prior"]
    order.insert(0, "source.weight rows")

    with pytest.raises(ValueError, match=r"held back by 'source\.weight rows'"):
        stream_program(replace(found, launch_order=tuple(order)))
