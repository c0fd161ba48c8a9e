"""Saves a picture as `.json` in the Chrome trace event format, for Perfetto and chrome://tracing.

There is a process per rank, predicted before measured; a thread per lane; a complete event per span and per wait, in
microseconds; and flow arrows along the critical path, if it is known. `otherData` has the metrics, and schedule and
timeline as plain data, which `read_trace` restores to draw them in another format.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, fields
from itertools import count, pairwise
from pathlib import Path
from typing import Any

from embrace_fx.viz.palette import paint
from embrace_fx.viz.picture import MIB, Panel, Picture
from embrace_fx.vocabulary.operation_id import LANES, Lane
from embrace_fx.vocabulary.plain_data import from_plain, to_plain
from embrace_fx.vocabulary.schedule import Schedule, Span, Timeline, Wait

Event = dict[str, Any]
_NANOSECOND_US = 0.001


def render(picture: Picture) -> str:
    """Returns a picture (the timelines of a schedule, a measurement or both) as the text of a JSON file in the Chrome
    trace event format.
    """
    pids = count(1)
    events: list[Event] = []
    for panel in picture.panels:
        places = {rank: next(pids) for rank in panel.ranks}
        for rank, pid in places.items():
            events.extend(_rank_events(panel, rank, pid))
        events.extend(_arrows(panel, places[panel.ranks[0]]))
    other: dict[str, Any] = {panel.status: asdict(panel.diagnostics) for panel in picture.panels}
    if picture.schedule is not None:
        other["schedule"] = picture.schedule.name
        other["launch_order"] = picture.schedule.launch_order
        other["digest"] = picture.schedule.digest()
        other["source"] = picture.schedule.source
    other["drawn"] = [_plain_data(Schedule, picture.schedule), _plain_data(Timeline, picture.timeline)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}, allow_nan=False)


def read_trace(path: str | os.PathLike[str]) -> tuple[Schedule | None, Timeline | None]:
    """Reads the predicted schedule and the measured timeline from a `.json` file that embrace_fx has written. Each is
    None if the file does not have it.

    Raises:
        ValueError: the file is missing or not a trace of embrace_fx.
    """
    try:
        schedule, timeline = json.loads(Path(path).read_text(encoding="utf-8"))["otherData"]["drawn"]
        return from_plain(Schedule | None, schedule, "schedule"), from_plain(Timeline | None, timeline, "timeline")
    except (OSError, ValueError, KeyError, TypeError) as error:
        is_unread = isinstance(error, OSError | json.JSONDecodeError)
        found = f"{type(error).__name__}: {error}" if is_unread else "other data"
        raise ValueError(
            f"{path} does not contain a schedule or timeline: {found}. Pass a .json file that was written by "
            "model.schedule.save(path) or model.timeline.save(path)."
        ) from error


def _plain_data(cls: type[Schedule | Timeline], value: Schedule | Timeline | None) -> Any:
    """Converts a schedule or timeline to JSON types: a dict of its fields. Returns None for None.

    Args:
        cls: the class whose fields to convert: `Schedule` or `Timeline`. Fields that only a subclass has are left out.
        value: the schedule or timeline.
    """
    return None if value is None else {field.name: to_plain(getattr(value, field.name)) for field in fields(cls)}


def _rank_events(panel: Panel, rank: int, pid: int) -> Iterator[Event]:
    """Yields the trace events of one rank.

    Args:
        panel: the predicted or the measured timeline.
        pid: the process number of the rank in the trace.
    """
    yield _name_event("process", pid, 0, f"{panel.status}, rank {rank}")
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    for lane in panel.lanes:
        for number, row in enumerate(panel.rows[rank, lane]):
            tid = _thread_id(panel, lane, number)
            yield _name_event("thread", pid, tid, lane if number == 0 else f"{lane} ({number + 1})")
            yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}
            for span in row:
                operation = span.operation
                args = {
                    "window": span.window,
                    "kind": operation.kind,
                    "serves": ", ".join(operation.serves),
                    "sent_bytes": operation.sent_bytes,
                    "held_bytes": operation.held_bytes,
                    "duration_alone_ms": operation.duration_ms,
                    "status": panel.status,
                }
                yield _interval_event(operation.name, paint(operation), pid, tid, span, args)
    for point in panel.timeline.memory:
        if point.rank == rank:
            mib = round(point.held_bytes / MIB, 3)
            yield {"ph": "C", "name": "memory", "pid": pid, "tid": 0, "ts": _to_us(point.at_ms), "args": {"MiB": mib}}
    for wait in panel.waits_of(rank):
        args = {"window": wait.window, "launch": wait.launch, "class": wait.lane, "status": panel.status}
        yield _interval_event(f"wait for {wait.launch}", "wait", pid, _thread_id(panel, "compute", 0), wait, args)


def _arrows(panel: Panel, pid: int) -> Iterator[Event]:
    """Yields the trace events that draw arrows along the critical path, from the end of each operation to the start of
    the next.

    Args:
        panel: the predicted or the measured timeline.
        pid: the process number, in the trace, of the first rank, to which the path belongs.
    """
    tids = {
        id(span): _thread_id(panel, lane, number)
        for (_, lane), rows in panel.rows.items()
        for number, row in enumerate(rows)
        for span in row
    }
    for number, (before, after) in enumerate(pairwise(panel.critical_spans)):
        shared = {"name": "critical path", "cat": "critical path", "id": number, "pid": pid}
        last_us = max(_to_us(before.start_ms), _to_us(before.end_ms) - _NANOSECOND_US)
        yield {"ph": "s", **shared, "tid": tids[id(before)], "ts": round(last_us, 3)}
        yield {"ph": "f", "bp": "e", **shared, "tid": tids[id(after)], "ts": _to_us(after.start_ms)}


def _thread_id(panel: Panel, lane: Lane, row: int) -> int:
    """Returns the thread number in the trace for one row of a lane. A lane has several rows if its operations overlap.
    Viewers sort rows by this number.
    """
    most = max(len(rows) for rows in panel.rows.values())
    return LANES.index(lane) * most + row + 1


def _name_event(event: str, pid: int, tid: int, name: str) -> Event:
    """Returns the trace event that gives a process or a thread its name.

    Args:
        event: "process" or "thread".
        pid, tid: the numbers of the process and the thread in the trace.
    """
    return {"ph": "M", "name": f"{event}_name", "pid": pid, "tid": tid, "args": {"name": name}}


def _interval_event(name: str, category: str, pid: int, tid: int, item: Span | Wait, args: dict[str, Any]) -> Event:
    """Returns the trace event of a span or wait (`item`).

    Args:
        name, category: the event's name, and its category, which decides its colour.
        pid, tid: the numbers of its process (a rank) and thread (a row of a lane).
        args: facts shown with the event.
    """
    start_us = _to_us(item.start_ms)
    duration_us = round(_to_us(item.end_ms) - start_us, 3)
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": pid,
        "tid": tid,
        "ts": start_us,
        "dur": duration_us,
        "args": args,
    }


def _to_us(time_ms: float) -> float:
    """Converts a time from ms to µs, rounded to the nanosecond, so that consecutive spans stay adjacent."""
    return round(time_ms * 1e3, 3)
