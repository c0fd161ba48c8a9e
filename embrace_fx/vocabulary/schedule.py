"""Schedules as plain data: the operations of a step, the order of launches, and all times. A window is a backward and
the next forward.

A *window* lasts from the start of one backward to the start of the next: the backward of step t, the optimizer's step,
and the forward of step t + 1. The scheduler orders windows, because the gradients of step t are reduced, applied and
read inside one. Two consecutive windows show the overlap across a step's boundary.

    StepGraph   operations of a window and their true dependences        possible overlap
    Schedule    one launch order, with predicted start and end            planned overlap
    Timeline    measured start and end, of all ranks                      actual overlap

All three are plain data: printed, compared between ranks, tested without a device, drawn.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from statistics import median
from typing import Literal, get_args

from embrace_fx.vocabulary.operation_id import CLASS_LANES, COPIES, Kind, Lane, OperationId
from embrace_fx.vocabulary.step_parts import SHARES, Share, time_category

IN_FLIGHT = 1
"""Launches in flight at once. Two would share the link and delay the one needed first. Hiding the second one's latency
would gain less, because a chunk takes many times the latency."""

ScheduleName = Literal["none", "horizontal", "vertical", "2d"]
SCHEDULES: tuple[ScheduleName, ...] = get_args(ScheduleName)
"""The schedules of the paper's ablation (EmbRace, ICPP 2022, section 4)."""
ScheduleOption = ScheduleName | Literal["auto"]
AUTO, FULL = "auto", "2d"
"""The option to let the planner choose, and the schedule with the most overlap."""

LOOKS_AHEAD: frozenset[str] = frozenset({"vertical", "2d"})
"""Schedules that split a batch's rows by whether the next batch reads them."""
INTO_FORWARD: frozenset[str] = frozenset({"horizontal", "2d"})
"""Schedules that defer the updates of buckets to the next forward."""


@dataclass(frozen=True)
class Cuts:
    """How a schedule divides buckets into chunks, and delayed gradients into pieces. Delayed gradients are those of
    table rows that the next batch does not read.

    Attributes:
        chunks: for each bucket, the number of elements in each chunk.
        pieces: pairs (name of a table or joined table, number of pieces of its delayed gradients).
    """

    chunks: tuple[tuple[int, ...], ...]
    pieces: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Operation:
    """An operation of a step (compute, collective or copy), which runs on one lane.

    Attributes:
        name: unique within a window (a backward and the next forward) and equal on every rank, such as "backward
            encoder.0" or "bucket 2 [0]". It is the text of `id`, if that is not None.
        kind: the kind of operation.
        lane: where it runs: compute, a process group, or a direction of copies.
        duration_ms: its time on an idle processor or link.
        sent_bytes: bytes that one rank sends, averaged over ranks, or 0 for compute.
        serves: names of the parameters, tables or blocks for which it computes or communicates.
        held_bytes: bytes of memory held from its end until the last operation that depends on it has ended.
        id: its id in a compiled graph, or None.
    """

    name: str
    kind: Kind
    lane: Lane
    duration_ms: float
    sent_bytes: int = 0
    serves: tuple[str, ...] = ()
    held_bytes: int = 0
    id: OperationId | None = None

    @staticmethod
    def from_id(
        operation_id: OperationId,
        duration_ms: float,
        sent_bytes: int = 0,
        serves: tuple[str, ...] = (),
        held_bytes: int = 0,
    ) -> Operation:
        """Creates an operation from its id, which gives its name, kind and lane. The other arguments are fields of the
        operation.
        """
        return Operation(
            str(operation_id),
            operation_id.kind,
            operation_id.lane,
            duration_ms,
            sent_bytes,
            serves,
            held_bytes,
            operation_id,
        )

    @property
    def is_compute(self) -> bool:
        """Whether the operation runs on the processor or device, rather than being a collective or copy."""
        return self.lane == "compute"

    @property
    def share(self) -> Share:
        """The category of a step's time, such as "forward" or "dense", under which the operation is reported."""
        return time_category(self.id or OperationId(self.kind, self.name, lane=self.lane))

    @property
    def is_communication(self) -> bool:
        """Whether the operation is a collective between ranks."""
        return self.lane in CLASS_LANES


