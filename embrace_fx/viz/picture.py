"""Computes what a picture shows, for all formats: panels, ranks, lanes, phases and metrics.

A picture has a panel for the prediction, one for the measurement, or both.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from embrace_fx.viz.palette import OF_SHARE, PAINTS, paint
from embrace_fx.viz.why import Why, explain_step
from embrace_fx.vocabulary.operation_id import CLASS_LANES, COPIES, LANES, Lane
from embrace_fx.vocabulary.picture_facts import PictureFacts
from embrace_fx.vocabulary.schedule import Diagnostics, Operation, Schedule, Span, Timeline, Wait

MIB = 2**20
SHOWN_WINDOWS = 2
_LEAST_GAP_MS = 0.001


@dataclass(frozen=True)
class Phase:
    """The backward, the optimizer's step or the forward of a window (a backward and the next forward), on one rank.

    Attributes:
        name: the name of the phase; "step" is the optimizer's step.
        window: the index of the window.
        start_ms, end_ms: milliseconds since the start of the first window.
        step: the index of the training step. It is 0 for the first backward shown.
    """

    name: Literal["backward", "step", "forward"]
    window: int
    rank: int
    start_ms: float
    end_ms: float
    step: int

    @property
    def label(self) -> str:
        """The phase's name with its training step, such as "backward t+1"."""
        return f"{self.name} t" + (f"{self.step:+d}" if self.step else "")


@dataclass(frozen=True)
class Gap:
    """A time during which a rank neither runs an operation nor waits for one.

    Attributes:
        window: the index of the window (a backward and the next forward).
        start_ms, end_ms: milliseconds since the start of the first window.
    """

    window: int
    rank: int
    start_ms: float
    end_ms: float


@dataclass(frozen=True)
class Metric:
    """One metric shown for a panel (a predicted or measured timeline): its name, value and colour.

    Attributes:
        label: the metric's name.
        unit: the value's unit, such as "ms", or "" for a ratio.
        lane: the lane (compute or a class of communication) that the metric describes, or None.
        is_wait: whether the metric is a time spent waiting, which pictures show hatched.
        paint: the key of the metric's colour in `palette.PAINTS`, or None.
    """

    label: str
    value: float
    unit: str
    lane: Lane | None = None
    is_wait: bool = False
    paint: str | None = None

    @property
    def digits(self) -> int:
        """The number of decimals with which to show the value."""
        return 3 if self.unit == "" else 2

    def __str__(self) -> str:
        return f"{self.value:.{self.digits}f} {self.unit}".rstrip()


