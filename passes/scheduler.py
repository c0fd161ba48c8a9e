"""Orders a step's communication at compile time: one launch sequence, the same on all ranks.

Contract
    A pure function of the step's graph. A schedule never deadlocks, is by its own simulation never slower than the
    order in which communication becomes ready, and is the same on every machine: ties are broken by name, and the
    search is bounded by a count, not by time.

    The machine that is simulated: one processor runs the compute operations in the program's order; one link carries
    the communications strictly in launch order, so that the head of the line, until its dependences have ended, blocks
    those behind it. Windows follow each other; all launches of one leave before those of the next.

    order(key)                while the link is free: of those that are ready, launch the one with the least key
    policies                  readiness | paper | slack: three such keys
    schedule                  the best policy's order, then moves and swaps that shorten the step

Source: 2D communication scheduling, EmbRace (ICPP 2022, section 4), which runs a priority queue during training. Here
the queue runs once, before.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from embrace_fx.schedule import SCHEDULES, Operation, Schedule, Span, StepGraph, Timeline, Wait

WINDOWS = 8
"""At most so many are simulated in a row until one repeats the one before it."""
SEARCH_STARTS = 500_000
"""So many starts of operations may the search compute: less than half a second of one core."""
SHAKES = 8
"""It ends after so many shaken orders in a row that lead to none better."""
_WARM_UP_WINDOWS = 3
_TOLERANCE = 1e-9
"""Relative: smaller differences of times are rounding."""


@dataclass(frozen=True)
class Candidate:
    """A communication that is ready while the link is free.

    Attributes:
        operation: itself.
        ready_ms: when its dependences ended.
        latest_ms: when it must start, were the link wide enough for all, if two windows are not to become longer.
        needed_at: how many compute operations the program runs, from the window's start, before the first that needs
            it; infinite where none does.
    """

    operation: Operation
    ready_ms: float
    latest_ms: float
    needed_at: float


Key = Callable[[Candidate], Any]
"""A policy: the candidate with the least key is launched; of equal ones, the first by name."""


def readiness(candidate: Candidate) -> float:
    """First come, first served: the naive order."""
    return candidate.ready_ms


def paper(candidate: Candidate) -> tuple[int, float]:
    """The embedding chain, then what the next forward needs first, then delayed rows (EmbRace, section 4)."""
    classes = {"gradients": 0, "ids": 0, "lookups": 0, "delayed": 2}
    return classes.get(candidate.operation.kind, 1), candidate.needed_at


def slack(candidate: Candidate) -> float:
    """The one that can least wait."""
    return candidate.latest_ms


POLICIES: tuple[Key, ...] = (paper, slack, readiness)
"""In order of preference where two are equally fast."""


@dataclass(frozen=True)
class Simulation:
    """What a launch order leads to.

    Attributes:
        step_ms: from one window to the next, in the steady state.
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
        raise ValueError(f"expected at least 2 windows, in simulate, found {windows}; the steady state needs them.")
    indexed = _Indexed(steps)
    order = indexed.indices(launch_order)
    return indexed.picture(indexed.run(order, windows), order)


def check_order(steps: StepGraph, launch_order: Sequence[str]) -> None:
    """Raises where a launch order cannot be executed.

    Raises:
        ValueError: it is not each communication once, or the head of the line would wait for a later launch, be it
            through compute that comes first in the program.
    """
    indexed = _Indexed(steps)
    indexed.sequence(indexed.indices(launch_order))


def order(steps: StepGraph, key: Key = readiness) -> tuple[str, ...]:
    """The launch order that a priority queue leads to in simulated time.

    Raises:
        ValueError: the step has no order at all.
    """
    indexed = _Indexed(steps)
    return indexed.names(indexed.queue(key))