@dataclass(frozen=True)
class Dependence:
    """A dependence between two operations, `before` and `after`, given by name. `after` in window w starts only once
    `before` in window w - `distance` has ended.
    """

    before: str
    after: str
    distance: int = 0


@dataclass(frozen=True)
class StepGraph:
    """The operations of a window (a backward and the next forward), and the dependences between them.

    Attributes:
        operations: in any order.
        dependences: between operations of one or different windows.
        compute_order: names of the compute operations in the fixed order of the program.
    """

    operations: tuple[Operation, ...]
    dependences: tuple[Dependence, ...]
    compute_order: tuple[str, ...]

    def __getitem__(self, name: str) -> Operation:
        for operation in self.operations:
            if operation.name == name:
                return operation
        raise KeyError(f"The step has no operation {name!r}. Its operations are {[o.name for o in self.operations]}.")

    @property
    def copies(self) -> tuple[Operation, ...]:
        """The offloads and reloads of a window (a backward and the next forward)."""
        return tuple(o for o in self.operations if o.lane in COPIES)

    @property
    def communications(self) -> tuple[Operation, ...]:
        """The collectives of a window (a backward and the next forward)."""
        return tuple(o for o in self.operations if o.is_communication)


@dataclass(frozen=True)
class Span:
    """One run of an operation on a rank, predicted or measured.

    Attributes:
        window: the index of the window (a backward and the next forward), from the first one shown.
        start_ms, end_ms: milliseconds since the start of the first window, on clocks aligned over ranks.
    """

    operation: Operation
    window: int
    rank: int
    start_ms: float
    end_ms: float


@dataclass(frozen=True)
class Wait:
    """A time during which a rank's compute waits for a collective or copy.

    Attributes:
        launch: name of the operation that compute waits for.
        lane: the lane of that operation.
        window: the index of the window (a backward and the next forward), from the first one shown.
        start_ms, end_ms: milliseconds since the start of the first window, on clocks aligned over ranks.
    """

    launch: str
    lane: Lane
    window: int
    rank: int
    start_ms: float
    end_ms: float


@dataclass(frozen=True)
class Diagnostics:
    """Metrics of a predicted or measured timeline.

    A lane is where operations run: compute, a class of collectives, or a direction of copies.

    Attributes:
        step_ms: time from the start of one backward to the start of the next.
        compute_ms: the part of a step's time spent in compute.
        exposed_ms: lane -> the part of a step's time in which compute waits for it. Has an entry for every class of
            collectives, and for copies if there are any.
        communication_ms: lane -> the part of a step's time in which the lane is busy. Has the same entries as
            `exposed_ms`.
        overlap_ratio: share of the time of communication and copies that compute hides, from 0 to 1. Without
            communication and copies, it is 1.
        shares_ms: a step's time by category (`embrace_fx.vocabulary.step_parts`). The categories add up to the step.
        held_bytes: the maximum sum of `Operation.held_bytes` at any time, on any rank.
    """

    step_ms: float
    compute_ms: float
    exposed_ms: dict[Lane, float]
    communication_ms: dict[Lane, float]
    overlap_ratio: float
    held_bytes: int
    shares_ms: dict[Share, float] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class MemoryAt:
    """The bytes that a rank holds from one point in time until the next.

    In a prediction, these are the bytes that forward and backward have allocated. In a measurement, they are the growth
    of the memory in use (of a device's allocator, or of the process) since the first time shown, which may be negative.

    Attributes:
        at_ms: the time, in milliseconds since the start of the first window.
        held_bytes: the bytes held from then on.
    """

    rank: int
    at_ms: float
    held_bytes: int


