"""Reads pictures from a saved `.json` for drawing in another format: the inverse of `trace.render`.

A trace has no dependences, so that no held memory is computed from it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from embrace_fx.vocabulary.schedule import Operation, Schedule, Span, StepGraph, Timeline, Wait


def read_trace(path: str | os.PathLike[str]) -> tuple[Schedule | None, Timeline | None]:
    """Reads the prediction and the measurement, None if missing, from a saved `.json`.

    Raises:
        ValueError: there is no such file, or it is no trace of embrace_fx.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        other = content["otherData"]
        ranks = {
            event["pid"]: re.fullmatch(r"(predicted|measured), rank (\d+)", event["args"]["name"])
            for event in content["traceEvents"]
            if event["ph"] == "M" and event["name"] == "process_name"
        }
        measured = _timeline(content["traceEvents"], ranks, "measured")
        predicted = _timeline(content["traceEvents"], ranks, "predicted")
        schedule = None if predicted is None or "schedule" not in other else _schedule(predicted, other)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        is_unread = isinstance(error, OSError | json.JSONDecodeError)
        found = f"{type(error).__name__}: {error}" if is_unread else "other data"
        raise ValueError(
            f"expected a schedule or a timeline saved as .json, in {path}, found {found}. Save it by "
            "model.schedule.save(path) or model.timeline.save(path)."
        ) from error
    if schedule is None and measured is None:
        raise ValueError(f"expected a schedule or a timeline saved as .json, in {path}, found a trace of other events.")
    return schedule, measured


def _timeline(events: Iterable[Any], ranks: dict[int, re.Match[str] | None], status: str) -> Timeline | None:
    lanes: dict[tuple[int, int], Any] = {}
    spans, waits = [], []
    of_status = {pid: int(found[2]) for pid, found in ranks.items() if found is not None and found[1] == status}
    events = [event for event in events if event["pid"] in of_status]
    for event in events:
        if event["ph"] == "M" and event["name"] == "thread_name":
            lanes[event["pid"], event["tid"]] = event["args"]["name"].partition(" ")[0]
    for event in events:
        if event["ph"] != "X":
            continue
        args, rank = event["args"], of_status[event["pid"]]
        start_ms, end_ms = event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3
        if "launch" in args:
            waits.append(Wait(args["launch"], args["class"], args["window"], rank, start_ms, end_ms))
        else:
            operation = Operation(
                event["name"],
                args["kind"],
                lanes[event["pid"], event["tid"]],
                args["duration_alone_ms"],
                args["sent_bytes"],
                tuple(args["serves"].split(", ")) if args["serves"] else (),
                args["held_bytes"],
            )
            spans.append(Span(operation, args["window"], rank, start_ms, end_ms))
    return Timeline(tuple(spans), tuple(waits), len(of_status)) if spans else None


def _schedule(predicted: Timeline, other: dict[str, Any]) -> Schedule:
    first = sorted((span for span in predicted.spans if span.window == 0), key=lambda span: span.start_ms)
    operations = tuple({span.operation.name: span.operation for span in first}.values())
    compute = tuple(operation.name for operation in operations if operation.is_compute)
    steps = StepGraph(operations, (), compute)
    return Schedule(other["schedule"], tuple(other["launch_order"]), steps, predicted, (), other["source"])
