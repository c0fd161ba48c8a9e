"""From a schedule to its stream program: what the host enqueues on which stream, and what waits for which event.

Contract
    One host thread walks through the window's compute in the program's order. What a compute operation hands over is
    submitted behind it; a submitted launch whose predecessors in the launch order have not been submitted is held back
    by the host, and issued when its turn comes. The host waits for nothing. On the device
        a launch waits for the event recorded where it was submitted, and for the launch IN_FLIGHT places before it;
        compute waits for the launches that the step graph says it depends on.
    What no schedule orders (the flags at a backward's head; ids, where no batch is known ahead) leaves in turn: behind
    all that has been issued, before all that will be.
    Same operations and launch order as the schedule; window after window, the same program.

    rewrite:  compute     backward bucket 0            compute    compute  backward bucket 0   (-> bucket 0 [0])
              dense       bucket 0 [0]             ->  compute      record   bucket 0 [0] ready@0
              compute     update bucket 0              dense        wait     bucket 0 [0] ready@0
                                                       dense      launch   bucket 0 [0]   (bucket 0 [0] -> ...)
                                                       dense        record   bucket 0 [0] done@0
                                                       compute      wait     bucket 0 [0] done@0
                                                       compute    compute  update bucket 0   (bucket 0 [0] -> )
"""

from __future__ import annotations

from collections import deque

from embrace_fx.vocabulary import operation_id
from embrace_fx.vocabulary.schedule import IN_FLIGHT, LOOKS_AHEAD, Operation, Schedule
from tests.support.streams.stream_program import HostRead, Kernels, Launch, Record, Step, StreamProgram, WaitEvent

UNIQUE = "unique rows of the next batch"
"""What the ids' stream computes before it gathers them, where the next batch is known."""

IDS, SIZES, FLAGS = str(operation_id.IDS), "sizes", "backward flags"


def stream_program(schedule: Schedule, windows: int = 2) -> StreamProgram:
    """The program of a schedule, from its first window on.

    Raises:
        ValueError: compute waits for a launch that stands behind one that is still to be submitted.
    """
    host = _Host(schedule)
    for number in range(windows):
        host.window(number)
    launches = len(schedule.launch_order)
    title = f"stream program {schedule.name}: {windows} windows of {launches} launches, {IN_FLIGHT} in flight"
    return StreamProgram(title, tuple(host.steps))