def schedule(steps: StepGraph, name: str, source: str = "cost model") -> Schedule:
    """The launch order of a step.

    Args:
        name: one of `SCHEDULES`; "none" is launched as it becomes ready.
        source: where the durations of `steps` come from: "cost model" or "profile".

    Raises:
        ValueError: an unknown name, or a step that has no order at all.
    """
    if name not in SCHEDULES:
        raise ValueError(f"expected schedule to be one of {', '.join(SCHEDULES)}, found {name!r}. Choose one of these.")
    indexed = _Indexed(steps)
    naive = indexed.queue(readiness)
    chosen = naive if name == "none" else _refine(indexed, [indexed.queue(key) for key in POLICIES])
    picture = indexed.picture(indexed.run(chosen, WINDOWS), chosen)
    return Schedule(name, indexed.names(chosen), steps, picture.timeline, picture.critical_path, source)


def story(schedule: Schedule, times: bool = True) -> str:
    """One window as text: launches, compute and waits, a line each, in the order of their predicted start.

    Args:
        times: with start and length in milliseconds.
    """
    rank = {name: k for k, name in enumerate((*schedule.steps.compute_order, *schedule.launch_order))}
    spans = [s for s in schedule.predicted.spans if s.window == 0]
    waits = [w for w in schedule.predicted.waits if w.window == 0]
    # What starts together: the wait, then compute, then launches.
    rows = [((w.start_ms, 0, rank[w.launch]), w.end_ms, "wait", w.launch) for w in waits]
    for span in spans:
        on_link, sent = span.operation.is_communication, f"  {span.operation.sent_bytes:,} bytes"
        name = span.operation.name
        place = (span.start_ms, 1 + on_link, rank[name])
        rows.append((place, span.end_ms, span.operation.lane, name + sent if on_link else name))
    computed = [s.end_ms for s in spans if not s.operation.is_communication]
    lines = [f"schedule {schedule.name}, from {schedule.source}: {len(schedule.launch_order)} launches"]
    inside = bool(computed)
    for (start, *_), end, lane, text in sorted(rows):
        if inside and lane not in {"compute", "wait"} and start >= max(computed):
            lines.append("-- during the next window --")
            inside = False
        clock = f"{start:10.3f} {end - start:9.3f} ms  " if times else ""
        lines.append(f"{clock}{lane:<9}  {text}")
    return "\n".join(lines)


# -- the machine, in integers ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Run:
    """Starts and ends by window and operation's index; the windows simulated."""

    starts: list[list[float]]
    ends: list[list[float]]
    step_ms: float