@dataclass(frozen=True)
class Timeline:
    """When operations ran on each rank: measured under `record()`, or predicted.

    Attributes:
        spans: the runs of operations, in any order.
        waits: the times in which compute waits, in any order.
        world_size: number of ranks that took part, shown or not.
        dependences: which operations must end before which. They determine how long memory is held. Without them,
            `Diagnostics.held_bytes` is 0.
        memory: the bytes that ranks hold over time, if known.
    """

    spans: tuple[Span, ...]
    waits: tuple[Wait, ...]
    world_size: int
    dependences: tuple[Dependence, ...] = ()
    memory: tuple[MemoryAt, ...] = ()

    def diagnostics(self) -> Diagnostics:
        """Computes the timeline's metrics, such as the median step time."""
        return diagnose(self)


@dataclass(frozen=True)
class Schedule:
    """The order in which all ranks launch collectives in a window (a backward and the next forward), with a predicted
    timeline.

    Attributes:
        name: one of `SCHEDULES`.
        launch_order: names of the collectives, in order.
        steps: the operations that are ordered, with their dependences.
        predicted: the predicted timeline of one rank: two windows of the steady state.
        critical_path: (window, name) of the operations of `predicted` that determine its length, in order.
        source: where durations come from: "cost model" or "profile".
    """

    name: str
    launch_order: tuple[str, ...]
    steps: StepGraph
    predicted: Timeline
    critical_path: tuple[tuple[int, str], ...] = ()
    source: str = "cost model"

    @property
    def without_storage_ms(self) -> float:
        """The predicted step time in milliseconds, excluding waits for storage reads of tables larger than memory."""
        figures = self.diagnostics()
        return figures.step_ms - figures.exposed_ms.get("storage", 0.0)

    @property
    def launches(self) -> tuple[OperationId, ...]:
        """The ids of the collectives in launch order, without those that have no id."""
        ids = {operation.name: operation.id for operation in self.steps.communications}
        return tuple(each for name in self.launch_order if (each := ids[name]) is not None)

    def diagnostics(self) -> Diagnostics:
        """Computes the metrics of the predicted timeline."""
        return diagnose(self.predicted)

    def digest(self) -> str:
        """Returns a hash of the schedule's name and launch order, which must be equal on all ranks."""
        return hashlib.sha256("\n".join((self.name, *self.launch_order)).encode()).hexdigest()


def diagnose(timeline: Timeline) -> Diagnostics:
    """Computes the metrics of a timeline. Times are medians over ranks and windows (a backward and the next forward
    each). The memory held is the maximum.

    A step lasts from the first compute operation of a window to that of the next window. If there is only one window,
    the step lasts to the end of the window's last compute operation. Windows without compute are not counted.
    """
    spans: dict[tuple[int, int], list[Span]] = defaultdict(list)  # (rank, window) -> its spans
    for span in timeline.spans:
        spans[span.rank, span.window].append(span)
    waits: dict[tuple[int, int], list[Wait]] = defaultdict(list)
    for wait in timeline.waits:
        waits[wait.rank, wait.window].append(wait)
    shown = sorted(key for key, found in spans.items() if any(s.operation.lane == "compute" for s in found))
    copied = {span.operation.lane for span in timeline.spans} & {*COPIES}
    classes = (*CLASS_LANES, *(lane for lane in COPIES if lane in copied))
    exposed = {lane: _median([_total_on_lane(waits[key], lane) for key in shown]) for lane in classes}
    busy = {lane: _median([_total_on_lane(spans[key], lane) for key in shown]) for lane in classes}
    all_exposed, all_busy = (
        _median([sum(_total_on_lane(found[key], lane) for lane in classes) for key in shown])
        for found in (waits, spans)
    )
    lengths = _step_lengths({key: spans[key] for key in shown})
    return Diagnostics(
        step_ms=_median([*lengths.values()]),
        compute_ms=_median([_total_on_lane(spans[key], "compute") for key in shown]),
        exposed_ms=exposed,
        communication_ms=busy,
        overlap_ratio=min(max(1.0 - all_exposed / all_busy, 0.0), 1.0) if all_busy else 1.0,
        held_bytes=max((_peak_held_bytes(timeline, rank) for rank in {s.rank for s in timeline.spans}), default=0),
        shares_ms=_category_times(lengths, spans, waits),
    )