@dataclass(frozen=True)
class Panel:
    """The predicted or the measured timeline of a picture, prepared for drawing.

    Attributes:
        status: whether the timeline was predicted or measured.
        timeline: the timeline.
        diagnostics: the timeline's metrics.
        critical_path: (window, name) of the operations that determine the step's length, in order; empty if unknown.
    """

    status: Literal["predicted", "measured"]
    timeline: Timeline
    diagnostics: Diagnostics
    critical_path: tuple[tuple[int, str], ...]

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks in the timeline, sorted."""
        return tuple(sorted({span.rank for span in self.timeline.spans}))

    @cached_property
    def windows(self) -> tuple[int, ...]:
        """The indices of the windows (a backward and the next forward each) in which the timeline has compute,
        sorted.
        """
        return tuple(sorted({phase.window for phase in self.phases}))

    @cached_property
    def lanes(self) -> tuple[Lane, ...]:
        """The lanes (compute, and each class of communication or copies) that the timeline uses, in drawing order."""
        used = {span.operation.lane for span in self.timeline.spans}
        return tuple(lane for lane in LANES if lane in used)

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """The backwards, optimizer steps and forwards of all ranks, ordered by rank, then by time."""
        by_window: defaultdict[tuple[int, int], list[Span]] = defaultdict(list)
        for span in self.timeline.spans:
            if span.operation.is_compute:
                by_window[span.rank, span.window].append(span)
        starts = {key: min(s.start_ms for s in spans) for key, spans in by_window.items()}
        return tuple(
            phase
            for (rank, window), spans in sorted(by_window.items())
            for phase in _phases_of_window(
                spans, rank, window, starts.get((rank, window + 1), max(s.end_ms for s in spans))
            )
        )

    @cached_property
    def starts_ms(self) -> dict[int, float]:
        """Maps each window (a backward and the next forward) to the time in ms at which the first rank begins the
        window.
        """
        return {w: min(phase.start_ms for phase in self.phases if phase.window == w) for w in self.windows}

    @property
    def shown_windows(self) -> tuple[int, ...]:
        """The indices of the windows shown before the reader scrolls: the last two, or the only one."""
        return self.windows[-SHOWN_WINDOWS:]

    @property
    def origin_ms(self) -> float:
        """The start in ms of the first window in `shown_windows`. The time axis has its 0 there."""
        return self.starts_ms[self.shown_windows[0]]

    @cached_property
    def shown_ms(self) -> tuple[float, float]:
        """The first start and the last end, in ms since `origin_ms`, of the operations and waits of `shown_windows`.

        The first start may be negative, because communication may start before its window does.
        """
        items: tuple[Span | Wait, ...] = (*self.timeline.spans, *self.timeline.waits)
        shown = [x for x in items if x.window in self.shown_windows]
        return min(x.start_ms for x in shown) - self.origin_ms, max(x.end_ms for x in shown) - self.origin_ms

    @cached_property
    def rows(self) -> dict[tuple[int, Lane], list[list[Span]]]:
        """Maps (rank, lane) to rows of a drawing. Each row is a list of spans that do not overlap. A lane is
        distributed over as few rows as possible.
        """
        by_lane: defaultdict[tuple[int, Lane], list[Span]] = defaultdict(list)
        for span in self.timeline.spans:
            by_lane[span.rank, span.operation.lane].append(span)
        return {(rank, lane): _pack_rows(by_lane.get((rank, lane), [])) for rank in self.ranks for lane in self.lanes}

    @cached_property
    def critical_spans(self) -> tuple[Span, ...]:
        """The spans of the operations on the critical path, on the lowest rank."""
        found = {(s.window, s.operation.name): s for s in self.timeline.spans if s.rank == self.ranks[0]}
        return tuple(found[key] for key in self.critical_path if key in found)

    def waits_of(self, rank: int) -> Iterator[Wait]:
        """Returns an iterator over the times during which a rank's compute waits."""
        return (wait for wait in self.timeline.waits if wait.rank == rank)

    def gaps_of(self, rank: int) -> Iterator[Gap]:
        """Yields the times during which a rank neither runs an operation nor waits."""
        computed = (s for s in self.timeline.spans if s.rank == rank and s.operation.is_compute)
        items: list[Span | Wait] = [*computed, *self.waits_of(rank)]
        busy = sorted(items, key=lambda item: item.start_ms)
        end_ms = busy[0].start_ms if busy else 0.0
        for item in busy:
            if item.start_ms - end_ms > _LEAST_GAP_MS:
                yield Gap(item.window, rank, end_ms, item.start_ms)
            end_ms = max(end_ms, item.end_ms)

    def _compute_metrics(self) -> Iterator[Metric]:
        """Yields a metric for each category of compute, such as backward or optimizer, that takes time in a step."""
        for share in ("backward", "your code", "optimizer", "loader", "forward"):
            if ms := self.diagnostics.shares_ms.get(share, 0.0):
                yield Metric(share, ms, "ms", "compute", paint=OF_SHARE[share])

    def why(self) -> Why | None:
        """Returns an explanation, in words, of how long a step takes, or None if a step takes no time."""
        is_measured = self.status == "measured"
        return explain_step(
            self.diagnostics.shares_ms, "A step takes" if is_measured else "A step is predicted to take"
        )

    def figures(self) -> tuple[Metric, ...]:
        """Returns the metrics of the panel, in the order in which they are shown."""
        d = self.diagnostics
        # Leave out the lanes of copies that a step does not use.
        copies = tuple(lane for lane in COPIES if d.communication_ms.get(lane))
        classes = (*CLASS_LANES, *copies)
        computed = tuple(self._compute_metrics())
        return (
            Metric("step", d.step_ms, "ms"),
            # Take the mean, not the median, so that the parts add up.
            Metric("compute", sum(part.value for part in computed), "ms", "compute"),
            *computed,
            *(Metric(f"exposed {c}", d.exposed_ms[c], "ms", c, True, c) for c in classes if c in d.exposed_ms),
            Metric("between operations", d.shares_ms.get("between", 0.0), "ms"),
            *(Metric(f"{c} busy", d.communication_ms[c], "ms", c) for c in classes if c in d.communication_ms),
            Metric("overlap ratio", d.overlap_ratio, ""),
            Metric("memory held", d.held_bytes / MIB, "MiB"),
        )