class _Indexed:
    """A step as arrays. Compute operations are 0 to C - 1 in the program's order, communications follow, by name.

    A simulation needs few of the dependences: between compute operations the program's order says it all, and so does
    the launch order between communications; of the compute operations that a communication needs, the last decides.
    """

    def __init__(self, steps: StepGraph) -> None:
        by_name = {o.name: o for o in steps.operations}
        self.steps = steps
        self.compute = _compute_operations(steps, by_name)
        self.launches = sorted(steps.communications, key=lambda o: o.name)
        self.operations = [*self.compute, *self.launches]
        self.count = len(self.compute)
        self.durations = [o.duration_ms for o in self.operations]
        self.index = {o.name: k for k, o in enumerate(self.operations)}
        self.reach = max((d.distance for d in steps.dependences), default=0)
        size = len(self.operations)
        self.needs: list[list[int]] = [[] for _ in range(size)]  # of the same window
        self.needs_earlier: list[list[tuple[int, int]]] = [[] for _ in range(size)]  # (distance, operation)
        self.needs_launches: list[list[tuple[int, int]]] = [[] for _ in range(size)]  # communications of communications
        released = [-self.count * (self.reach + 1)] * size  # the last compute operation, counted from the window's
        for d in sorted(steps.dependences, key=lambda d: (d.distance, d.before, d.after)):
            self._add(d.before, d.after, d.distance, released)
        for launch in range(self.count, size):
            later, before = divmod(released[launch], max(self.count, 1))
            if self.count and later == 0:
                self.needs[launch].append(before)
            elif self.count and -later <= self.reach:
                self.needs_earlier[launch].append((-later, before))

    def _add(self, before: str, after: str, distance: int, released: list[int]) -> None:
        for name in (before, after):
            if name not in self.index:
                raise ValueError(
                    f"expected dependences between operations of the step, found {before!r} -> {after!r}, and no "
                    f"operation {name!r}; it has {sorted(self.index)}."
                )
        if distance < 0:
            raise ValueError(f"expected no dependence on a later window, found {before!r} -> {after!r}, {distance}.")
        first, second = self.index[before], self.index[after]
        if first < self.count and second < self.count:
            if distance == 0 and first >= second:
                raise ValueError(
                    f"expected {before!r} before {after!r} in the compute order, for {after!r} depends on it, found it "
                    "after. Put the compute in an order in which it can run."
                )
        elif first < self.count:
            released[second] = max(released[second], first - distance * self.count)
        elif second >= self.count:
            self.needs_launches[second].append((distance, first))
        elif distance == 0:
            self.needs[second].append(first)
        else:
            self.needs_earlier[second].append((distance, first))

    def indices(self, launch_order: Sequence[str]) -> list[int]:
        expected = {o.name for o in self.launches}
        for name in launch_order:
            if name not in expected:
                raise ValueError(
                    f"expected a launch order of the step's communications, found {name!r}; it has {sorted(expected)}."
                )
        if len(launch_order) != len(expected) or set(launch_order) != expected:
            missing = sorted(expected - set(launch_order))
            repeated = sorted({n for n in launch_order if list(launch_order).count(n) > 1})
            raise ValueError(
                f"expected each communication of the step once in the launch order, found missing {missing}, "
                f"repeated {repeated}."
            )
        return [self.index[name] for name in launch_order]

    def names(self, order: Sequence[int]) -> tuple[str, ...]:
        return tuple(self.operations[k].name for k in order)

    def blocked(self, order: Sequence[int]) -> tuple[int, int] | None:
        """The first launch that waits for one that is not launched before it, and that one; None: legal.

        Only dependences inside a window matter: windows are launched one after the other.
        """
        found = self._sequence(order)
        return found if isinstance(found, tuple) else None

    def sequence(self, order: Sequence[int]) -> list[int]:
        """All operations of a window, each after what it waits for.

        Raises:
            ValueError: there is no such sequence.
        """
        found = self._sequence(order)
        if isinstance(found, list):
            return found
        head, later = (self.operations[k].name for k in found)
        if head == later:
            raise ValueError(
                f"expected a step whose compute order can run, found {head!r} to wait for a compute operation that "
                "itself waits for it. Move that compute, or drop the dependence."
            )
        raise ValueError(
            f"expected {later!r} before {head!r} in the launch order, for {head!r} waits for it, found it after: all "
            "ranks would wait for ever. Launch it before."
        )

    def _sequence(self, order: Sequence[int]) -> list[int] | tuple[int, int]:
        done = [False] * len(self.operations)
        sequence: list[int] = []
        ran = 0
        for launch in order:
            for distance, before in self.needs_launches[launch]:
                if distance == 0 and not done[before]:
                    return launch, before
            for last in self.needs[launch]:
                while ran <= last:
                    for before in self.needs[ran]:
                        if not done[before]:
                            return launch, before
                    sequence.append(ran)
                    ran += 1
            done[launch] = True
            sequence.append(launch)
        sequence.extend(range(ran, self.count))
        return sequence

    def run(self, order: Sequence[int], windows: int) -> _Run:
        """Raises ValueError where the order deadlocks."""
        return self._time(self.sequence(order), windows)

    def run_if_legal(self, order: Sequence[int]) -> _Run | None:
        found = self._sequence(order)
        return self._time(found, WINDOWS) if isinstance(found, list) else None

    def _time(self, sequence: list[int], windows: int) -> _Run:
        count, durations, needs, needs_earlier = self.count, self.durations, self.needs, self.needs_earlier
        starts: list[list[float]] = []
        ends: list[list[float]] = []
        clocks = [(0.0, 0.0)]
        processor = link = 0.0
        repeats = 0
        for window in range(windows):
            started, ended = [0.0] * len(durations), [0.0] * len(durations)
            ends.append(ended)
            starts.append(started)
            for k in sequence:
                start = processor if k < count else link
                for before in needs[k]:
                    end = ended[before]
                    start = end if end > start else start
                for distance, before in needs_earlier[k]:
                    if distance <= window:
                        end = ends[window - distance][before]
                        start = end if end > start else start
                started[k] = start
                ended[k] = end = start + durations[k]
                if k < count:
                    processor = end
                else:
                    link = end
            clocks.append((processor, link))
            if window and _shifted(ends[-2], ended):
                repeats += 1
                if repeats >= max(self.reach, 1) and window > self.reach:
                    return _Run(starts, ends, ended[0] - ends[-2][0] if ended else 0.0)
            else:
                repeats = 0
        # No repetition: windows that alternate, or a link that falls behind compute that nothing makes wait for it.
        middle = windows // 2
        rates = [(last - first) / (windows - middle) for first, last in zip(clocks[middle], clocks[-1], strict=True)]
        return _Run(starts, ends, max(rates))

    def critical(self, run: _Run, order: Sequence[int]) -> list[tuple[int, int]]:
        """(window, operation) of the last two windows, walked back from the last compute operation."""
        first = len(run.ends) - 2
        previous = {after: (0, before) for before, after in pairwise((*range(self.count),))}
        previous |= {after: (0, before) for before, after in pairwise(order)}
        if self.count:
            previous[0] = (1, self.count - 1)
        if order:
            previous[order[0]] = (1, order[-1])
        path: list[tuple[int, int]] = []
        window, k = first + 1, self.count - 1 if self.count else order[-1]
        while window >= first:
            path.append((window, k))
            start = run.starts[window][k]
            # The lane itself comes first: had the others been earlier, it would have started no sooner.
            causes = [previous[k], *((0, p) for p in self.needs[k]), *self.needs_earlier[k]]
            decisive = [(d, p) for d, p in causes if d <= window and run.ends[window - d][p] == start]
            if not decisive:
                break
            window, k = window - decisive[0][0], decisive[0][1]
        return path[::-1]

    def picture(self, run: _Run, order: Sequence[int]) -> Simulation:
        first = len(run.ends) - 2
        waits = []
        for window in (first, first + 1):
            for k in range(self.count):
                idle = run.ends[window][k - 1] if k else (run.ends[window - 1][-1 + self.count] if window else 0.0)
                start = run.starts[window][k]
                if start > idle:
                    causes = [(0, p) for p in self.needs[k]] + self.needs_earlier[k]
                    launch = next(p for d, p in causes if d <= window and run.ends[window - d][p] == start)
                    waits.append((launch, window - first, idle, start))
        begins = [min(run.starts[first], default=0.0), min(run.starts[first + 1], default=0.0)]
        origin = min(begins + [idle for _, _, idle, _ in waits])
        spans = tuple(
            Span(operation, window, 0, run.starts[first + window][k] - origin, run.ends[first + window][k] - origin)
            for window in (0, 1)
            for k, operation in enumerate(self.operations)
        )
        shown = tuple(
            Wait(self.operations[k].name, self.operations[k].lane, window, 0, idle - origin, start - origin)
            for k, window, idle, start in waits
        )
        path = tuple((window - first, self.operations[k].name) for window, k in self.critical(run, order))
        return Simulation(run.step_ms, Timeline(spans, shown, 1, self.steps.dependences), path)

    def queue(self, key: Key) -> list[int]:
        """`order`, in indices: several windows in a row, for what the last of them finds the link busy with."""
        latest, needed = self._urgency()
        finished: list[list[float]] = []
        processor = link = 0.0
        order: list[int] = []
        for _ in range(_WARM_UP_WINDOWS):
            ends: list[float | None] = [None] * len(self.operations)
            ran, order = 0, []
            waiting = list(range(self.count, len(self.operations)))
            begun = processor
            while True:
                while ran < self.count:
                    ready = self._ready(ran, ends, finished)
                    if ready is None:
                        break
                    ends[ran] = processor = max(processor, ready) + self.durations[ran]
                    ran += 1
                if not waiting:
                    break
                times = {k: ready for k in waiting if (ready := self._ready(k, ends, finished)) is not None}
                if not times:
                    self.sequence([*order, *waiting])  # whatever stands first is blocked
                    raise AssertionError("expected a blocked order to be refused")
                link = max(link, min(times.values()))
                chosen = min(
                    (k for k, ready in times.items() if ready <= link),
                    key=lambda k: (
                        key(Candidate(self.operations[k], times[k] - begun, latest[k], needed[k])),
                        self.operations[k].name,
                    ),
                )
                ends[chosen] = link = link + self.durations[chosen]
                waiting.remove(chosen)
                order.append(chosen)
            finished.append([end for end in ends if end is not None])
        return order

    def _ready(self, k: int, ends: list[float | None], finished: list[list[float]]) -> float | None:
        """When its dependences end; None while one of them has no end yet."""
        ready = 0.0
        for distance, before in [*((0, p) for p in self.needs[k]), *self.needs_launches[k], *self.needs_earlier[k]]:
            if distance > len(finished):
                continue
            end = finished[-distance][before] if distance else ends[before]
            if end is None:
                return None
            ready = max(ready, end)
        return ready

    def _urgency(self) -> tuple[list[float], list[float]]:
        """Of each operation: its latest start in the first of two windows, and `Candidate.needed_at`."""
        windows = max(2, self.reach + 1)
        size, sequence = len(self.operations), self._any_sequence()
        causes = [
            [*((0, p) for p in self.needs[k]), *self.needs_launches[k], *self.needs_earlier[k]] for k in range(size)
        ]
        for k in range(1, self.count):
            causes[k].append((0, k - 1))
        if self.count:
            causes[0].append((1, self.count - 1))
        ends = [[0.0] * size for _ in range(windows)]
        for window in range(windows):
            for k in sequence:
                start = max((ends[window - d][p] for d, p in causes[k] if d <= window), default=0.0)
                ends[window][k] = start + self.durations[k]
        length = max(ends[-1], default=0.0)
        latest = [[length] * size for _ in range(windows)]  # ends
        needed = [[float("inf")] * size for _ in range(windows)]
        for window in reversed(range(windows)):
            for k in reversed(sequence):
                begins = latest[window][k] - self.durations[k]
                reader = float(window * self.count + k) if k < self.count else needed[window][k]
                for distance, before in causes[k]:
                    if distance <= window:
                        row = window - distance
                        latest[row][before] = min(latest[row][before], begins)
                        needed[row][before] = min(needed[row][before], reader)
        return [end - duration for end, duration in zip(latest[0], self.durations, strict=True)], needed[0]

    def _any_sequence(self) -> list[int]:
        """A window's operations, each after what it depends on, whatever the launch order."""
        done = [False] * len(self.operations)
        sequence: list[int] = []
        ran, waiting = 0, list(range(self.count, len(self.operations)))
        while True:
            before = len(sequence)
            while ran < self.count and all(done[p] for p in self.needs[ran]):
                done[ran] = True
                sequence.append(ran)
                ran += 1
            for k in list(waiting):
                if all(done[p] for p in self.needs[k]) and all(done[p] for d, p in self.needs_launches[k] if d == 0):
                    done[k] = True
                    sequence.append(k)
                    waiting.remove(k)
            if len(sequence) == before:
                break
        if waiting:
            self.sequence([*(k for k in sequence if k >= self.count), *waiting])
        return sequence


