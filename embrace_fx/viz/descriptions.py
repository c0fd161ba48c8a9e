"""Text descriptions of a picture's operations, waits and gaps: name and time, then lines of `term: text`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from embrace_fx.viz.picture import Gap, Panel, Picture
from embrace_fx.vocabulary.plan_text import readable_bytes
from embrace_fx.vocabulary.schedule import Span, Wait

Item = Span | Wait | Gap


class HoverTexts:
    """Describes operations, waits and gaps of a picture in words. The texts appear when the pointer hovers over
    them.
    """

    def __init__(self, picture: Picture) -> None:
        self._picture = picture
        self._pieces: defaultdict[tuple[str, int, int, str], list[Span]] = defaultdict(list)
        for panel in picture.panels:
            for span in panel.timeline.spans:
                self._pieces[panel.status, span.rank, span.window, span.operation.name].append(span)
        self._critical = {panel.status: {id(span) for span in panel.critical_spans} for panel in picture.panels}
        schedule = picture.schedule
        self._place = {name: k for k, name in enumerate(schedule.launch_order)} if schedule else {}
        self._needs, self._needed_by = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
        for each in schedule.steps.dependences if schedule else ():
            self._needs[each.after].append(each.before + (" (window before)" if each.distance else ""))
            self._needed_by[each.before].append(each.after + (" (next window)" if each.distance else ""))

    def text(self, panel: Panel, item: Item) -> str:
        """Returns the description of an operation, wait or gap, with one fact per line.

        Args:
            panel: the timeline (predicted or measured) that contains the item.
            item: the operation, wait or gap.
        """
        step = f"t{item.window:+d}" if item.window else "t"
        where = f"where: {panel.status}, rank {item.rank}, window {step}"
        return "\n".join((f"{name(item)}: {_format_ms(item.end_ms - item.start_ms)}", where, *self._lines(panel, item)))

    def _lines(self, panel: Panel, item: Item) -> Iterator[str]:
        """Yields the lines of an item's description that follow its name, time and place.

        Args:
            panel: the timeline (predicted or measured) that contains the item.
            item: an operation, wait or gap.
        """
        if not isinstance(item, Span):
            yield f"class: {item.lane}" if isinstance(item, Wait) else "runs: Python and autograd"
            yield f"starts: {self._time_in_window(panel, item.window, item.start_ms)}"
            return
        operation = item.operation
        yield f"kind: {operation.kind.replace('_', '-')}, on lane {operation.lane}"
        if operation.serves:
            yield f"serves: {', '.join(operation.serves)}"
        if not operation.is_compute:
            yield f"{'sends' if operation.is_communication else 'copies'}: {readable_bytes(operation.sent_bytes)}"
        if operation.held_bytes:
            yield f"holds: {readable_bytes(operation.held_bytes)}"
        if operation.name in self._place:
            yield f"launch: {self._place[operation.name] + 1} of {len(self._place)}"
        yield f"alone: {_format_ms(operation.duration_ms)}"
        yield from self._times(panel, item)
        if id(item) in self._critical[panel.status]:
            yield "critical: on the critical path"
        for term, names in (("needs", self._needs), ("needed by", self._needed_by)):
            if operation.name in names:
                yield f"{term}: {', '.join(names[operation.name])}"

    def _times(self, panel: Panel, item: Span) -> Iterator[str]:
        """Yields lines with the predicted time and the measured time of an operation, and their ratio.

        Args:
            panel: the timeline (predicted or measured) that contains `item`.
            item: one run of the operation.
        """
        times: list[float] = []
        for other in self._picture.panels:
            window = (
                item.window
                if other is panel
                else other.shown_windows[(item.window - panel.shown_windows[0]) % len(other.shown_windows)]
            )
            rank = item.rank if item.rank in other.ranks else other.ranks[0]
            pieces = self._pieces.get((other.status, rank, window, item.operation.name))
            if not pieces:
                continue
            times.append(sum(piece.end_ms - piece.start_ms for piece in pieces))
            on = f" on rank {rank}" if len(other.ranks) > 1 else ""
            often = f" in {len(pieces)} pieces" if len(pieces) > 1 else ""
            start = self._time_in_window(other, window, min(piece.start_ms for piece in pieces))
            yield f"{other.status}: {_format_ms(times[-1])}{on}{often}, starts {start}"
        if len(times) > 1 and times[0]:
            yield f"ratio: {times[1] / times[0]:.2f} measured / predicted"

    def _time_in_window(self, panel: Panel, window: int, time_ms: float) -> str:
        """Returns text that says how long after the start of its window a time is. A window is a backward and the next
        forward.

        Args:
            panel: the timeline (predicted or measured).
            window: the index of the window.
            time_ms: the time, in ms since the start of the first window.
        """
        if window not in panel.windows:
            return "outside of the windows"
        return f"{_format_ms(time_ms - panel.starts_ms[window])} into its window"


def name(item: Item) -> str:
    """Returns the name of an operation, wait or gap. The name is the same in every window."""
    if isinstance(item, Span):
        return item.operation.name
    return f"waits for {item.launch}" if isinstance(item, Wait) else "between operations"


def _format_ms(time_ms: float) -> str:
    """Formats a time in milliseconds as text."""
    return f"{time_ms:.{3 if abs(time_ms) < 10 else 2}f} ms"