_Window = tuple[int, int]  # (rank, window)


def _category_times(
    lengths: Mapping[_Window, float], spans: Mapping[_Window, list[Span]], waits: Mapping[_Window, list[Wait]]
) -> dict[Share, float]:
    """Returns the time in milliseconds that a step spends in each category, averaged over ranks. For each rank, takes
    the window of median length. A window is a backward and the next forward.

    Args:
        lengths: (rank, window) -> length of the window in milliseconds.
        spans, waits: (rank, window) -> the runs of operations, and the waits of compute, in the window.
    """
    found: dict[Share, float] = dict.fromkeys(SHARES, 0.0)
    by_rank: dict[int, list[_Window]] = defaultdict(list)
    for key in lengths:
        by_rank[key[0]].append(key)
    for keys in by_rank.values():
        typical = sorted(keys, key=lambda key: lengths[key])[(len(keys) - 1) // 2]
        parts = [(s.operation.share, s.end_ms - s.start_ms) for s in spans[typical] if s.operation.is_compute]
        parts += [(w.lane, w.end_ms - w.start_ms) for w in waits.get(typical, ()) if w.lane != "compute"]
        for share, ms in (*parts, ("between", max(0.0, lengths[typical] - sum(ms for _, ms in parts)))):
            found[share] += ms / len(by_rank)
    return found


def _median(values: Sequence[float]) -> float:
    """Returns the median, or 0 for no values."""
    return median(values) if values else 0.0


def _total_on_lane(intervals: Iterable[Span | Wait], lane: Lane) -> float:
    """Returns the total milliseconds of those intervals that are on a lane."""
    lanes = ((i.operation.lane if isinstance(i, Span) else i.lane, i) for i in intervals)
    return sum(i.end_ms - i.start_ms for found, i in lanes if found == lane)


def _step_lengths(windows: dict[_Window, list[Span]]) -> dict[_Window, float]:
    """Returns the length of each step in milliseconds: the time from the start of compute in a window (a backward and
    the next forward) to the start of compute in the next window. If no window has a next one, returns the time from the
    start to the end of compute in each window.

    Args:
        windows: (rank, window) -> the runs of operations in the window.
    """
    compute = {key: [s for s in found if s.operation.lane == "compute"] for key, found in windows.items()}
    starts = {key: min(s.start_ms for s in found) for key, found in compute.items()}
    following = {
        (rank, window): starts[rank, window + 1] - start
        for (rank, window), start in starts.items()
        if (rank, window + 1) in starts
    }
    return following or {key: max(s.end_ms for s in compute[key]) - start for key, start in starts.items()}


def _peak_held_bytes(timeline: Timeline, rank: int) -> int:
    """Returns the maximum, over time, of the bytes that a rank's operations hold (`Operation.held_bytes`)."""
    ends = {(s.window, s.operation.name): s.end_ms for s in timeline.spans if s.rank == rank}
    last = max(ends.values())
    readers: dict[str, list[Dependence]] = defaultdict(list)
    for dependence in timeline.dependences:
        readers[dependence.before].append(dependence)
    changes = []  # (time, bytes): sorted, so that memory is freed before it is allocated at equal times
    for span in timeline.spans:
        if span.rank == rank and span.operation.held_bytes:
            name, held = span.operation.name, span.operation.held_bytes
            read = [ends.get((span.window + d.distance, d.after), last) for d in readers[name]]
            changes += [(span.end_ms, held), (max([span.end_ms, *read]), -held)]
    return max(accumulate(change for _, change in sorted(changes)), default=0)