def _shifted(before: list[float], after: list[float]) -> bool:
    """Whether a window is the one before it, later by one length."""
    if not after:
        return True
    shift = after[0] - before[0]
    tolerance = _TOLERANCE * max(after)
    return all(abs(new - old - shift) <= tolerance for old, new in zip(before, after, strict=True))


def _compute_operations(steps: StepGraph, by_name: dict[str, Operation]) -> list[Operation]:
    if len(by_name) != len(steps.operations):
        names = [o.name for o in steps.operations]
        raise ValueError(
            f"expected each operation's name once in a step, found {sorted({n for n in names if names.count(n) > 1})} "
            "more often."
        )
    expected = sorted(o.name for o in steps.operations if not o.is_communication)
    if sorted(steps.compute_order) != expected:
        raise ValueError(
            f"expected compute_order to hold each compute operation of the step once, {expected}, found "
            f"{sorted(steps.compute_order)}."
        )
    return [by_name[name] for name in steps.compute_order]


# -- the search --------------------------------------------------------------------------------------------------------


def _refine(indexed: _Indexed, orders: list[list[int]]) -> list[int]:
    """The fastest of the orders, then local search: moves that take a critical launch out of others' way, then any
    move; then the same from a shaken order, until the budget is spent or no order can be faster.
    """
    search = _Search(indexed)
    step_ms, _, best = min((search.step_ms(order), k, order) for k, order in enumerate(orders))
    current, current_ms = best, step_ms
    fruitless = 0
    while len(best) > 1 and step_ms > search.bound_ms and fruitless <= SHAKES and search.starts_left > 0:
        current, current_ms = search.descend(current, current_ms)
        fruitless += 1
        if current_ms < step_ms * (1 - _TOLERANCE):
            best, step_ms, fruitless = current, current_ms, 0
        current = search.shaken(best)
        current_ms = search.step_ms(current)
    return best