class _Host:
    """The host thread, walking through windows."""

    def __init__(self, schedule: Schedule) -> None:
        self.steps: list[Step | str] = []
        graph = schedule.steps
        self._compute_order = graph.compute_order
        self._launches = {o.name: o for o in graph.communications}
        self._looks_ahead = schedule.name in LOOKS_AHEAD
        self._order = [name for name in schedule.launch_order if self._looks_ahead or name != IDS]
        self._needs: dict[str, list[tuple[int, str]]] = {name: [] for name in graph.compute_order}  # (distance, launch)
        self._sources: dict[str, set[str]] = {name: set() for name in self._launches}
        for d in graph.dependences:
            if d.before in self._launches and d.after in self._needs:
                self._needs[d.after].append((d.distance, d.before))
            elif d.after in self._launches and d.distance == 0:
                self._sources[d.after].add(d.before)
        self._last = {}  # launch -> the compute operation behind which it is submitted
        for name, sources in self._sources.items():
            self._last[name] = max(sources, key=self._compute_order.index)
        self._waited: set[tuple[int, str]] = set()
        self._done: list[tuple[int, str]] = []  # launches, as they were issued
        self._waiting: deque[tuple[int, str]] = deque()
        self._submitted: set[tuple[int, str]] = set()

    def window(self, number: int) -> None:
        self.steps.append(f"window {number}: backward of step t + {number}, forward of step t + {number + 1}")
        self._waiting.extend((number, name) for name in self._order)
        flags = (number, FLAGS)
        self.steps += [Kernels("results", (), ("results",)), Record(_ready(flags), "compute")]
        self.steps.append(WaitEvent(_ready(flags), "ids"))
        self._launch_in_turn(flags, Launch("ids", FLAGS, ("results",), (FLAGS,)))
        for name in self._compute_order:
            arrived = self._await(number, name)
            submitted = [launch for launch, last in self._last.items() if last == name]
            sent = tuple(_sent(self._launches[launch]) for launch in submitted if launch != IDS)
            self.steps.append(Kernels(name, arrived, sent))
            for launch in submitted:
                self._submit(number, launch)

    def _await(self, number: int, name: str) -> tuple[str, ...]:
        """Has compute wait for what an operation needs; returns what has arrived."""
        needed = [(number - distance, launch) for distance, launch in self._needs[name] if distance <= number]
        needed.sort(key=lambda each: (each[0], self._order.index(each[1]) if each[1] in self._order else -1))
        for each in needed:
            if each[1] == IDS and not self._looks_ahead:
                continue  # launched and waited for by the calling thread, on the stream of the model
            if each not in self._done:
                raise ValueError(
                    f"expected {each[1]!r} to have been launched before {name!r} waits for it, found it held back by "
                    f"{self._waiting[0][1]!r}, which is still to be submitted. Let the order be checked: check_order."
                )
            if each not in self._waited:
                self._waited.add(each)
                self.steps.append(WaitEvent(_done(each), "compute"))
                if each[1] == IDS:
                    self.steps.append(HostRead(_done(each), (SIZES,)))
        return tuple(_received(self._launches[launch]) for _, launch in needed)

    def _submit(self, number: int, name: str) -> None:
        each = (number, name)
        if name == IDS and not self._looks_ahead:
            self.steps.append(Kernels(UNIQUE, (), (f"{IDS} sent",)))
            self._launch_in_turn(each, Launch("compute", IDS, (f"{IDS} sent",), (IDS,)))
            return
        self.steps.append(Record(_ready(each), "compute"))
        if name == IDS:
            self.steps += [WaitEvent(_ready(each), "ids"), Kernels(UNIQUE, (), (f"{IDS} sent",), "ids")]
        self._submitted.add(each)
        while self._waiting and self._waiting[0] in self._submitted:
            self._issue(self._waiting.popleft())

    def _launch_in_turn(self, each: tuple[int, str], launch: Launch) -> None:
        if self._done:
            self.steps.append(WaitEvent(_done(self._done[-1]), launch.stream))
        self.steps += [launch, Record(_done(each), launch.stream)]
        self._done.append(each)

    def _lane(self, name: str) -> str:
        """Whose launches need no event to be in order."""
        in_turn = name == FLAGS or (name == IDS and not self._looks_ahead)
        return "" if in_turn else self._launches[name].lane

    def _issue(self, each: tuple[int, str]) -> None:
        operation = self._launches[each[1]]
        if each[1] != IDS:
            self.steps.append(WaitEvent(_ready(each), operation.lane))
        if len(self._done) >= IN_FLIGHT:
            earlier = self._done[-IN_FLIGHT]
            if self._lane(earlier[1]) != operation.lane:
                self.steps.append(WaitEvent(_done(earlier), operation.lane))
        self.steps.append(Launch(operation.lane, operation.name, (_sent(operation),), (_received(operation),)))
        if each[1] == IDS:
            self.steps.append(Kernels("cut both batches, sizes to the host", (IDS,), (SIZES,), "ids"))
        self.steps.append(Record(_done(each), operation.lane))
        self._done.append(each)


def _sent(operation: Operation) -> str:
    return operation.name if operation.kind == "all_reduce" else f"{operation.name} sent"


def _received(operation: Operation) -> str:
    return operation.name


def _ready(launch: tuple[int, str]) -> str:
    return f"{launch[1]} ready@{launch[0]}"


def _done(launch: tuple[int, str]) -> str:
    return f"{launch[1]} done@{launch[0]}"