@dataclass(frozen=True)
class Bar:
    """A bar that shows a step time, divided by category. The step time is predicted, measured, or estimated for DDP.

    Attributes:
        name: the label of the bar, such as "predicted" or "DDP, estimated".
        parts: the time of each category.
        total_ms: the step's time.
    """

    name: str
    parts: tuple[Metric, ...]
    total_ms: float


@dataclass(frozen=True)
class Picture:
    """What a picture shows: a prediction, a measurement, or both.

    Attributes:
        schedule: the prediction, or None.
        timeline: the measurement, or None.
        background: facts to show beside the timelines, or None.

    Raises:
        ValueError: neither a schedule nor a timeline is given, or one of them has no compute.
    """

    schedule: Schedule | None
    timeline: Timeline | None
    background: PictureFacts | None = None

    def __post_init__(self) -> None:
        if self.schedule is None and self.timeline is None:
            raise ValueError("There is nothing to draw. Pass a schedule, a timeline, or both.")
        for panel in self.panels:
            if not any(span.operation.is_compute for span in panel.timeline.spans):
                raise ValueError(
                    f"The {panel.status} timeline has {len(panel.timeline.spans)} spans, but none of them is compute. "
                    "Record whole training steps inside `with model.record():`."
                )

    @cached_property
    def panels(self) -> tuple[Panel, ...]:
        """The panels for drawing: the predicted timeline, then the measured one, as far as they exist."""
        found = []
        if (schedule := self.schedule) is not None:
            found.append(Panel("predicted", schedule.predicted, schedule.diagnostics(), schedule.critical_path))
        if self.timeline is not None:
            found.append(Panel("measured", self.timeline, self.timeline.diagnostics(), ()))
        return tuple(found)

    @property
    def why(self) -> Why | None:
        """An explanation in words of the step's time. It explains the measurement if there is one, and otherwise a
        prediction that is based on measured times. It is None for a prediction by the cost model.

        A prediction by the cost model lacks the time of the optimizer and the data loader.
        """
        is_told = self.timeline is not None or (self.schedule is not None and self.schedule.source == "profile")
        return self.panels[-1].why() if is_told else None

    def ratios(self) -> dict[str, str]:
        """Maps the name of each metric to its measured value divided by its predicted value, as text. The text is "" if
        the ratio is unknown, or if the predicted value is shown as 0. Returns {} if the picture has no prediction or no
        measurement.
        """
        if len(self.panels) < 2:
            return {}
        predicted, measured = ({figure.label: figure for figure in panel.figures()} for panel in self.panels)
        return {label: _format_ratio(measured.get(label), predicted.get(label)) for label in {**predicted, **measured}}

    def bars(self) -> tuple[Bar, ...]:
        """Returns bars that compare step times, as far as they are known: predicted, measured, and estimated for DDP
        with the same compute.
        """
        found = []
        for panel in self.panels:
            parts = tuple(f for f in panel.figures() if f.paint or f.label == "between operations")
            found.append(Bar(panel.status, parts, panel.diagnostics.step_ms))
        if self.background is not None and self.background.steps:
            own = [figure for figure in found[-1].parts if not figure.is_wait]
            exposed_ms = self.background.ddp_exposed_ms * self._link_slowdown()
            exposed = Metric("exposed AllReduce", exposed_ms, "ms", "dense", True, "dense")
            shown = (*own[:-1], exposed, own[-1])
            found.append(Bar("DDP, estimated", shown, sum(part.value for part in shown)))
        return tuple(found)

    def _link_slowdown(self) -> float:
        """Returns the measured time of dense communication divided by the predicted time, or 1 if either is unknown.
        DDP's estimated communication is multiplied by this factor.
        """
        predicted, *measured = (panel.diagnostics.communication_ms.get("dense", 0.0) for panel in self.panels)
        return measured[0] / predicted if measured and measured[0] and predicted else 1.0

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """The lanes (compute, and each class of communication or copies) that any panel uses, in drawing order."""
        return tuple(lane for lane in LANES if any(lane in panel.lanes for panel in self.panels))

    def legend(self) -> Iterator[tuple[Literal["paint", "wait", "gap", "path"], str, str]]:
        """Yields the legend's entries: (kind of mark, key of its colour in `palette.PAINTS` or "", text)."""
        used = {paint(span.operation) for panel in self.panels for span in panel.timeline.spans}
        yield from (("paint", each, name) for each, name in PAINTS.items() if each in used)
        if waited := next((w.lane for panel in self.panels for w in panel.timeline.waits), None):
            yield "wait", waited, "wait, in the colour of its class"
        if any(next(panel.gaps_of(panel.ranks[0]), None) for panel in self.panels):
            yield "gap", "", "between operations"
        if any(panel.critical_path for panel in self.panels):
            yield "path", "", "critical path"

    @property
    def title(self) -> str:
        """The title of the picture."""
        of = f"Schedule {self.schedule.name}" if self.schedule else "Timeline"
        return f"{of}, {' and '.join(panel.status for panel in self.panels)}"

    @property
    def subtitle(self) -> str:
        """Text on where the prediction comes from, and on how many ranks the timeline was measured."""
        parts = []
        if self.schedule:
            parts.append(f"prediction from the {self.schedule.source}")
        if self.timeline:
            ranks = self.timeline.world_size
            parts.append(f"measured on {ranks} rank{'s' if ranks != 1 else ''}")
        return ", ".join(parts)


