"""Simulates the steps of training under a launch order, on a machine with one processor and one link.

Contract
    One processor runs the compute operations in the program's order. One link carries the communications strictly in
    launch order: the head of the line blocks those behind it until its dependences have ended. Windows follow each
    other; all launches of one leave before those of the next. If the head of the line would wait for one behind it,
    the order is refused, never simulated. Offloads and reloads each run on their own lane, in the program's order of
    submission.

    Operations are numbers: compute is 0 to C - 1 in the program's order; communications follow, by name; then copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from embrace_fx.vocabulary.operation_id import BETWEEN
from embrace_fx.vocabulary.schedule import Operation, Span, StepGraph, Timeline, Wait

WINDOWS = 8
"""Most windows simulated in a row until one repeats the one before it."""
TOLERANCE = 1e-9
"""Relative; smaller differences of times are rounding errors."""


@dataclass(frozen=True)
class WindowTimes:
    """The simulated times of several windows (each is a backward and the next forward), in ms.

    Attributes:
        starts, ends: for each window, the start and the end of each operation, by operation index.
        step_ms: the time from one window to the next.
    """

    starts: list[list[float]]
    ends: list[list[float]]
    step_ms: float


class LinkMachine:
    """A simulated machine with one processor and one network link, on which training steps run under a launch order.

    Only the dependences that affect a simulation are stored. Compute operations always run in the program's order, and
    communications in the launch order. If a communication needs several compute operations, only the last of them is
    stored.
    """

    def __init__(self, steps: StepGraph) -> None:
        by_name = {o.name: o for o in steps.operations}
        self.steps = steps
        self.compute = _compute_operations(steps, by_name)
        self.launches = sorted(steps.communications, key=lambda o: o.name)
        self.operations = [*self.compute, *self.launches, *steps.copies]
        self.count, self.copying = len(self.compute), len(self.compute) + len(self.launches)
        self.durations = [o.duration_ms for o in self.operations]
        self.index = {o.name: k for k, o in enumerate(self.operations)}
        self.reach = max((d.distance for d in steps.dependences), default=0)
        size = len(self.operations)
        # Operation -> operations of the same window that it waits for.
        self.needs: list[list[int]] = [[] for _ in range(size)]
        # Operation -> (number of windows earlier, operation there) that it waits for.
        self.needs_earlier: list[list[tuple[int, int]]] = [[] for _ in range(size)]
        # Communication -> communications that it waits for.
        self.needs_launches: list[list[tuple[int, int]]] = [[] for _ in range(size)]
        released = [-self.count * (self.reach + 1)] * size  # launch -> the last compute operation that it waits for
        for d in sorted(steps.dependences, key=lambda d: (d.distance, d.before, d.after)):
            self._add_dependence(d.before, d.after, d.distance, released)
        for launch in range(self.count, size):
            later, before = divmod(released[launch], max(self.count, 1))
            if self.count and later == 0:
                self.needs[launch].append(before)
            elif self.count and -later <= self.reach:
                self.needs_earlier[launch].append((-later, before))
        self._put_backward_first(released)
        self._order_copies()

    def _order_copies(self) -> None:
        """Makes each copy start only after the program has submitted it and the previous copy in its direction has
        ended.
        """
        # Compute operation -> the copies that wait for no later compute operation.
        self._copies_behind: dict[int, list[int]] = {}
        lanes: dict[str, list[int]] = {}
        last_need = {k: max(self.needs[k], default=-1) for k in range(self.copying, len(self.operations))}
        self.copies_in_order = sorted(last_need, key=lambda k: (last_need[k], k))
        for k in self.copies_in_order:
            self._copies_behind.setdefault(last_need[k], []).append(k)
            lanes.setdefault(self.operations[k].lane, []).append(k)
        for line in lanes.values():
            for before, after in pairwise(line):
                self.needs[after].append(before)
            self.needs_earlier[line[0]].append((1, line[-1]))

    def _put_backward_first(self, released: list[int]) -> None:
        """Adds dependences, so that each launch of the forward comes after all launches of the backward in the same
        process group.

        The collectives of a process group are always launched in one order. The training loop may wait for a gradient,
        for example to clip it, before the forward has submitted anything. If the gradient's launch came after a launch
        of the forward, it would never start.

        Args:
            released: launch -> the last compute operation that it needs.
        """
        between = self.index.get(str(BETWEEN))
        if between is None:
            return
        launches = range(self.count, self.copying)
        for later in (k for k in launches if released[k] >= between):
            lane = self.operations[later].lane
            earlier = (k for k in launches if released[k] < between and self.operations[k].lane == lane)
            self.needs_launches[later].extend((0, k) for k in earlier)

    def _add_dependence(self, before: str, after: str, distance: int, released: list[int]) -> None:
        """Makes operation `after` depend on operation `before` of the window that is `distance` windows earlier (0 for
        the same window). Raises `ValueError` if that is impossible.

        Args:
            released: launch -> the last compute operation that it needs, updated in place.
        """
        for name in (before, after):
            if name not in self.index:
                raise ValueError(
                    f"The dependency {before!r} -> {after!r} names {name!r}, which is not an operation of the step. "
                    f"Use the names of its operations: {', '.join(sorted(self.index))}."
                )
        if distance < 0:
            raise ValueError(
                f"The dependency {before!r} -> {after!r} has distance {distance}, but distances must not be negative."
            )
        first, second = self.index[before], self.index[after]
        if first < self.count and second < self.count:
            if distance == 0 and first >= second:
                raise ValueError(
                    f"The compute order has {after!r} before {before!r}, on which it depends. Put {before!r} first."
                )
        elif first < self.count:
            released[second] = max(released[second], first - distance * self.count)
        elif self.count <= second < self.copying:
            self.needs_launches[second].append((distance, first))
        elif distance == 0:
            self.needs[second].append(first)
        else:
            self.needs_earlier[second].append((distance, first))

    def names(self, order: Sequence[int]) -> tuple[str, ...]:
        """Returns the names of the operations with the indices `order`."""
        return tuple(self.operations[k].name for k in order)

    def sequence_if_legal(self, order: Sequence[int]) -> list[int] | None:
        """Returns the result of `sequence` for a launch order, or None if the order is not legal."""
        found = self._sequence(order)
        return found if isinstance(found, list) else None

    def sequence(self, order: Sequence[int]) -> list[int]:
        """Returns all operations of a window (a backward and the next forward), each after everything that it waits
        for, with collectives in this launch order.

        Raises:
            ValueError: no such sequence exists.
        """
        found = self._sequence(order)
        if isinstance(found, list):
            return found
        head, later = (self.operations[k].name for k in found)
        if head == later:
            raise ValueError(
                f"The compute order cannot run: {head!r} waits for a compute operation that itself waits for {head!r}. "
                "Move the compute operation, or remove one of the two dependencies."
            )
        raise ValueError(
            f"The launch order has {head!r} before {later!r}, on which it depends: all ranks would deadlock. Launch "
            f"{later!r} first."
        )

    def _sequence(self, order: Sequence[int]) -> list[int] | tuple[int, int]:
        """Returns the result of `sequence` for a launch order, or, if there is none, (first launch that waits for a
        later one, that later launch).

        Only dependences inside a window matter, because windows are launched one after the other.
        """
        done = [False] * len(self.operations)
        sequence = self._copies_behind.get(-1, [])[:]
        for copy in sequence:
            done[copy] = True
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
                    for copy in self._copies_behind.get(ran, ()):
                        done[copy] = True
                        sequence.append(copy)
                    ran += 1
            done[launch] = True
            sequence.append(launch)
        for left in range(ran, self.count):
            sequence += [left, *self._copies_behind.get(left, ())]
        return sequence

    def run(self, sequence: list[int], windows: int = WINDOWS) -> WindowTimes:
        """Simulates several windows (each a backward and the next forward) in a row. Stops early once the windows'
        times repeat.

        Args:
            sequence: the operations of each window, in order.
            windows: the maximum number of windows.
        """
        count, durations, needs, needs_earlier = self.count, self.durations, self.needs, self.needs_earlier
        copying = self.copying
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
                start = processor if k < count else link if k < copying else 0.0
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
                elif k < copying:
                    link = end
            clocks.append((processor, link))
            if window and _repeats(ends[-2], ended):
                repeats += 1
                if repeats >= max(self.reach, 1) and window > self.reach:
                    return WindowTimes(starts, ends, ended[0] - ends[-2][0] if ended else 0.0)
            else:
                repeats = 0
        # The times do not repeat if windows alternate, or if the link falls further behind compute in each window.
        middle = windows // 2
        rates = [(last - first) / (windows - middle) for first, last in zip(clocks[middle], clocks[-1], strict=True)]
        return WindowTimes(starts, ends, max(rates))

    def critical_path(self, run: WindowTimes, order: Sequence[int]) -> list[tuple[int, int]]:
        """Returns the operations that determine the length of the last two windows (each a backward and the next
        forward), as pairs (window, operation).

        Args:
            run: the simulated times.
            order: the launch order.
        """
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
            # Put the lane first: if it is the cause, the operation could not have started earlier for any other reason.
            causes = [
                *([previous[k]] if k in previous else []),
                *((0, p) for p in self.needs[k]),
                *self.needs_earlier[k],
            ]
            decisive = [(d, p) for d, p in causes if d <= window and run.ends[window - d][p] == start]
            if not decisive:
                break
            window, k = window - decisive[0][0], decisive[0][1]
        return path[::-1]

    def make_timeline(self, run: WindowTimes, order: Sequence[int]) -> tuple[Timeline, tuple[tuple[int, str], ...]]:
        """Returns the timeline of the last two simulated windows, as on one rank, and its critical path: (window, name)
        of the operations that determine the windows' length, in order.

        Args:
            run: the simulated times.
            order: the launch order.
        """
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
        path = tuple((window - first, self.operations[k].name) for window, k in self.critical_path(run, order))
        return Timeline(spans, shown, 1, self.steps.dependences), path

    def dependences(self, operation: int) -> list[tuple[int, int]]:
        """Returns pairs (how many windows earlier, operation index) of all operations on which this one depends."""
        return [
            *((0, p) for p in self.needs[operation]),
            *self.needs_launches[operation],
            *self.needs_earlier[operation],
        ]

    def any_sequence(self) -> list[int]:
        """Returns a window's operations (of a backward and the next forward), each after its dependences, without
        regard to a launch order.
        """
        needs = {k: [p for distance, p in self.dependences(k) if distance == 0] for k in range(len(self.operations))}
        for before, after in pairwise(range(self.count)):
            needs[after].append(before)
        try:
            return [*TopologicalSorter(needs).static_order()]
        except CycleError:
            # No legal order exists; `sequence` raises and names two operations.
            self.sequence(range(self.count, self.copying))
            raise


def _repeats(previous: list[float], current: list[float]) -> bool:
    """Returns whether the operations of two consecutive windows (each a backward and the next forward) run at the same
    times, except for a constant shift.

    Args:
        previous, current: the times of the operations in each window.
    """
    if not current:
        return True
    shift = current[0] - previous[0]
    tolerance = TOLERANCE * max(current)
    return all(abs(new - old - shift) <= tolerance for old, new in zip(previous, current, strict=True))


def _compute_operations(steps: StepGraph, by_name: dict[str, Operation]) -> list[Operation]:
    """Returns the compute operations of a step in program order.

    Args:
        by_name: all operations of the step.

    Raises:
        ValueError: the names are not unique, or the step's compute order does not contain each operation once.
    """
    if len(by_name) != len(steps.operations):
        names = [o.name for o in steps.operations]
        raise ValueError(
            f"A step has several operations named {sorted({n for n in names if names.count(n) > 1})}. Give each "
            "operation a unique name."
        )
    expected = sorted(o.name for o in steps.operations if o.is_compute)
    if sorted(steps.compute_order) != expected:
        raise ValueError(
            f"compute_order must contain each compute operation of the step once: {expected}. It contains "
            f"{sorted(steps.compute_order)}."
        )
    return [by_name[name] for name in steps.compute_order]
