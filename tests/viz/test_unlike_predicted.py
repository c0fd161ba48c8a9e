"""What a step's time is spent on, in words; a measured step unlike the predicted one is told, with an option to try."""

from __future__ import annotations

from dataclasses import replace

from embrace_fx.viz.why import LEFT, compare_to_prediction, explain_step
from embrace_fx.vocabulary.operation_id import compute_id
from embrace_fx.vocabulary.schedule import Operation, Schedule, Span, StepGraph, Timeline, Wait
from embrace_fx.vocabulary.step_parts import SHARES, Share
from tests.support.golden import brief, check_golden

STEP_MS = 100.0


def schedule(name: str, wait_ms: float = 0.0) -> Schedule:
    """Returns a schedule whose steps consist of `STEP_MS` ms of compute, the last of it a wait."""
    operation = Operation.from_id(compute_id("backward", "a"), STEP_MS - wait_ms)
    ends = [(window, (window + 1) * STEP_MS) for window in range(2)]
    spans = tuple(Span(operation, window, 0, end - STEP_MS, end - wait_ms) for window, end in ends)
    waits = tuple(Wait("b", "dense", window, 0, end - wait_ms, end) for window, end in ends if wait_ms)
    return Schedule(name, (), StepGraph((operation,), (), ()), Timeline(spans, waits, 1))


def shares(**ms: float) -> dict[Share, float]:
    return {part: ms.get(part, 0.0) for part in SHARES}


LIKE = [shares(backward=part * STEP_MS, loader=1000.0) for part in (1 - 0.9 * LEFT, 1.0, 1 + 0.9 * LEFT)]
UNLIKE = [shares(backward=ms, dense=wait_ms) for ms, wait_ms in ((140, 0), (100, 60), (50, 0), (70, 1), (90, 50))]


def test_what_is_told() -> None:
    lines = [str(explain_step({"backward": 5.0, "ids": 0.19, "dense": 0.1, part: 6.0})) for part in SHARES]
    lines += [brief(explain_step(shares(backward=9.0, dense=1.0, ids=0.1, delayed=0.2), "A step is said to take"))]
    lines += [str(explain_step(shares()))]
    for name in ("2d", "none"):
        lines += [compare_to_prediction(each, schedule(name)) or "as predicted" for each in (*LIKE, *UNLIKE)]
        lines += [compare_to_prediction(each, schedule(name, 40.0)) or "as predicted" for each in UNLIKE]
    lines += [compare_to_prediction(UNLIKE[0], replace(schedule("2d"), predicted=Timeline((), (), 1)))]
    check_golden("why", "\n".join(lines))