def _format_ratio(measured: Metric | None, predicted: Metric | None) -> str:
    """Returns a measured value divided by the predicted one, as text. Returns "" if either is None, or if the predicted
    value is shown as 0, because the ratio would be noise.

    Ratios of 100 or more have no decimals, to fit a phone's width.
    """
    if measured is None or predicted is None or not round(predicted.value, predicted.digits):
        return ""
    ratio = measured.value / predicted.value
    return f"{ratio:.{0 if ratio >= 100 else 2}f}"


def labels(operation: Operation) -> tuple[str, ...]:
    """Returns three labels for an operation, longest first: its name, the names of the tables or buckets that it
    serves, and the last part of these names.
    """
    served = ", ".join(_short_name(name) for name in operation.serves)
    return (operation.name, served, re.split(r"[. ](?!\+)", served)[-1])


def _short_name(name: str) -> str:
    """Returns a short form of a table's name. For a joined table (several tables stored as one), it is the first
    table's name and the number of other tables.

    >>> _short_name("user.weight and 2 more")
    'user +2'
    """
    first, _, others = name.partition(" and ")
    table = first.removesuffix(".weight")
    return f"{table} +{others.removesuffix(' more')}" if others else table


def _phases_of_window(spans: Sequence[Span], rank: int, window: int, end_ms: float) -> Iterator[Phase]:
    """Yields the phases (backward, optimizer's step and forward) of a window on one rank. Leaves out phases that take
    no time.

    Args:
        spans: the compute operations of the window on that rank.
        window: the index of the window (a backward and the next forward).
        end_ms: the end of the window.
    """
    start_ms = min(span.start_ms for span in spans)
    backward_start_ms = min((s.start_ms for s in spans if s.operation.kind == "backward"), default=start_ms)
    forward_ends_ms = [s.end_ms for s in spans if s.operation.kind == "forward"]
    if forward_ends_ms and max(forward_ends_ms) <= backward_start_ms:  # a single step starts with its forward
        yield Phase("forward", window, rank, start_ms, backward_start_ms, window)
        spans, start_ms = [s for s in spans if s.start_ms >= backward_start_ms], backward_start_ms
    backward_end_ms = max((s.end_ms for s in spans if s.operation.kind == "backward"), default=start_ms)
    forward_start_ms = min((s.start_ms for s in spans if s.operation.kind == "forward"), default=end_ms)
    # If a block's update runs during other blocks' backward, the optimizer's step has no separate time.
    forward_start_ms = max(forward_start_ms, backward_end_ms)
    for phase in (
        Phase("backward", window, rank, start_ms, backward_end_ms, window),
        Phase("step", window, rank, backward_end_ms, forward_start_ms, window),
        Phase("forward", window, rank, forward_start_ms, end_ms, window + 1),
    ):
        if phase.end_ms > phase.start_ms:
            yield phase


def _pack_rows(spans: Sequence[Span]) -> list[list[Span]]:
    """Distributes spans over rows of a drawing, so that no spans of a row overlap. In order of time, each span goes
    into the first row that is free at its start.
    """
    rows: list[list[Span]] = [[]]
    for span in sorted(spans, key=lambda s: (s.start_ms, s.end_ms)):
        free = next((row for row in rows if not row or row[-1].end_ms <= span.start_ms + 1e-6), None)
        if free is None:
            rows.append(free := [])
        free.append(span)
    return rows
