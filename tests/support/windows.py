"""Steps to be ordered: small ones by hand, large ones in the shape of real ones, and any."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from embrace_fx.passes.scheduler.link_machine import WINDOWS, LinkMachine
from embrace_fx.vocabulary.operation_id import Kind, Lane
from embrace_fx.vocabulary.schedule import Dependence, Operation, Schedule, StepGraph, Timeline


def compute(name: str, duration_ms: float, kind: Kind = "forward") -> Operation:
    return Operation(name, kind, "compute", duration_ms)


def launch(name: str, duration_ms: float, kind: Kind = "all_reduce", lane: Lane = "dense") -> Operation:
    return Operation(name, kind, lane, duration_ms, sent_bytes=round(1000 * duration_ms))


def step(operations: list[Operation], dependences: list[str]) -> StepGraph:
    """Dependences as "before -> after", "before -> next after" for one into the next window."""
    pairs = (each.split(" -> ") for each in dependences)
    return StepGraph(
        tuple(operations),
        tuple(Dependence(b, a.removeprefix("next "), int(a.startswith("next "))) for b, a in pairs),
        tuple(o.name for o in operations if o.lane == "compute"),
    )


TWO_BLOCKS = step(
    [
        compute("backward 1", 2, "backward"),
        compute("backward 0", 2, "backward"),
        compute("forward 0", 1),
        compute("forward 1", 3),
        launch("bucket 1", 4),
        launch("bucket 0", 2),
    ],
    ["backward 1 -> bucket 1", "backward 0 -> bucket 0", "bucket 0 -> forward 0", "bucket 1 -> forward 1"],
)
"""
compute  backward 1  backward 0  forward 0  forward 1
link             bucket 1: ready first, needed last
"""

EMBEDDING = step(
    [
        compute("backward", 2, "backward"),
        compute("update", 1, "update"),
        compute("forward 0", 2),
        compute("forward 1", 2),
        launch("ids", 1, "ids", "ids"),
        launch("prior", 2, "gradients", "embedding"),
        launch("lookups", 2, "lookups", "embedding"),
        launch("bucket 0", 2),
        launch("bucket 1", 2),
        launch("a delayed", 3, "delayed", "delayed"),
    ],
    [
        *("backward -> prior", "prior -> update", "update -> lookups", "ids -> lookups", "lookups -> forward 0"),
        *("backward -> bucket 0", "bucket 0 -> forward 0", "backward -> bucket 1", "bucket 1 -> forward 1"),
        *("backward -> a delayed", "a delayed -> next update"),
    ],
)
"""One table, two blocks. The name of what is delayed comes first, so that a tie would launch it first."""


@st.composite
def steps(draw: st.DrawFn, most_launches: int = 8) -> StepGraph:
    """Steps that can run: inside a window, what depends stands after what it depends on."""
    length_ms = st.integers(0, 24).map(lambda quarters: quarters / 4)  # multiples of 1/4, so that sums are exact
    lanes: list[tuple[Kind, Lane]] = [("all_reduce", "dense"), ("gradients", "embedding"), ("delayed", "delayed")]
    operations = [compute(f"c{k}", draw(length_ms)) for k in range(draw(st.integers(1, 7)))]
    operations += [launch(f"l{k}", draw(length_ms), *draw(st.sampled_from(lanes))) for k in range(most_launches)]
    operations = operations[: draw(st.integers(len(operations) - most_launches + 1, len(operations)))]
    operations = draw(st.permutations(operations))
    dependences = []
    for (i, before), (j, after) in itertools.product(enumerate(operations), repeat=2):
        distance = draw(st.sampled_from([None, None, None, 0, 1] if i < j else [None, None, None, None, 1]))
        if distance is not None and before.is_communication | after.is_communication:
            dependences.append(Dependence(before.name, after.name, distance))
    names = tuple(o.name for o in operations if not o.is_communication)
    return StepGraph(tuple(operations), tuple(dependences), names)


def large_step(blocks: int, chunks: int) -> StepGraph:
    """A step in the shape of a real one, with `blocks` x (`chunks` + 1) communications."""
    draw = random.Random(0).random
    operations, dependences = [], []
    for b in reversed(range(blocks)):
        operations.append(compute(f"backward {b}", 1 + draw(), "backward"))
        for c in range(chunks):
            operations.append(launch(f"bucket {b} [{c}]", 0.4 * draw()))
            dependences += [f"backward {b} -> bucket {b} [{c}]", f"bucket {b} [{c}] -> forward {b}"]
    for b in range(blocks):
        operations += [compute(f"forward {b}", 0.5 + draw()), launch(f"delayed {b}", 0.1, "delayed", "delayed")]
        dependences += [f"backward 0 -> delayed {b}", f"delayed {b} -> next backward 0"]
    return step(operations, dependences)


@dataclass(frozen=True)
class Simulation:
    """The simulated outcome of a launch order.

    Attributes:
        step_ms: time from one window to the next, in the steady state.
        timeline: the last two windows, as on one rank.
        critical_path: (window, name) of the operations of `timeline` that determine its length, in order.
    """

    step_ms: float
    timeline: Timeline
    critical_path: tuple[tuple[int, str], ...]


def simulate(steps: StepGraph, launch_order: Sequence[str], windows: int = WINDOWS) -> Simulation:
    """Runs windows in a row, at most `windows` (at least 2), until one repeats the one before it.

    Raises:
        ValueError: as `check_order`, or fewer than two windows.
    """
    if windows < 2:
        raise ValueError(f"simulate() needs at least 2 windows to reach a steady state, not {windows}")
    machine = LinkMachine(steps)
    order = _indices(machine, launch_order)
    run = machine.run(machine.sequence(order), windows)
    return Simulation(run.step_ms, *machine.make_timeline(run, order))


def check_order(steps: StepGraph, launch_order: Sequence[str]) -> None:
    """Raises where a launch order cannot be executed.

    Raises:
        ValueError: the head of the line would wait for a later launch, be it through compute that comes first in the
            program.
    """
    machine = LinkMachine(steps)
    machine.sequence(_indices(machine, launch_order))


def _indices(machine: LinkMachine, launch_order: Sequence[str]) -> list[int]:
    assert sorted(launch_order) == sorted(o.name for o in machine.launches)
    return [machine.index[name] for name in launch_order]


def story(schedule: Schedule, times: bool = True) -> str:
    """One window as text: launches, compute and waits, a line each, in the order of their predicted start.

    Args:
        times: with start and length in milliseconds.
    """
    steps = schedule.steps
    rank = {
        name: k
        for k, name in enumerate((*steps.compute_order, *schedule.launch_order, *(o.name for o in steps.copies)))
    }
    spans = [s for s in schedule.predicted.spans if s.window == 0]
    waits = [w for w in schedule.predicted.waits if w.window == 0]
    # At equal start times, waits come first, then compute, then launches.
    rows = [((w.start_ms, 0, rank[w.launch]), w.end_ms, "wait", w.launch) for w in waits]
    for span in spans:
        beside, sent = not span.operation.is_compute, f"  {span.operation.sent_bytes:,} bytes"
        name = span.operation.name
        place = (span.start_ms, 1 + beside, rank[name])
        rows.append((place, span.end_ms, span.operation.lane, name + sent if beside else name))
    computed = [s.end_ms for s in spans if s.operation.is_compute]
    lines = [f"schedule {schedule.name}, from {schedule.source}: {len(schedule.launch_order)} launches"]
    inside = bool(computed)
    for (start, *_), end, lane, text in sorted(rows):
        if inside and lane not in {"compute", "wait"} and start >= max(computed):
            lines.append("-- during the next window --")
            inside = False
        clock = f"{start:10.3f} {end - start:9.3f} ms  " if times else ""
        lines.append(f"{clock}{lane:<9}  {text}")
    return "\n".join(lines)