class _Search:
    """Evaluates orders until so many starts of operations are computed."""

    def __init__(self, indexed: _Indexed) -> None:
        self.indexed = indexed
        self.starts_left = SEARCH_STARTS
        lanes = (indexed.durations[: indexed.count], indexed.durations[indexed.count :])
        self.bound_ms = max(map(sum, lanes)) * (1 + _TOLERANCE)  # neither lane can be faster than without any gap
        self._draw = random.Random(0).random  # the same numbers on every machine and version, which its others are not

    def run(self, order: list[int]) -> _Run | None:
        """None: the order deadlocks."""
        found = self.indexed.run_if_legal(order)
        self.starts_left -= len(order) if found is None else len(found.ends) * len(found.ends[0])
        return found

    def step_ms(self, order: list[int]) -> float:
        run = self.run(order)
        return run.step_ms if run is not None else float("inf")

    def descend(self, order: list[int], step_ms: float) -> tuple[list[int], float]:
        """Takes moves that shorten the step until none does."""
        better = True
        while better and step_ms > self.bound_ms:
            better = False
            for neighbour in self._neighbours(order):
                if self.starts_left <= 0:
                    return order, step_ms
                found_ms = self.step_ms(neighbour)
                if found_ms < step_ms * (1 - _TOLERANCE):
                    order, step_ms, better = neighbour, found_ms, True
                    break
        return order, step_ms

    def shaken(self, order: list[int]) -> list[int]:
        """A legal order a few moves away, or the order itself."""
        for _ in range(3):
            moved = _moved(order, self._below(len(order)), self._below(len(order)))
            if self.indexed.blocked(moved) is None:
                order = moved
        return order

    def _neighbours(self, order: list[int]) -> Iterator[list[int]]:
        run = self.run(order)
        assert run is not None
        for first, last in _critical_blocks(self.indexed.critical(run, order), order):
            # A block of launches without a gap is left sooner only if another of them is its first, or its last.
            for k in range(last, first, -1):
                yield _moved(order, k, first)
            for k in range(first, last):
                yield _moved(order, k, last)
        size = len(order)
        moves = [(source, target) for source in range(size) for target in range(size) if source != target]
        for k in range(len(moves)):
            other = k + self._below(len(moves) - k)
            moves[k], moves[other] = moves[other], moves[k]
            source, target = moves[k]
            yield _moved(order, source, target)
            if source < target:
                swapped = list(order)
                swapped[source], swapped[target] = swapped[target], swapped[source]
                yield swapped

    def _below(self, bound: int) -> int:
        return int(self._draw() * bound)


def _moved(order: list[int], source: int, target: int) -> list[int]:
    moved = list(order)
    moved.insert(target, moved.pop(source))
    return moved


def _critical_blocks(path: list[tuple[int, int]], order: list[int]) -> Iterator[tuple[int, int]]:
    """First and last position of launches that directly follow each other on a critical path, once each."""
    position = {launch: k for k, launch in enumerate(order)}
    seen = set()
    block: list[tuple[int, int]] = []  # (window, position)
    for window, k in [*path, (-1, -1)]:
        here = (window, position.get(k, -1))
        if block and here != (block[-1][0], block[-1][1] + 1):
            found = (block[0][1], block[-1][1])
            if found[0] < found[1] and found not in seen:
                seen.add(found)
                yield found
            block = []
        if here[1] >= 0:
            block.append(here)
